"""A step that is captured once more with an event after every bound op, to be looked at and never to be timed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from graphshard._core import DriverError, Event
from graphshard.core.errors import CommError, DeviceError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


def bound_program(runtime: Runtime, shape: StepShape) -> BoundProgram:
    """The bound program of `shape`, as steps issue it now; another one after a rank came back."""
    runtime.check_open()
    return runtime._bound[runtime._known(shape)]


class TracedStep:
    """A capture of one step shape with external event record nodes. The runtime's own graphs stay as they are."""

    def __init__(self, runtime: Runtime, shape: StepShape, timed: Sequence[int]) -> None:
        """Capture `shape` with an event after each bound op of `timed`, indices of its bound list.

        Raises:
            DeviceError: the driver refused, or a segment does what no capture permits.
        """
        self.bound = bound_program(runtime, shape)
        self._runtime, self._shape = runtime, shape
        self._events = {i: Event(runtime.driver, timing=True) for i in timed}
        with runtime.turn.lock:
            if self.bound.joint is not None:
                runtime.agree_on_capture([shape])
            self._calls = runtime.recorded(shape, self.bound)
            try:
                graph = self.bound.op_list.capture(self._calls, list(self._events.items()), runtime.timeout_s)
            except DriverError as error:
                raise DeviceError(f"the trace of step shape {shape} cannot be captured: {error}") from error
        self._launcher = graph.instantiate(runtime.plan.executor)

    def replay(self) -> dict[int, float]:
        """Run the step on what the inputs hold now; when each timed op was done, in us since one was done first.

        Blocks and raises as `run` does.
        """
        self.run()
        done_us = self.done_us(self._events[min(self._events)])
        first_us = min(done_us.values())  # not always that of the first op: streams run side by side
        return {i: us - first_us for i, us in done_us.items()}

    def done_us(self, since: Event) -> dict[int, float]:
        """When each timed op of the last run was done, in us since the event `since`, which is done."""
        return {i: event.elapsed_us(since) for i, event in self._events.items()}

    def run(self) -> None:
        """Run the step on what the inputs hold now.

        Blocks:  the host, until all streams are done, bounded by the runtime's timeout.

        Raises:
            CommError: the step did not end in time.
        """
        runtime, streams = self._runtime, self.bound.streams
        runtime.step(self._shape, self.bound, lambda: self._launcher.launch(streams[0]), self._calls)
        deadline = time.monotonic() + runtime.timeout_s
        for stream in streams:
            if not stream.synchronize(max(0.0, deadline - time.monotonic())):
                raise CommError(f"rank {runtime.rank} waited {runtime.timeout_s:.1f} s for the end of a traced step")
