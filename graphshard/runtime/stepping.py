"""One step of a runtime, however it is run: enter, issue, wait; and what becomes of it where it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from torch import Tensor

from graphshard._core import Calls, Step, Stream
from graphshard.comm.alignment import Awaited, IssueKind
from graphshard.comm.control import ControlTable
from graphshard.core.errors import CommError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.binding import Binding
from graphshard.runtime.compute import refuse_inside_segment
from graphshard.runtime.cuda.compute import CudaCompute
from graphshard.runtime.cuda.in_flight import InFlight
from graphshard.runtime.cuda.watchdog import Watchdog
from graphshard.runtime.embedding import Embedding
from graphshard.runtime.graphs import Captured
from graphshard.runtime.loop import StepTurn
from graphshard.runtime.weights.report import LoadReport


def step_text(number: int, shape: StepShape, is_eager: bool) -> str:
    """`step 417 of shape 4x1 (graph)`."""
    return f"step {number} of shape {shape} ({'eager' if is_eager else 'graph'})"


class Stepping(Binding):
    """The base of `Runtime` that steps, whoever computes. `run`, `StepGraph` and `StepLoop` are made of this."""

    turn: StepTurn
    load_report: LoadReport
    """What loading did on this rank; set when it has been built."""
    launch_s = 0.0
    """How long the host was busy with handing the last step to the driver: with its ops, or with one graph launch."""
    handed_over_s = 0.0
    """`time.perf_counter()` when the last step was enqueued."""
    _step_batch = 0
    """The last batch of gathers that had been issued when the last step was (`Alignment.number`)."""
    _control: ControlTable
    _eager: dict[StepShape, Calls]
    _cuda: CudaCompute | None = None
    """Who computes on a GPU; None on `host`."""
    _in_flight: InFlight | None = None
    """On a GPU, steps whose end the host has not waited for."""
    _watchdog: Watchdog | None = None
    """Who looks after those under a collective transport."""

    @property
    def is_collective(self) -> bool:
        """Whether steps need all ranks: then all make the same calls, and as many.

        They do under transport nccl, and where some step shape has tensor-parallel blocks (`is_joint`).
        """
        return self._transport.is_collective or self.is_joint

    def needs_all_ranks(self, shape: StepShape) -> bool:
        """Whether steps of `shape` need all ranks."""
        return self._transport.is_collective or bool(self.programs[shape].blocks)

    @property
    def is_joint(self) -> bool:
        """Whether some step shape has tensor-parallel blocks: all ranks take such steps at once, at one shape."""
        return any(program.blocks for program in self.programs.values())

    @property
    def broken(self) -> str | None:
        """Why no more gathers can be issued, here or on any rank (transport nccl); None if they can."""
        return self._alignment.broken

    def give_up(self, error: Exception, what: str) -> None:
        """`what` will not be issued here, for `error`: peers that wait for it are told. Nothing under pull.

        For what steps several runtimes as one: where one of them is broken the others cannot go on.
        """
        with self.turn.lock:
            self._alignment.fail(error, what)

    def step(self, shape: StepShape, bound: BoundProgram, launch: Callable[[], None], calls: Calls) -> None:
        """One step, eager or captured: prime, launch, wait for the outputs. Used by `run` and `StepGraph.replay`."""
        refuse_inside_segment("a step")
        with self.turn.lock:
            self.turn.wait_until_free()
            is_eager = calls is self._eager.get(shape)
            with self._handing_over():
                self.enter_step(shape, bound, "eager" if is_eager else "graph")
                try:
                    self.issue(f"a step of shape {shape}", launch)
                    self.finish_step(shape, bound, calls, is_eager)
                except BaseException:
                    self.forget_after_error()
                    raise

    def enter_step(self, shape: StepShape, bound: BoundProgram, kind: IssueKind) -> None:
        """Make the slots hold what the program expects. Used by steps, with the lock held."""
        self._check_ready()
        self._check_generations(shape)
        late = self._in_flight.make_room(self._alignment.wait) if self._in_flight is not None else None
        if late is not None:
            raise self.late_error(late.what, late.detail())
        number = self._num_steps + 1
        self._alignment.check(f"step {number}")
        self._alignment.begin_step(number)
        with self._telling_peers(f"gathers before step {number}"):
            self._slots.enter(bound.program)
        self._before_gathers(kind, bound.gathers, step_text(number, shape, kind == "eager"), bound.joint)
        self._done.store(0)

    def finish_step(self, shape: StepShape, bound: BoundProgram, calls: Calls, is_eager: bool) -> None:
        """All is enqueued: wait for the outputs. Used by steps, with the lock held."""
        self._slots.leave(bound.program)
        if self._embedding is not None:
            self._embedding.hand_over()
        self._num_steps += 1
        self._step_batch = self._alignment.number
        awaited = self._awaited(self._num_steps, shape, bound, is_eager)
        self.handed_over_s = time.perf_counter()
        if self._in_flight is not None:
            # when it is waited for, the list's events are those of a later step
            self._in_flight.launched(bound.streams[0], replace(awaited, detail=str))
            self._control.mine.set_progress(self._num_steps, len(bound.program.ops))
            return
        try:
            is_over = self._alignment.wait(lambda timeout_s: self._done.wait(1, timeout_s), awaited)
        except CommError:
            self._end_joint(bound)
            calls.check()  # where compute raised here, peers were told of that, and so was this wait
            raise
        if not is_over:
            raise self.late_error(awaited.what, awaited.detail())
        calls.check()
        self._control.mine.set_progress(self._num_steps, len(bound.program.ops))

    def synchronize(self) -> None:
        """Wait until every step that was launched has ended: the host may read outputs. At once on `host`.

        Blocks:  the host, bounded by the runtime's timeout for each step in flight.
        Capture: no.

        Raises:
            ProgramError: the runtime was closed.
            CommError: a step did not end in time, or a peer that it needs gave up, died or gathered something else.
        """
        refuse_inside_segment("synchronize")
        with self.turn.lock:
            self.check_open()
            late = self._in_flight.synchronize(self._alignment.wait) if self._in_flight is not None else None
            if late is not None:
                raise self.late_error(late.what, late.detail())

    def embed(
        self, shape: StepShape, captured: Captured, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> Step:
        """`captured` for a server that replays it through graphshard.h. Used by `StepGraph.handle`."""
        with self.turn.lock:
            self.check_open()  # no use of the slots: a rank may ask for a handle alone
            if self._embedding is None:
                self._embedding = Embedding(self._ground, self._control.mine)
                self._embedding.hand_over()
            executor = self.plan.executor if self._cuda is None else ""
            return self._embedding.step(shape, captured, inputs, outputs, executor)

    def follow_caller(self, stream: Stream | None = None) -> None:
        """On a GPU: what `stream`, or the compute stream, gets from now on waits for what the caller's current one has.

        Used by loops, and by prefetches.
        """
        if self._cuda is not None:
            self._cuda.follow_caller(stream)

    def let_caller_go_on(self) -> None:
        """On a GPU: what the caller's current stream gets from now on waits for what was issued. Used by loops."""
        if self._cuda is not None:
            self._cuda.let_caller_go_on()

    def wait_for_layer(self, shape: StepShape, bound: BoundProgram) -> None:
        """Until what a loop issued so far has been done, its next layer's weights included. With the lock held.

        On a GPU the caller's current stream waits, not the host.
        """
        if self._cuda is not None:
            self.let_caller_go_on()
            return
        awaited = replace(self._awaited(self._num_steps + 1, shape, bound, is_eager=True), is_all=False)
        if not self._alignment.wait(bound.streams[0].synchronize, awaited):
            raise self.late_error(awaited.what, awaited.detail())

    def abort_step(self, bound: BoundProgram, issue_rest: Callable[[], None] | None) -> None:
        """A part of the program was enqueued, and no more compute will be. Used by loops, with the lock held.

        What slots hold is forgotten once the streams are done: the next gathers may run on other streams. Under a
        collective transport peers gather on, so the rest is issued, without compute, and this rank stays in step.
        `issue_rest` does that; None: the step did not even begin.
        """
        self.forget_after_error()
        if self._transport.is_collective and issue_rest is not None and self._alignment.broken is None:
            with suppress(CommError):  # the next step says it, as it does to peers
                self.issue("the rest of a step", issue_rest)
                self._slots.leave(bound.program)
                self._num_steps += 1
        deadline = time.monotonic() + self.timeout_s
        for stream in () if self._late or self._is_cut_off else bound.streams:
            if not stream.synchronize(max(0.0, deadline - time.monotonic())):
                self._late = True

    def issue(self, what: str, launch: Callable[[], None]) -> None:
        """`launch` what has been posted; if the driver refuses, peers are told."""
        begin = time.perf_counter()
        with self._telling_peers(what):
            launch()
            self.launch_s = time.perf_counter() - begin

    def forget_after_error(self) -> None:
        """A step raised: rely on nothing that slots hold.

        Under a collective transport they hold what the program says, for gathers run whatever compute did; and a rank
        that forgot would gather alone.
        """
        if not self._transport.is_collective:
            self._slots.forget()

    def _awaited(self, number: int, shape: StepShape, bound: BoundProgram, is_eager: bool) -> Awaited:
        """Step `number`, as errors say it."""
        pending = bound.first_pending if is_eager else str
        what = step_text(number, shape, is_eager)
        is_joint = bound.joint is not None
        return Awaited(what, number, pending, bound.name_gather, self._alignment.number, is_joint=is_joint)

    def _end_joint(self, bound: BoundProgram) -> None:
        """A step that ranks take together was given up: what waits here is let go, and must be gone before the next.

        Under a collective transport there is no next one.
        """
        if bound.joint is not None and not self._transport.is_collective:
            deadline = time.monotonic() + self.timeout_s
            for stream in bound.streams:
                self._late = not stream.synchronize(max(0.0, deadline - time.monotonic())) or self._late

    def _tell_of_compute(self, shape: StepShape, bound: BoundProgram) -> Callable[[BaseException], None] | None:
        """Who is told what compute raised, on its thread: peers, if they go on with what it leaves; else nobody."""
        if bound.joint is None:
            return None
        return partial(self._alignment.compute_failed, what=f"its part of a step of shape {shape}")

    def late_error(self, what: str, detail: str) -> CommError:
        """`what` did not get on in time; the next step is refused until it has ended."""
        self._late = True
        return CommError(
            f"rank {self.rank} waited {self.timeout_s:.1f} s for {what}{detail}; peers: {self._control.describe()}"
        )
