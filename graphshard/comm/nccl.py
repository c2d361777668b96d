"""The NCCL transport: a unit is one all-gather over symmetric windows, by the copy engines; if sliced, one a weight.

All ranks issue the same gathers in the same order, eagerly or captured alike: see `comm.lockstep`. Each allocation is
one window, registered once, in the order shards, slots.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from graphshard._core import Communicator, DriverError, Memory, NcclError, NcclLibrary, Stream, Word
from graphshard.comm import nccl_activations
from graphshard.comm.activations import ActPlace
from graphshard.comm.checksums import ChunkChecksums
from graphshard.comm.control import ControlTable
from graphshard.comm.doors import RankRecord
from graphshard.comm.group import Group
from graphshard.comm.lockstep import Lockstep
from graphshard.comm.nccl_activations import NcclActivations
from graphshard.comm.nccl_gates import (
    VARIABLES,
    NcclFacts,
    Verdict,
    judge,
    not_available,
    raise_if_refused,
    version_text,
)
from graphshard.comm.nccl_library import find_library
from graphshard.comm.transport import BoundOp, Remappable, Transport, WindowUse
from graphshard.core.errors import CommError
from graphshard.core.layout import Layout, UnitLayout
from graphshard.device.base import Device

PURPOSE = "weights"
"""Gathers of weights have a communicator for themselves."""
NUM_WARMUPS = 2
"""Eager gathers before anything is captured: the first set up what is set up lazily."""
DESTROY_TIMEOUT_S = 2.0
"""The longest that closing waits for peers, which destroy their ends too."""
ABORT_TIMEOUT_S = 1.0
"""The longest that closing waits for an abort, which is local."""


class NcclOpening:
    """The library and the communicator; what a rank has before memory is reserved."""

    name = "nccl"
    is_collective = True
    why_no_rejoin: str | None = (
        "a communicator cannot take in a rank that came back: start all ranks anew, or use transport pull"
    )

    def __init__(self, device: Device, group: Group, *, timeout_s: float, progress: bool = False) -> None:
        """Load the library and judge it. Local.

        Args:
            device: the device, whose kind chooses the library.
            group: the ranks of the communicator.
            timeout_s: the longest that this rank waits for the others.
            progress: gathers write how far they are, so that a timeout names who is behind.

        Raises:
            CommError: no library, or its version, the driver or the environment cannot do it; with all reasons.
        """
        self._device, self._group, self._timeout_s, self._progress = device, group, timeout_s, progress
        path = find_library(device)
        try:
            self._library = NcclLibrary(str(path), device.driver)
        except (NcclError, DriverError) as error:
            raise not_available(f"{path} cannot be loaded: {error}") from error
        self.facts = nccl_facts(device, self._library, group.world_size)
        self.verdicts = judge(self.facts)
        raise_if_refused(self.verdicts)
        _apply(self.verdicts)
        self._communicator: Communicator | None = None

    @property
    def settings(self) -> Mapping[str, str]:
        """The library's version, and the environment that NCCL looks at."""
        return {"progress": str(self._progress), **nccl_settings(self._library)}

    def start(self) -> None:
        """Make the communicator (collective, bounded)."""
        self._communicator = self._new_communicator(PURPOSE)

    def _new_communicator(self, purpose: str) -> Communicator:
        group = self._group
        is_first = group.rank == 0
        ident = group.agree("nccl unique id", lambda: self._library.unique_id().hex() if is_first else "")
        told = [str(value) for value, _ in group.all_gather(ident, name="nccl unique id of rank 0")]
        name = f"graphshard {purpose} {group.path}"
        return group.agree(
            "nccl communicator",
            lambda: Communicator(
                self._library, bytes.fromhex(told[0]), group.world_size, group.rank, name, self._timeout_s
            ),
        )

    def allocate(self, use: WindowUse, num_bytes: int) -> Memory:
        """Zeroed memory from `ncclMemAlloc`."""
        assert self._communicator is not None, "start() comes first"
        try:
            return self._communicator.allocate(num_bytes)
        except NcclError as error:
            raise CommError(f"rank {self._group.rank} got no {num_bytes} B for its {use} from NCCL: {error}") from error

    def connect(
        self,
        layout: Layout,
        shards: Memory | None,
        slots: Memory | None,
        checksums: Sequence[int],
        peers: Sequence[RankRecord] | None = None,
    ) -> NcclTransport:
        """Register the windows, compare checksums, warm up (collective)."""
        if peers is not None:
            raise CommError(f"rank {self._group.rank} came back: {self.why_no_rejoin}")
        assert self._communicator is not None, "start() comes first"
        communicator, self._communicator = self._communicator, None
        windows = (shards, slots)
        words = self._progress_words()
        transport = NcclTransport(self._group, self._library, communicator, layout, windows, words)
        try:
            transport.set_up(self._device, checksums, self._timeout_s)
        except BaseException:
            transport.close()
            raise
        return transport

    def open_activations(
        self, transport: Transport, staging: Memory, places: Sequence[ActPlace], timeout_s: float
    ) -> NcclActivations:
        """Make their communicator, which `transport` ends with its own, and warm it up (collective)."""
        del staging
        assert isinstance(transport, NcclTransport), transport
        communicator = self._new_communicator(nccl_activations.PURPOSE)
        transport.lead(communicator)
        activations = NcclActivations(self._group, communicator)
        activations.warm_up(self._device, places, timeout_s)
        return activations

    def close(self) -> None:
        """Give the communicator back, unless a transport has it."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            end_communicator(communicator)

    def _progress_words(self) -> tuple[Word, Word] | None:
        if not self._progress:
            return None
        driver = self._device.driver
        return Word(Memory.allocate_host(driver, 4)), Word(Memory.allocate_host(driver, 4))


class NcclTransport:
    """Registered windows of one communicator. Owns both; the memory is the runtime's."""

    name = "nccl"
    is_collective = True
    num_copies = 1
    remappable: Remappable | None = None

    def __init__(
        self,
        group: Group,
        library: NcclLibrary,
        communicator: Communicator,
        layout: Layout,
        windows: tuple[Memory | None, Memory | None],
        words: tuple[Word, Word] | None = None,
    ) -> None:
        """Take `communicator` over; `set_up` does the rest. `windows` are shards and slots, None if there are none."""
        self.world_size = group.world_size
        self.collectives: tuple[Communicator, ...] = (communicator,)
        self.must_exit: str | None = None
        self._group, self._library, self._communicator, self._layout = group, library, communicator, layout
        self._shards, self._slots = windows
        self._words = words
        self._registered: list[Memory] = []
        self._led: list[Communicator] = []
        self._is_broken_off = self._is_closed = False

    def set_up(self, device: Device, checksums: Sequence[int], timeout_s: float) -> None:
        """Register, compare checksums, warm up (collective).

        Raises:
            CommError: on every rank: the layout is not flat, a window was refused, or a first gather did not end.
        """
        self._group.agree("flat layout", self._check_layout)
        for use, memory in (("shards", self._shards), ("slots", self._slots)):
            if memory is not None:
                step = partial(self._register, use, memory, timeout_s)
                self._group.agree(f"window of the {use}", step)
        self._checksums = ChunkChecksums.exchange(self._group, self._layout, checksums)
        self._group.agree("nccl warm-up", lambda: self._warm_up(device, timeout_s))

    def gather_ops(self, unit: int, slot_address: int, stream: int, begin: int, end: int) -> list[BoundOp]:
        """An all-gather, or one for each weight of a sliced unit; see `Transport`.

        Peers write into the slot, once this rank's stream has come to the op.
        """
        assert (begin, end) == (0, 1), (begin, end)
        assert self._shards is not None
        base = self._shards.address
        return [
            ("all_gather", stream, 0, slot_address + part.slot_offset, base + part.source_offset, part.num_bytes)
            for part in all_gathers_of(self._layout.units[unit])
        ]

    def verify_unit(self, unit: int, slot_view: memoryview, rank: int | None = None) -> None:
        """Compare a gathered unit, or only `rank`'s chunk of it, with what its owners loaded."""
        self._checksums.verify_unit(unit, slot_view, rank)

    def adopt_checksums(self, checksums: ChunkChecksums) -> None:
        """See `Transport`."""
        self._checksums = checksums

    def generations(self) -> tuple[int, ...]:
        """Of the windows, in the order of registration."""
        return tuple(memory.generation for memory in self._registered)

    def alignment(self, control: ControlTable, timeout_s: float) -> Lockstep:
        """Ranks issue the same gathers in the same order, or end together."""
        return Lockstep(control, self._group.rank, self, timeout_s, self._words)

    def settings(self) -> Mapping[str, str]:
        """The library's version, and the environment as it is now."""
        return nccl_settings(self._library)

    def async_error(self) -> str | None:
        """What went wrong inside the library; None if nothing did."""
        return next(filter(None, (one.async_error() for one in (self._communicator, *self._led))), None)

    def lead(self, communicator: Communicator) -> None:
        """`communicator` goes on as long as this one does, and ends with it."""
        self._led.append(communicator)

    def break_off(self) -> None:
        """Peers will not come: abort in the background, as a captured gather that waits may never let go."""
        self._is_broken_off = True
        for communicator in (self._communicator, *self._led):
            communicator.abort(0.0)

    def close(self) -> None:
        """Deregister and destroy; after a failure only abort. Local, bounded, idempotent.

        What cannot be ended is left as it is, and `must_exit` says so.
        """
        if not self._is_closed:
            self._is_closed = True
            self._registered.clear()  # what was bound to the windows is stale, see `generations`
            ends = [end_communicator(one, is_broken=self._is_broken_off) for one in (*self._led, self._communicator)]
            self.must_exit = next(filter(None, ends), None)

    def _check_layout(self) -> None:
        if self._layout.world_size != self.world_size:
            raise CommError(
                f"the layout is for {self._layout.world_size} ranks, the group has {self.world_size}: "
                "plan for this group"
            )
        for unit in self._layout.units:
            reason = why_not_gathered(unit)
            if reason is not None:
                raise not_available(f"{reason}, and an all-gather takes one contiguous piece of each rank")

    def _register(self, use: str, memory: Memory, timeout_s: float) -> None:
        try:
            self._communicator.register(memory, timeout_s)
        except NcclError as error:
            raise CommError(
                f"rank {self._group.rank} could not register the window of its {use} ({memory.num_bytes} B): {error}"
            ) from error
        self._registered.append(memory)

    def _warm_up(self, device: Device, timeout_s: float) -> None:
        """Gather the smallest unit, eagerly: what is set up lazily is set up here, where every wait is bounded."""
        if not self._layout.units:
            return
        assert self._shards is not None and self._slots is not None
        unit = min(self._layout.units, key=lambda unit: unit.num_bytes)
        slot = max(self._layout.slots, key=lambda slot: slot.num_bytes)
        stream = Stream(device.driver)
        part = all_gathers_of(unit)[0]
        source = self._shards.address + part.source_offset
        for number in range(1, NUM_WARMUPS + 1):
            what = f"gather {number} of {NUM_WARMUPS} that warm {self._communicator.name} up"
            try:
                self._communicator.all_gather(
                    self._slots.address + slot.offset, source, part.num_bytes, stream, timeout_s=timeout_s
                )
            except NcclError as error:
                raise CommError(f"rank {self._group.rank}: {what} failed: {error}") from error
            if not stream.synchronize(timeout_s):
                self.break_off()
                raise CommError(
                    f"rank {self._group.rank} waited {timeout_s:.1f} s for {what}: a rank does not take part"
                )


def nccl_facts(device: Device, library: NcclLibrary, world_size: int) -> NcclFacts:
    """What the gates judge, of the library that is loaded and of this process's environment."""
    return NcclFacts(
        version=library.version,
        path=library.path,
        missing=tuple(library.missing),
        world_size=world_size,
        driver_version=device.driver.version,
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def nccl_settings(library: NcclLibrary) -> dict[str, str]:
    """What must be alike on all ranks: the version, and the environment that NCCL looks at."""
    environment = " ".join(f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ)
    return {"nccl": version_text(library.version), "nccl environment": environment or "nothing set"}


class AllGather(NamedTuple):
    """`num_bytes` at `source_offset` of each rank's shard window, to `slot_offset` of a slot, in the order of ranks."""

    slot_offset: int
    source_offset: int
    num_bytes: int


def all_gathers_of(unit: UnitLayout) -> tuple[AllGather, ...]:
    """What brings `unit` together: its chunks at once, or the slices of one weight after the other."""
    if not unit.is_sliced:
        return (AllGather(0, unit.chunk_offset, unit.chunk_bytes),)
    return tuple(
        AllGather(view.offset, unit.chunk_offset + one.offset, one.num_bytes)
        for view, one in zip(unit.views, unit.slices, strict=True)
    )


def why_not_gathered(unit: UnitLayout) -> str | None:
    """Why the copies of `unit` are not what `all_gathers_of` brings; None if they are."""
    parts = all_gathers_of(unit)
    for number, copy in enumerate(unit.copies):
        rank, which = divmod(number, len(parts))
        part = parts[which]
        place = (copy.source_rank, copy.source_offset, copy.slot_offset, copy.rows, copy.row_bytes)
        if place != (rank, part.source_offset, part.slot_offset + rank * part.num_bytes, 1, part.num_bytes):
            how, what = ("in slices", "piece") if unit.is_sliced else ("flat", "chunk")
            return f"unit {unit.unit} does not lie {how}: {what} {number} is {copy}"
    return None


def end_communicator(communicator: Communicator, *, is_broken: bool = False) -> str | None:
    """Destroy it, or abort it where that does not end; why this process must exit if neither does.

    Destroying wants all ranks, so one that is alone waits out the limit.
    """
    reason = "a captured gather that waits for a peer cannot be aborted"
    if not (is_broken or communicator.is_broken):
        try:
            if communicator.destroy(DESTROY_TIMEOUT_S):
                return None
        except NcclError as error:
            reason = str(error)
    if communicator.abort(ABORT_TIMEOUT_S):
        return None
    _left_behind.append(communicator)
    return (
        f"communicator {communicator.name!r} of rank {communicator.rank} could not be ended within "
        f"{ABORT_TIMEOUT_S:.0f} s: {reason}; end this process"
    )


_left_behind: list[Communicator] = []
"""Stuck in the library: nothing may free what they hold."""


def _apply(verdicts: Sequence[Verdict]) -> None:
    """Set what must be set before NCCL reads its environment; warn of what may go wrong."""
    for verdict in verdicts:
        if verdict.kind == "set":
            os.environ[verdict.variable] = verdict.value
        elif verdict.kind == "warn":
            warnings.warn(f"transport nccl: {verdict.reason}", stacklevel=3)
