"""Steps as loops of one's own: the caller computes the layers, the runtime issues the rest of the list around them.

    with runtime.begin_step(batch_size=4) as step:
        for i, layer in enumerate(layers):
            step.before_layer(i)
            x = layer(x)
            step.after_layer(i)

The list is the one that `run` issues and `capture` records. It is issued in pieces, up to each compute op; what the
compute op would do happens on the calling thread, between `before_layer` and `after_layer`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from graphshard._core import Calls, Event, Stream
from graphshard.core.errors import CommError, ProgramError
from graphshard.core.lowering import Compute
from graphshard.core.plan import Plan
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.binding import refuse_fork

if TYPE_CHECKING:
    from graphshard.runtime.model import StepState
    from graphshard.runtime.runtime import Runtime

_LIVENESS_S = 0.1
"""How often a thread that waits for its turn looks whether the thread whose turn it is still lives."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer: segments `[begin, end)` of the model, by position in the step's order of calls."""

    layer: int
    begin: int
    end: int


def layer_calls(model: ModelSpec) -> tuple[LayerCall, ...]:
    """The calls of layers that make up a step of `model`.

    A call is a run of segments of one layer. A layer that is called again right away has segments named `x#2`, `x#3`
    (names are unique inside a layer), each number a call of its own.
    """
    calls: list[LayerCall] = []
    last: tuple[int | None, str] = (None, "")
    for index, segment in enumerate(model.segments):
        here = (segment.layer, segment.name.rpartition("#")[2] if "#" in segment.name else "")
        if segment.layer is not None:
            if here == last:
                calls[-1] = LayerCall(segment.layer, calls[-1].begin, index + 1)
            else:
                calls.append(LayerCall(segment.layer, index, index + 1))
        last = here
    return tuple(calls)


class StepObserver(Protocol):
    """Told, on the thread that steps and with the runtime's lock held, which layer call is open."""

    def before_step(self) -> None:
        """Before any layer call; gathers are on their way. The step is given up where this raises."""

    def before_call(self, position: int) -> None:
        """The weights of the step's call number `position` are there."""

    def after_call(self, position: int) -> None:
        """The call is over; the slots that it was the last to read are not released yet."""

    def after_step(self) -> None:
        """The step ended or was given up."""


class StepTurn:
    """Whose step it is. An open loop holds the turn but not the lock, so that nothing it does can leave it locked."""

    def __init__(self, timeout_s: float) -> None:
        self._lock = threading.RLock()
        self._owner_pid = os.getpid()
        self._changed = threading.Condition(self._lock)
        self._timeout_s = timeout_s
        self._open: StepLoop | None = None

    def wait_for_others(self) -> None:
        """Return when a step may begin, with the lock held; what this thread left open is given up."""
        if self._open is not None and self._open.is_mine:
            self._open.give_up("it was left open and another one began")
        self.wait_until_free()

    @property
    def lock(self) -> threading.RLock:
        """The runtime's lock. DeviceError in a fork: there it may be held by a thread that does not exist."""
        refuse_fork(self._owner_pid)
        return self._lock

    def take(self, step: StepLoop) -> None:
        """Make `step` the open one, with the lock held since `wait_for_others`."""
        assert self._open is None
        self._open = step

    @property
    def is_free(self) -> bool:
        """Whether no loop is open."""
        return self._open is None

    def release(self, step: StepLoop) -> None:
        """`step` has ended, with the lock held."""
        if self._open is step:
            self._open = None
            self._changed.notify_all()

    def give_up(self) -> None:
        """End whatever step is open, with the lock held: the runtime closes."""
        if self._open is not None:
            self._open.give_up("the runtime was closed")

    def wait_until_free(self) -> None:
        """Return when no loop is open, with the lock held (and given away while waiting).

        Raises:
            ProgramError: this thread's own step is open, or another thread's did not end in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while self._open is not None:
            step = self._open
            if step.is_mine:
                raise ProgramError(f"a step of this thread is open ({step.progress}): end() or abort() it first")
            if not step.thread.is_alive():
                step.give_up(f"its thread {step.thread.name} ended without end()")
            elif not self._changed.wait(_LIVENESS_S) and time.monotonic() > deadline:
                raise ProgramError(
                    f"thread {step.thread.name} has had a step open ({step.progress}) for more than "
                    f"{self._timeout_s:.1f} s: a runtime runs one step at a time"
                )


class StepPieces:
    """Where a bound program is cut for a loop: at its compute ops, each of which covers some calls of layers."""

    def __init__(self, model: ModelSpec, plan: Plan, bound: BoundProgram) -> None:
        """ProgramError if something must happen inside a layer, where a loop of one's own cannot let it happen."""
        self.calls = layer_calls(model)
        self._refuse_outside(model, plan)
        computes = [compute for compute in bound.computes if isinstance(compute, Compute)]
        if bound.joint is not None:
            raise ProgramError(
                f"a loop runs whole layers, and steps of shape {bound.joint.batch_size}x"
                f"{bound.joint.tokens_per_sequence} have tensor-parallel blocks: run or replay them, or plan with "
                "dual='gather'"
            )
        last_of = {op: index for index, op in enumerate(bound.sources)}
        self.cuts = [last_of[compute.op] for compute in computes]
        """By compute op: its index in the bound list."""
        compute_of = [index for index, compute in enumerate(computes) for _ in range(compute.begin, compute.end)]
        self.compute_of_call = [compute_of[call.begin] for call in self.calls]
        for call in self.calls:
            if compute_of[call.begin] != compute_of[call.end - 1]:
                raise ProgramError(
                    f"layer {call.layer} cannot be run by a loop: this plan (units {plan.unit_policy}) gathers between "
                    f"{model.segments[call.begin].path} and {model.segments[call.end - 1].path}; plan with units=layer"
                )

    @staticmethod
    def _refuse_outside(model: ModelSpec, plan: Plan) -> None:
        sharded = {name for unit in plan.units for name in unit.weights}
        for segment in model.segments:
            read = sorted(sharded.intersection(segment.reads)) if segment.layer is None else []
            if read:
                raise ProgramError(
                    f"a loop runs layers, and segment {segment.path} outside of them reads the sharded weight "
                    f"{read[0]}; plan with outside_layers=False"
                )


class StepLoop:
    """An open step. Made by `Runtime.begin_step`; layers are called in the model's order, each between two calls here.

    Errors of order end the step: what the slots hold is forgotten, and the next step works.
    """

    def __init__(self, runtime: Runtime, shape: StepShape, bound: BoundProgram, pieces: StepPieces) -> None:
        """Take the turn and issue the list up to the first layer's compute; the runtime's lock is held."""
        self._runtime, self._shape, self._bound = runtime, shape, bound
        self._pieces = pieces
        self._calls = Calls([_nothing] * len(bound.computes))
        self._position = 0
        self._inside = False
        self._ended = ""
        self._has_begun = False
        self._cursor, self._cut = 0, 0
        self.thread = threading.current_thread()
        runtime.turn.take(self)
        try:
            runtime.enter_step(shape, bound, "eager")
            self._has_begun = True
            self._advance()
            if runtime.observer is not None:
                runtime.observer.before_step()  # the first gather takes longer than a look at all parameters
        except BaseException:
            self.give_up("it could not begin")
            raise

    @property
    def state(self) -> StepState:
        """The buffers and weights of this step, for models made of segments: `step.state.run(segments)`."""
        return self._runtime.state(self._shape)

    @property
    def calls(self) -> tuple[LayerCall, ...]:
        """The calls of layers that make up this step, in order."""
        return self._pieces.calls

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread began this step."""
        return self.thread is threading.current_thread()

    @property
    def is_open(self) -> bool:
        """Whether it has neither ended nor been given up."""
        return not self._ended

    @property
    def is_inside(self) -> bool:
        """Whether a layer is open."""
        return self._inside

    @property
    def due(self) -> int | None:
        """The layer that is to be called next, or that is open; None after the last."""
        calls = self._pieces.calls
        return calls[self._position].layer if self._position < len(calls) else None

    @property
    def progress(self) -> str:
        """`call 3 of 12, layer 3 is due`."""
        what = "end() is due" if self.due is None else f"layer {self.due} is {'open' if self._inside else 'due'}"
        return f"{self._position} of {len(self._pieces.calls)} layer calls done, {what}"

    def before_layer(self, layer: int) -> None:
        """Wait until the weights of `layer` are there.

        Order:   everything of the list before the layer's compute is issued.
        Blocks:  the host, bounded by the runtime's timeout.
        Capture: no.

        Raises:
            ProgramError: another layer is due; the step is over.
            CommError: the weights did not come in time.
        """
        with self._runtime.turn.lock:
            self._expect(layer, inside=False)
            try:
                self._runtime.wait_for_layer(self._shape, self._bound)
            except CommError:
                self.give_up("its weights were late")
                raise
            self._inside = True
            if self._runtime.observer is not None:
                self._runtime.observer.before_call(self._position)

    def after_layer(self, layer: int, streams: Sequence[Stream] = ()) -> None:
        """`layer` has been computed: release its slot, go on gathering.

        Order:   after the calling thread's work and all that is enqueued on `streams` now: auxiliary streams that read
                 this layer's weights.
        Blocks:  never.
        Capture: no.

        Raises:
            ProgramError: this layer is not open.
        """
        with self._runtime.turn.lock:
            self._expect(layer, inside=True)
            for stream in streams:
                read = Event(self._runtime.driver)
                stream.record(read)
                self._bound.streams[0].wait(read)
            if self._runtime.observer is not None:
                self._runtime.observer.after_call(self._position)
            self._inside = False
            self._position += 1
            self._advance()

    def end(self) -> None:
        """End the step once all layers were called.

        Raises:
            ProgramError: a layer is due.
            CommError: the step did not end in time.
        """
        with self._runtime.turn.lock:
            self._check_open()
            if self.due is not None:
                self._refuse("end() was called")
            try:
                self._runtime.let_caller_go_on()
                self._runtime.finish_step(self._shape, self._bound, self._calls, True)
            except BaseException:
                self.give_up("it did not end in time")
                raise
            self._close("it has ended")

    def abort(self) -> None:
        """Give the step up, wherever it stands; nothing happens if it is over."""
        self.give_up("it was aborted")

    def give_up(self, why: str) -> None:
        """End an unfinished step: forget what the slots hold."""
        with self._runtime.turn.lock:
            if not self._ended:
                self._close(why)
                self._runtime.abort_step(self._bound, self._issue_rest if self._has_begun else None)

    def __enter__(self) -> StepLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.abort()

    # --- inside; the lock is held ---

    def _close(self, why: str) -> None:
        self._ended = why
        self._runtime.turn.release(self)
        if self._runtime.observer is not None:
            self._runtime.observer.after_step()

    def _check_open(self) -> None:
        if self._ended:
            raise ProgramError(f"this step is over ({self.progress}): {self._ended}; begin another with begin_step")

    def _expect(self, layer: int, inside: bool) -> None:
        self._check_open()
        if self.due != layer or self._inside != inside:
            self._refuse(f"{'after' if inside else 'before'}_layer({layer}) was called")

    def _refuse(self, what: str) -> None:
        progress = self.progress
        self.give_up("it was called out of order")
        raise ProgramError(
            f"{what} with {progress}: layers are called in the model's order, each between before_layer and "
            "after_layer; what the slots held is forgotten, begin another step"
        )

    def _advance(self) -> None:
        """Issue the list up to the compute op of the call that is due (after the last: to the end)."""
        self._runtime.follow_caller()
        calls, cuts = self._pieces.calls, self._pieces.cuts
        target = len(self._bound.op_list)
        if self._position < len(calls):
            target = cuts[self._pieces.compute_of_call[self._position]]
        self._issue_to(target)

    def _issue_rest(self) -> None:
        """What is left of the list, without compute: gathers that peers wait for."""
        self._issue_to(len(self._bound.op_list))

    def _issue_to(self, target: int) -> None:
        cuts, ops = self._pieces.cuts, self._bound.op_list
        while self._cut < len(cuts) and cuts[self._cut] < target:
            ops.issue(self._calls, self._cursor, cuts[self._cut])
            self._cursor = cuts[self._cut] + 1
            self._cut += 1
        if self._cursor < target:
            ops.issue(self._calls, self._cursor, target)
            self._cursor = target


def _nothing() -> None:
    """What compute ops do in a loop: they are never issued."""
