"""Capturing bound lists, whoever computes: over recorded tapes on the host, by torch's own capture on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from graphshard._core import Calls, DriverError
from graphshard.core.errors import DeviceError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.capture_lock import capture_lock
from graphshard.runtime.cuda.compute import CudaCompute
from graphshard.runtime.graphs import Captured, HostCaptured
from graphshard.runtime.prefetching import Prefetching


class Capturing(Prefetching):
    """The base of `Runtime` that captures."""

    def recorded(self, shape: StepShape, bound: BoundProgram) -> Calls:
        """What the segments of `bound` do at `shape`, recorded over the weights that they read. With the lock held.

        As collective as the transport's gathers are; takes the capture lock for each segment.
        """
        lock = partial(capture_lock, f"step shape {shape}", self.timeout_s)
        on_error = self._tell_of_compute(shape, bound)
        return self._compute.captured(shape, bound.computes, self.gather_now, lock, on_error)

    def _capturer(self, shape: StepShape, bound: BoundProgram) -> Callable[[BoundProgram], Captured]:
        """What captures `bound` at `shape`, and again after it was bound to other mappings."""
        if self._cuda is not None:
            return partial(self._capture_on_cuda, self._cuda, shape)
        return partial(self._capture_on_host, shape, self.recorded(shape, bound))

    def _capture_on_host(self, shape: StepShape, calls: Calls, bound: BoundProgram) -> Captured:
        try:
            return HostCaptured.capture(calls, self.plan.executor, self.hooks.seed, bound, self.timeout_s)
        except DriverError as error:
            raise DeviceError(f"step shape {shape} cannot be captured: {error}") from error

    def _capture_on_cuda(self, cuda: CudaCompute, shape: StepShape, bound: BoundProgram) -> Captured:
        """Takes the capture lock itself, after the warm-up: segments may wait for ranks that are threads here."""
        with self._unchanged_buffers(cuda, f"what was enqueued before the capture of step shape {shape}"):
            return cuda.capture(shape, bound)

    @contextmanager
    def _unchanged_buffers(self, cuda: CudaCompute, what: str) -> Iterator[None]:
        """Buffers hold afterwards what they held when `what` had ended: steps and folds in flight write them."""
        cuda.settle(what)
        with self._memory.unchanged_buffers():
            yield
