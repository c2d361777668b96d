"""A plan's programs bound to one rank's memory: what a runtime steps with, and what is rebuilt over a remapped window.

Streams, slots, bound lists, and whether they may be used now. Not thread-safe: the runtime locks.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from graphshard._core import Driver, DriverError, Memory, Stream, Word
from graphshard.comm.alignment import Alignment, Awaited, IssueKind, JointStep
from graphshard.comm.control import ControlTable
from graphshard.comm.transport import Transport
from graphshard.core.errors import CommError, DeviceError, GraphshardError, ProgramError, SpecError
from graphshard.core.ops import AgLaunch
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BlockGround, BoundProgram, Ground, Hooks, bind_programs
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.device_bytes import read_bytes
from graphshard.runtime.embedding import Embedding
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.slots import SlotTable


def refuse_fork(owner_pid: int) -> None:
    """DeviceError in a process that is not the runtime's: a fork has its memory, but not its threads."""
    if os.getpid() != owner_pid:
        raise DeviceError(
            f"the runtime of process {owner_pid} was used in process {os.getpid()}, a fork of it: "
            "start ranks by spawn, and compile in each"
        )


def leave_behind(*owners: object) -> None:
    """Keep what stuck work uses until the process ends: giving it back would wait for that work."""
    _left_behind.append(owners)


_left_behind: list[tuple[object, ...]] = []


class Binding:
    """The base of `Runtime`."""

    _control: ControlTable
    _lender: Binding | None = None
    """Whose resident weights this one reads in their place, if it borrows some."""

    def __init__(
        self,
        compiled: Compiled,
        *,
        rank: int,
        driver: Driver,
        memory: RuntimeMemory,
        transport: Transport,
        alignment: Alignment,
        hooks: Hooks,
        blocks: BlockGround | None = None,
    ) -> None:
        self.model, self.plan, self.layout = compiled.model, compiled.plan, compiled.layout
        self.programs = dict(compiled.programs)
        self.rank = rank
        """This process's (or thread's) rank in the shard group."""
        self.driver, self.hooks = driver, hooks
        self._memory, self._transport, self._alignment = memory, transport, alignment
        self._blocks = blocks
        self._streams: dict[str, Stream] = {}
        self._bound: dict[StepShape, BoundProgram] = {}
        self._generations: tuple[int, ...] = ()
        self._closed = False
        self._owner_pid = os.getpid()
        self._late = False
        self._is_unfinished = False
        """Work was handed over that nobody waits for: its call was interrupted, or the driver refused the rest."""
        self._is_last_joint = False
        """Whether what was handed over last was a step that all ranks take together."""
        self._torn: GraphshardError | None = None
        """Why the weights are of no version: an update did not end."""
        self._updating = threading.RLock()
        """Held by a thread that updates."""
        self._embedding: Embedding | None = None
        self._num_steps = 0
        self._reserve_streams()
        self._bind()

    @property
    def timeout_s(self) -> float:
        """The longest that the host waits for anything. May be set between steps."""
        return self._alignment.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._alignment.timeout_s = timeout_s

    @property
    def lender(self) -> Binding | None:
        """Whose resident weights this one reads in their place, if it borrows some."""
        return self._lender

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def is_torn(self) -> bool:
        """Whether the weights that this runtime owns are of no version, since an update did not end."""
        return self._torn is not None

    def check_open(self) -> None:
        """ProgramError if the runtime was closed, DeviceError in a forked child."""
        refuse_fork(self._owner_pid)
        if self._closed:
            raise ProgramError("this runtime is closed; compile the model again")

    def check_weights(self) -> None:
        """CommError if the weights are of no version, since an update did not end; ProgramError if closed."""
        self.check_open()
        if self._torn is not None:
            raise CommError(f"rank {self.rank}: {self._torn}; {self._torn_text()}")
        if self._lender is not None:
            self._lender.check_lends(self.model.borrowed)

    def check_lends(self, weights: Sequence[str]) -> None:
        """Used by whoever borrows `weights`: as `check_weights`, and ProgramError if their owner was closed."""
        if self._closed:
            raise ProgramError(
                f"the runtime of {self.model.name}, which lends {', '.join(weights)}, is closed: close what borrows "
                "from it first"
            )
        self.check_weights()

    def _torn_text(self) -> str:
        return (
            f"the weights are of no version (epoch {self._control.mine.epoch}): run a complete update, with nothing "
            "left out, if all ranks live, else start all ranks anew"
        )

    def _check_ready(self) -> None:
        self.check_weights()
        self._leave_last_use()

    @property
    def _is_cut_off(self) -> bool:
        """Whether what is enqueued may never end, since a peer that it needs gave up.

        Without collectives it ends: what tensor-parallel blocks wait for is let go then, and gathers need nobody.
        """
        return self._alignment.broken is not None and self._transport.is_collective

    def _leave_last_use(self) -> None:
        """What was late or interrupted has ended, and what C replayed or prefetched."""
        if self._is_unfinished and not self._is_cut_off:
            is_joint = self._is_last_joint and self._alignment.broken is None  # else it has been let go
            awaited = Awaited("the end of what was interrupted", self._num_steps, str, is_joint=is_joint)
            streams = self._streams.values()
            self._late = not all(self._alignment.wait(stream.synchronize, awaited) for stream in streams)
            self._is_unfinished = False
        if self._late:
            if not all(stream.is_idle() for stream in self._streams.values()):
                raise DeviceError(
                    f"rank {self.rank}: what was issued before did not end within {self.timeout_s:.1f} s and is still "
                    "running; close the runtime, or wait for it"
                )
            self._late = False
        if self._embedding is not None and self._embedding.take_over(self.timeout_s):
            self._slots.forget()

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """The block hands work over, and may wait for it. Where it does not get to that, the next call waits first.

        Else what still runs would tell the end of that call's work, or write into its slots.
        """
        try:
            yield
        except BaseException as error:
            if isinstance(error, DriverError) or not isinstance(error, Exception):
                self._is_unfinished = True
            raise

    @contextmanager
    def _telling_peers(self, what: str) -> Iterator[None]:
        """The block issues `what`, which has been posted; if it cannot, peers are told, who would wait in vain."""
        try:
            yield
        except Exception as error:
            failure = self._alignment.fail(error, what)
            if failure is not None:
                raise failure from error
            raise

    def _before_gathers(self, kind: IssueKind, units: Sequence[int], what: str, joint: JointStep | None = None) -> None:
        """Gathers of `units` are about to be issued: let peers know, and drain what a collective transport wants ended.

        With `joint` it is a step that all ranks take together.

        Raises:
            CommError: a peer gave up, or issues others; or what was issued before did not end.
        """
        self._is_last_joint = joint is not None
        if not units and joint is None:
            return
        self._alignment.check(what)
        if self._alignment.must_drain(kind):
            awaited = Awaited(f"the end of what was issued before {what}", self._num_steps, str)
            for stream in self._streams.values():
                self._alignment.wait(stream.synchronize, awaited)
        self._alignment.issue(kind, units, what, joint)

    def _check_generations(self, shape: StepShape) -> None:
        if self._generations != self._transport.generations():
            raise DeviceError(
                f"step shape {shape} was bound to windows that have been remapped or closed since: its addresses are "
                "stale; call Runtime.capture, which binds and captures again"
            )

    def gather_now(self, unit: int, slot: int) -> None:
        """Have `unit` in `slot` between steps, with the lock held; the host waits for its bytes.

        As collective as the transport's gathers are.
        """
        self._check_ready()
        if self._slots.held[slot] != unit:
            with self._handing_over(), self._telling_peers(f"the gather of unit {unit} outside a step"):
                self._slots.gather([AgLaunch(unit, slot, "prefetch")])
        awaited = Awaited(f"unit {unit} outside a step", self._num_steps, str)
        for stream in (self._streams["compute"], self._streams["prefetch"]):
            if not self._alignment.wait(stream.synchronize, awaited):
                raise CommError(
                    f"rank {self.rank} waited {self.timeout_s:.1f} s for unit {unit} outside a step; "
                    "a peer's memory does not answer"
                )

    def forget_slots(self) -> None:
        """Rely on nothing that slots hold: somebody wrote to them. With the lock held."""
        self._slots.forget()

    def _drain(self) -> str | None:
        """Wait for all that is enqueued, tail prefetches included; bounded for all streams together.

        Returns why that was given up; None if all has ended.
        """

        def is_over(seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            streams = self._streams.values()
            return all(stream.synchronize(max(0.0, deadline - time.monotonic())) for stream in streams)

        is_posted = self._embedding is None or self._embedding.num_replays == 0
        return self._alignment.drain(is_over, is_posted=is_posted)

    def check_gathers(self, rank: int | None = None) -> None:
        """Gather every unit once and compare each rank's chunk, or only `rank`'s, with its owner's checksum.

        Raises:
            CommError: naming the reading rank, the source rank and the unit; the rest is gathered nevertheless, as it
                is by the other ranks.
        """
        failure: CommError | None = None
        for slot, unit in {r.unit: (r.slot, r.unit) for r in self.plan.residencies}.values():
            self.gather_now(unit, slot)
            try:
                self._transport.verify_unit(unit, read_bytes(self._memory.slot(slot)), rank)
            except CommError as error:
                failure = failure or error
        self._slots.forget()
        if failure is not None:
            raise failure

    def _reserve_streams(self) -> None:
        names = ["compute", "copy", *(f"copy{i}" for i in range(1, self.plan.num_copy_streams)), "copy_own", "prefetch"]
        self._streams = {name: Stream(self.driver) for name in names}
        if self.hooks.prefetch_stream is not None:
            self._streams["prefetch"] = self.hooks.prefetch_stream
        if self._blocks is not None:
            streams = tuple(self._streams.values())
            self._blocks.exchange.watch(lambda: all(stream.is_idle() for stream in streams))
        self._done = Word(Memory.allocate_host(self.driver, 4))
        self._ground = Ground(
            self.driver,
            self._memory,
            self._transport,
            self._streams,
            self._done,
            num_copy_streams=self.plan.num_copy_streams,
            hooks=self.hooks,
            progress=self._alignment.progress,
            blocks=self._blocks,
        )
        before_gathers = partial(self._before_gathers, "outside", what="gathers outside a step")
        self._slots = SlotTable(len(self.layout.slots), self._ground, before_gathers)

    def _known(self, shape: StepShape) -> StepShape:
        if shape not in self.programs:
            known = ", ".join(map(str, sorted(self.programs)))
            raise SpecError(f"step shape {shape} is not among the plan's: {known}; add it to capture_sizes")
        return shape

    def _bind(self) -> None:
        """Bind all programs to the windows as they are mapped now."""
        self._bound = bind_programs(self.programs, self._ground)
        self._generations = self._transport.generations()
