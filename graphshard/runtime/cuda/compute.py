"""What compute ops do on CUDA: torch enqueues the segments' kernels on our compute stream, between the list's ops.

Eager and captured are one loop: issue the list up to a compute op, run its segments, go on. Under capture the same
driver calls and kernels become nodes of one graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from graphshard._core import Calls, Recording, Stream
from graphshard.core.errors import CommError, DeviceError, ProgramError
from graphshard.core.lowering import ActSum
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.compute import ComputeOp, ComputeTable, eager_call
from graphshard.runtime.cuda.step import CapturedStep
from graphshard.runtime.cuda.torch_cuda import TorchCuda, TorchGraph
from graphshard.runtime.cuda.watch import WarmUpWatch
from graphshard.runtime.cuda.window import capture_window
from graphshard.runtime.model import Segment, StepState

NUM_WARM_UPS = 2
"""The first run loads kernels and picks algorithms; some libraries set up more at the second."""

_NO_CALLS = Calls([])
"""The list's compute ops are left out of what is issued: torch enqueues them."""

RUN, WARM_UP, CAPTURE = "run", "warmed up", "captured"
"""What is done to a segment, as errors say."""

Pieces = Sequence[tuple[int, int, ComputeOp | None]]


def pieces_of(bound: BoundProgram) -> Pieces:
    """The list in pieces `(begin, end, compute op that follows)`; the last has none."""
    last_of = {op: index for index, op in enumerate(bound.sources)}
    pieces: list[tuple[int, int, ComputeOp | None]] = []
    begin = 0
    for compute in bound.computes:
        at = last_of[compute.op]
        pieces.append((begin, at, compute))
        begin = at + 1
    return [*pieces, (begin, len(bound.sources), None)]


class CudaCompute:
    """The model's segments on one compute stream. Not thread-safe: used with the runtime's lock held."""

    def __init__(
        self,
        table: ComputeTable,
        torch_cuda: TorchCuda,
        streams: Sequence[Stream],
        *,
        timeout_s: float,
    ) -> None:
        """`table` has the segments; `streams` are all of the runtime's, the compute stream first."""
        self._table = table
        self._torch, self._streams = torch_cuda, tuple(streams)
        self._compute = self._streams[0]
        self._timeout_s = timeout_s
        self._pool: object | None = None
        self._steps: list[CapturedStep] = []

    def warm_up(self, shape: StepShape, computes: Sequence[ComputeOp]) -> None:
        """Run every segment twice, on whatever its weights' slots hold, so that no kernel is loaded later.

        A kernel that is loaded while a peer waits in a collective can deadlock the two: loading may wait for the
        device. So this comes before the first gather of a collective transport, and again before each capture, on the
        thread that captures (see Note [GEMM workspaces] in `step.py`). Buffers change; the caller puts them back.

        Order:   on the compute stream, after what the current stream has.
        Blocks:  until the kernels have run, bounded.
        Capture: no.

        Raises:
            DeviceError: a segment uses a default stream or random numbers, which no capture should hold.
            CommError: the kernels did not end in time.
        """
        with self._ordered():
            for turn in range(NUM_WARM_UPS):
                for op in computes:
                    if turn == 0:
                        self._run_watched(shape, op)
                    else:
                        self._run(shape, op, WARM_UP)
        self._drain((self._compute,), f"the warm-up of step shape {shape}")

    def issue(self, shape: StepShape, bound: BoundProgram) -> None:
        """Enqueue one eager step, ordered on the caller's current stream.

        Blocks:  nothing but what the segments wait for themselves.

        Raises:
            ProgramError: a segment left another stream the current one.
        """
        with self._ordered():
            self._enqueue(shape, bound, bound.op_list.issue)

    def capture(self, shape: StepShape, bound: BoundProgram) -> CapturedStep:
        """Warm up, drain, and capture one step; nothing of the step itself runs.

        Blocks:  until all that our streams have is done, bounded: what is in flight would be waited for inside.

        Raises:
            DeviceError: a segment does what no capture permits, or another capture did not end. Nothing stays behind.
            CommError: work in flight did not end in time.
        """
        what = f"step shape {shape}"
        self.warm_up(shape, bound.computes)
        self._drain(self._streams, f"what was enqueued before the capture of {what}")
        graph, recording = self._torch.new_graph(), bound.op_list.recording()
        with capture_window(what, self._timeout_s):
            self._record(shape, bound, graph, recording)
        graph.instantiate()
        step = CapturedStep(graph, recording, bound, self._torch)
        self._steps = [other for other in self._steps if not other.is_closed] + [step]
        return step

    def close(self) -> None:
        """Give all graphs back, and the pool with the last of them. Idempotent."""
        for step in self._steps:
            step.close()
        self._steps.clear()
        self._pool = None

    def settle(self, what: str) -> None:
        """Wait until all is done that the caller's current stream and our streams have: the host may read buffers.

        Blocks:  the host, bounded.

        Raises:
            CommError: `what` did not end in time.
        """
        self.follow_caller()
        self._drain(self._streams, what)

    def follow_caller(self, stream: Stream | None = None) -> None:
        """What `stream`, or the compute stream, gets from now on waits for what the caller's current stream has now."""
        self._torch.wait_for_current((stream or self._compute).handle)

    def let_caller_go_on(self) -> None:
        """What the caller's current stream gets from now on waits for what the compute stream has now."""
        self._torch.continue_after(self._compute.handle)

    # --- inside ---

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        """The compute stream as the current one; what the caller's has comes before, what it gets comes after."""
        handle = self._compute.handle
        self._torch.wait_for_current(handle)
        try:
            with self._torch.on_stream(handle):
                yield
        finally:
            self._torch.continue_after(handle)

    def _drain(self, streams: Sequence[Stream], what: str) -> None:
        """Wait for `streams`, bounded for all together."""
        deadline = time.monotonic() + self._timeout_s
        for stream in streams:
            if not stream.synchronize(max(0.0, deadline - time.monotonic())):
                raise CommError(f"{what} did not end within {self._timeout_s:.1f} s: a peer does not answer")

    def _record(self, shape: StepShape, bound: BoundProgram, graph: TorchGraph, recording: Recording) -> None:
        """Capture into `graph`. The first error is raised, not the one that ending a lost capture gives."""
        first: BaseException | None = None
        try:
            with self._torch.capture(graph, self._pool_for_capture(), self._compute.handle):
                try:
                    self._enqueue(shape, bound, recording.issue, CAPTURE)
                except BaseException as error:
                    first = error
                    raise
        except BaseException as error:
            with suppress(RuntimeError):  # torch's, of a graph that was never ended: there is nothing to give back
                graph.reset()
            if first is not None:
                raise first from first.__cause__
            if isinstance(error, RuntimeError):
                raise DeviceError(
                    f"step shape {shape} cannot be captured: {error}. A segment did what no capture permits and went on"
                ) from error
            raise

    def _enqueue(
        self, shape: StepShape, bound: BoundProgram, issue: Callable[[Calls, int, int], None], doing: str = RUN
    ) -> None:
        for begin, end, op in pieces_of(bound):
            if begin < end:
                issue(_NO_CALLS, begin, end)
            if op is not None:
                self._run(shape, op, doing)

    def _run_watched(self, shape: StepShape, op: ComputeOp) -> None:
        watch = WarmUpWatch(self._torch)
        with watch:
            self._run(shape, op, WARM_UP)
        if watch.error is not None:  # a segment swallowed it
            raise watch.error

    def _run(self, shape: StepShape, op: ComputeOp, doing: str) -> None:
        if isinstance(op, ActSum):
            self._table.call(shape, op)()
            return
        for segment in self._table.segments[op.begin : op.end]:
            self._run_segment(self._table.state(shape), segment, doing)

    def _run_segment(self, state: StepState, segment: Segment, doing: str) -> None:
        """Run `segment` on the current stream, the compute stream."""
        path = segment.spec.path
        try:
            eager_call(state, (segment,))()
        except (DeviceError, RuntimeError) as error:
            if doing == RUN:  # the segment's own error, as it raised it
                raise
            raise DeviceError(f"segment {path} cannot be {doing}: {error}") from error
        stream = self._torch.current_stream()
        if stream != self._compute.handle:
            raise ProgramError(
                f"segment {path} left stream {stream:#x} the current one, it began on "
                f"{self._compute.handle:#x}: switch streams with `with torch.cuda.stream(...)` only"
            )

    def _pool_for_capture(self) -> object:
        """The pool that all live graphs share: steps never overlap.

        A pool is gone with its last graph, and torch refuses to share one that is gone; so a new one then. A capture
        that failed leaves its pool in torch's hands, to be used again.
        """
        has_ended = bool(self._steps) and all(step.is_closed for step in self._steps)
        if self._pool is None or has_ended:
            self._pool = self._torch.new_pool()
            self._steps.clear()
        return self._pool
