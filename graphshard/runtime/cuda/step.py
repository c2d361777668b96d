"""A step captured by torch: what is kept for its replays, and how it goes."""

from __future__ import annotations

from graphshard._core import Calls, Recording
from graphshard.core.errors import DeviceError
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.cuda.torch_cuda import TorchCuda, TorchGraph


class CapturedStep:
    """A graph of torch's, with our ops in it. Made by `CudaCompute.capture`.

    # Note [GEMM workspaces]: torch keeps one cuBLAS workspace per (handle, stream), for good. All graphs of a runtime
    # are captured on its one compute stream, and every capture comes after a warm-up on that stream by the same thread
    # (a thread has a cuBLAS handle of its own). So the workspace is there before the capture: it lies in no graph's
    # pool, all graphs share it, and destroying one of them frees nothing that another uses. Therefore nothing here may
    # call `torch._C._cuda_clearCublasWorkspaces`, and nobody else while a graph is alive.
    """

    def __init__(self, graph: TorchGraph, recording: Recording, bound: BoundProgram, torch_cuda: TorchCuda) -> None:
        self._graph: TorchGraph | None = graph
        self._recording: Recording | None = recording
        self._compute = bound.streams[0]
        self._torch = torch_cuda
        self.bound = bound
        self.calls = Calls([])
        """None: torch's kernels are in the graph."""

    @property
    def is_closed(self) -> bool:
        """Whether the graph was given back."""
        return self._graph is None

    @property
    def handle(self) -> int:
        """The driver's graph, for walking.

        Raises:
            DeviceError: the step was closed.
        """
        return self._open()[0].raw_cuda_graph()

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Which nodes each of our ops became, see `_core.Recording.spans`; the others are torch's."""
        return self._open()[1].spans()

    def launch(self) -> None:
        """Enqueue a replay, ordered on the caller's current stream: after all it has, before all it gets from now on.

        Order:   as if launched on the current stream. It is launched on the compute stream, which our eager steps and
                 prefetches use too, and the two are joined by events; so a default stream will do as well.
        Blocks:  nothing.
        Capture: no.

        Raises:
            DeviceError: the step was closed.
        """
        graph, _ = self._open()
        compute = self._compute.handle
        self._torch.wait_for_current(compute)
        with self._torch.on_stream(compute):
            graph.replay()
        self._torch.continue_after(compute)

    def close(self) -> None:
        """Give the graph back. Idempotent. A replay in flight ends first, on the device.

        # Note [graph before recording]: the graph points at the recording's events and memory.
        """
        if self._graph is not None:
            self._graph.reset()
        self._graph = None
        self._recording = None

    def _open(self) -> tuple[TorchGraph, Recording]:
        if self._graph is None or self._recording is None:
            raise DeviceError("this captured step is closed; capture again with Runtime.capture")
        return self._graph, self._recording
