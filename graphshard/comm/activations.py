"""Activations between ranks under pull: the tokens and partial sums of tensor-parallel blocks, copied from peers.

Every rank exports two windows, once: its staging memory (`tp.tokens`, `tp.partial`), which peers read, and its flag
words, which peers write. An act_gather is an entry barrier and a copy from each rank, a reduce_scatter an exit barrier
and a copy from each rank: csrc/runtime/flags.h, in its captured form for eager steps and captures alike, since their
values are constants; so ranks may mix the two.

# Note [who may write when]
Note [two barriers a block] of core.lowering says why two barriers are enough where each rank's compute stream does
nothing but steps. Three things happen beside steps:
  capture   records a block's segments over the staging memory itself. So all ranks meet before it, each with nothing
            enqueued (`joint.Joint.agree_on_capture`); none copies then, and a rank that is done first, and begins a
            step, waits at its first entry for the others to have finished theirs.
  update    writes slices where they lie: all ranks have stopped.
  an error  a rank that gives up lets its own waits pass (`break_off`), so that its streams end. It has posted its
            failure before, so whoever passes a barrier thanks to that finds it before outputs are believed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from graphshard._core import Communicator, DriverError, FlagBarrier, Memory, Stream
from graphshard.comm.alignment import Alignment
from graphshard.comm.control import ControlTable
from graphshard.comm.group import Group
from graphshard.comm.joint import Joint
from graphshard.comm.lockstep import Lockstep
from graphshard.comm.windows import WindowTable
from graphshard.core.errors import CommError
from graphshard.core.lowering import ActCollective, ActCopies, ActOp, FlagWait, FlagWrite
from graphshard.device.base import Device

STAGING = "tp.staging"
"""The name of the window that holds a rank's tokens and partial sums."""
FLAGS = "tp.flags"
"""The name of the window that holds a rank's flag words."""
MOST_RANKS = 85
"""A batch of flag words holds 256, see csrc/runtime/flags.h."""
RELEASE_S = 5.0
"""The longest that closing waits for the streams of a rank that gave up."""
_RELEASE_EVERY_S, _SELDOM_S = 0.001, 0.02
"""How often such a rank lets its own waits pass; seldom once `RELEASE_S` have gone by."""


@dataclass(frozen=True, slots=True)
class ActPlace:
    """Where the activations of one block lie on this rank, at one step shape. Addresses, bytes."""

    tokens: int
    gathered: int
    partial: int
    received: int
    """A place for each rank's partial sums of this rank's tokens; no matter of a collective transport."""
    summed: int
    token_bytes: int
    """Of `tokens`: one rank's."""
    partial_bytes: int
    """Of `summed`: one rank's tokens."""
    num_elements: int
    """Of `summed`."""
    dtype: str
    header: int
    """Equal on all ranks that run this list, another one for other lists; 32 bits, not 0."""


class PullActivations:
    """The staging windows of all ranks, mapped, and the flags between them. Made by all ranks at once."""

    collectives: tuple[Communicator, ...] = ()

    def __init__(self, device: Device, group: Group, staging: Memory) -> None:
        """Exchange windows (collective).

        Args:
            device: maps the peers' windows.
            group: the ranks that compute together.
            staging: exportable; tokens and partial sums lie at equal offsets on all ranks.

        Raises:
            CommError: too many ranks for the flag words, or ranks have windows of unlike sizes.
            DeviceError: a window cannot be exported or mapped on some rank.
        """
        if group.world_size > MOST_RANKS:
            raise CommError(f"{group.world_size} ranks share a tensor-parallel block: {MOST_RANKS} can")
        self._rank, self._world_size = group.rank, group.world_size
        self._driver, self._staging = device.driver, staging
        flags = group.agree(FLAGS, lambda: device.allocate(FlagBarrier.area_bytes(group.world_size), exportable=True))
        self._windows = WindowTable(device, group)
        self._windows.register({STAGING: staging})
        self._windows.register({FLAGS: flags}, read_only=False)
        ranks = range(group.world_size)
        self._barrier = FlagBarrier([self._windows.window(FLAGS, rank).address for rank in ranks], group.rank)
        self._headers: set[int] = set()
        self._release: _Release | None = None
        self._is_idle: Callable[[], bool] = lambda: False

    @property
    def num_registrations(self) -> int:
        """Windows registered: the staging memory and the flags."""
        return self._windows.num_registrations

    def ops(self, op: ActOp, place: ActPlace, stream: int) -> list[tuple[object, ...]]:
        """The lowered `op`, as ops for `_core.OpList`, on its stream `stream`; a sum is compute, and none of these.

        Order:   the lists of all ranks have the same ones in the same order; each block whole.
        Blocks:  the stream until all ranks have come to the barrier; never the host.
        Capture: yes; two batches of flag words and a copy a rank for each pair of barrier and copies.
        """
        assert not isinstance(op, ActCollective), op
        if isinstance(op, FlagWrite | FlagWait):
            self._headers.add(place.header)
            writes, waits = self._barrier.entry(place.header) if op.barrier == "entry" else self._barrier.exit()
            return [("values", stream, tuple(writes if isinstance(op, FlagWrite) else waits))]
        assert isinstance(op, ActCopies), op
        order = [(self._rank + step) % self._world_size for step in range(1, self._world_size + 1)]
        return [self._copy(op, place, stream, rank) for rank in order]

    def _copy(self, op: ActCopies, place: ActPlace, stream: int, rank: int) -> tuple[object, ...]:
        moved = self._windows.window(STAGING, rank).address - self._staging.address
        if op.what == "tokens":
            size, destination, source = place.token_bytes, place.gathered, place.tokens
        else:
            size, destination = place.partial_bytes, place.received
            source = place.partial + self._rank * size
        return ("copy", stream, destination + rank * size, source + moved, size)

    def alignment(self, gathers: Alignment, control: ControlTable, timeout_s: float, shapes: Sequence[str]) -> Joint:
        """Steps of `shapes` need all ranks, each named by the others' errors if it does not come."""
        lockstep = Lockstep(control, self._rank, self, timeout_s, noun="part in tensor-parallel steps")
        return Joint(gathers, lockstep, shapes)

    def watch(self, is_idle: Callable[[], bool]) -> None:
        """See `Activations`."""
        self._is_idle = is_idle

    # --- what lockstep asks of a communicator ---

    def settings(self) -> Mapping[str, str]:
        """Nothing but what certificates have."""
        return {}

    def async_error(self) -> str | None:
        """Copies and flags have no state that could go wrong in the background."""
        return None

    def break_off(self) -> None:
        """Peers will not come: let what waits here pass, in the background, until this rank's streams are idle."""
        if self._release is None:
            words = [
                (self._barrier.address(self._rank, peer, word), word)
                for peer in range(self._world_size)
                if peer != self._rank
                for word in ("header", "entry", "exit")
            ]
            self._release = _Release(Stream(self._driver), words, tuple(self._headers), self._is_idle)

    def close(self) -> None:
        """Unmap the peers' windows. Local, bounded, idempotent; graphs that read them must be gone."""
        if self._release is not None:
            self._release.stop()
        self._windows.close()


class _Release:
    """Writes what this rank waits for into its own flag words, again and again, on a stream and a thread of its own."""

    def __init__(
        self, stream: Stream, words: list[tuple[int, str]], headers: tuple[int, ...], is_idle: Callable[[], bool]
    ) -> None:
        self._stream, self._words, self._headers, self._is_idle = stream, words, headers, is_idle
        self._must_end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="graphshard flags", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread when the streams are idle, or after `RELEASE_S`: it must be gone before the words are."""
        self._thread.join(RELEASE_S)
        self._must_end.set()
        self._thread.join(RELEASE_S)

    def _run(self) -> None:
        try:
            begin = time.monotonic()
            while True:  # however long a segment computes, what it comes to then must pass
                for header in self._headers:
                    for address, word in self._words:
                        self._stream.write_value(address, header if word == "header" else 1)
                    self._stream.synchronize(RELEASE_S)
                    is_late = time.monotonic() - begin > RELEASE_S
                    if self._must_end.wait(_SELDOM_S if is_late else _RELEASE_EVERY_S) or self._is_idle():
                        return
        except DriverError:
            return  # the process ends
