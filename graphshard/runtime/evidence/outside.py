"""Events around what the host issues between graphs: gathers from outside, and folds. To be looked at.

Times are those at which the streams' own workers came to the events, not when the host issued them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphshard._core import DriverError, Event, Word
from graphshard.core.errors import CommError, DeviceError, SpecError
from graphshard.core.specs import StepShape
from graphshard.runtime.graphs import HostCaptured

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


class TimedPrefetch:
    """Issues `Runtime.prefetch` between two events of the stream that its gathers go to."""

    def __init__(self, runtime: Runtime) -> None:
        runtime.check_open()
        self._runtime = runtime
        self._stream = runtime._streams["prefetch"]
        self.begun, self.ended = Event(runtime.driver, timing=True), Event(runtime.driver, timing=True)

    def issue(self, shape: StepShape, behind: Word | None = None) -> None:
        """Gather what the next step of `shape` expects; as `Runtime.prefetch`. With `behind` when that word is 1.

        The first event comes right before the gathers, when peers have been told: what the host does before is not
        in the time. Where there is nothing to gather no event is recorded, and an earlier one stays.
        """
        slots, stream = self._runtime._slots, self._stream
        before = slots._before_gathers
        issued: list[int] = []

        def begin(units: Sequence[int]) -> None:
            before(units)
            issued.extend(units)
            if behind is not None:
                stream.wait_value(behind.address, 1)
            stream.record(self.begun)

        slots._before_gathers = begin
        try:
            self._runtime.prefetch(shape.batch_size, shape.tokens_per_sequence)
        finally:
            slots._before_gathers = before
        if issued:
            stream.record(self.ended)

    def synchronize(self) -> None:
        """Wait, bounded by the runtime's timeout, until the gathers have ended: CommError if they do not."""
        if not self._stream.synchronize(self._runtime.timeout_s):
            raise CommError(
                f"rank {self._runtime.rank} waited {self._runtime.timeout_s:.1f} s for the end of a prefetch"
            )


@dataclass(frozen=True)
class _Told(HostCaptured):
    """Tells somebody of each launch."""

    on_launch: Callable[[], None]

    def launch(self) -> None:
        """See `Captured`."""
        super().launch()
        self.on_launch()


class TimedFold:
    """A step shape's fold, captured once more with an event before it and one behind.

    Its runtime must have been built with `Hooks.fold_stall`: the first event stands behind the wait for that word, so
    where the fold's stream stands still for it, that is not in its time.
    """

    def __init__(self, runtime: Runtime, shape: StepShape) -> None:
        """Capture it. The runtime's own graphs stay as they are.

        Raises:
            SpecError: the model has no fold, or it has no stall.
            DeviceError: the driver refused.
        """
        runtime.check_open()
        folds = runtime._open_folds()
        if not runtime.hooks.fold_stall:
            raise SpecError("a fold is timed behind its stall: build the runtime with Hooks.fold_stall")
        self._runtime, self._shape = runtime, shape
        self.begun, self.ended = Event(runtime.driver, timing=True), Event(runtime.driver, timing=True)
        bound = folds.bound
        last = 1 + max(i for i, op in enumerate(bound.op_list.ops()) if op[1] == "call")
        with runtime.turn.lock:
            calls = runtime.recorded(shape, bound)
            try:
                events = [(0, self.begun), (last - 1, self.ended)]
                graph = bound.op_list.capture(calls, events, runtime.timeout_s)
            except DriverError as error:
                raise DeviceError(f"the timed fold of step shape {shape} cannot be captured: {error}") from error
        self._captured = HostCaptured(graph, graph.instantiate(runtime.plan.executor), bound, calls)

    def run(self, on_launch: Callable[[], None] = lambda: None) -> None:
        """As `Runtime.fold`; `on_launch` is called when it was handed to the driver, before its end is waited for."""
        folds, shape, captured = self._runtime._open_folds(), self._shape, self._captured
        own = folds.captured.get(shape)
        folds.captured[shape] = _Told(captured.graph, captured.exec, captured.bound, captured.calls, on_launch)
        try:
            self._runtime.fold(shape.batch_size, shape.tokens_per_sequence)
        finally:
            if own is None:
                del folds.captured[shape]
            else:
                folds.captured[shape] = own
