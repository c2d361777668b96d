"""The seam to torch.cuda: every call of it that the runtime makes, so that tests can drive the rest without a GPU.

Streams are named by their driver handles here. Torch's *current* stream is the caller's; by default it is the legacy
stream, handle 0, which is never captured and never gathered on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch

LEGACY_STREAMS = frozenset({0, 1, 2})
"""The null stream, and the legacy and per-thread default streams: work on them waits for other streams, or for all."""


class TorchGraph(Protocol):
    """What is used of `torch.cuda.CUDAGraph(keep_graph=True)`."""

    def instantiate(self) -> None:
        """Make the executable graph."""

    def replay(self) -> None:
        """Launch it on the current stream."""

    def reset(self) -> None:
        """Destroy graph and executable; launches in flight end first."""

    def raw_cuda_graph(self) -> int:
        """The driver's graph, for walking."""


class TorchCuda(Protocol):
    """What is used of `torch.cuda`, on one device."""

    def current_stream(self) -> int:
        """The calling thread's current stream."""

    def on_stream(self, handle: int) -> AbstractContextManager[None]:
        """Make the stream the current one while the block runs, and its device the current device."""

    def wait_for_current(self, handle: int) -> None:
        """What is enqueued on the stream from now on waits for what the current stream has now."""

    def continue_after(self, handle: int) -> None:
        """What is enqueued on the current stream from now on waits for what the stream `handle` has now."""

    def new_pool(self) -> object:
        """The name of a memory pool that graphs may share."""

    def new_graph(self) -> TorchGraph:
        """A graph that nothing was captured into."""

    def capture(self, graph: TorchGraph, pool: object, handle: int) -> AbstractContextManager[None]:
        """Capture into `graph` what the block enqueues on the stream, which is current meanwhile.

        Thread-local mode: what other threads do is not looked at. The current stream is afterwards what it was, also if
        the capture fails.
        """


class VendorTorchCuda:
    """The seam over torch.cuda itself."""

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._before = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._after = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def current_stream(self) -> int:
        """See `TorchCuda`."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    @contextmanager
    def on_stream(self, handle: int) -> Iterator[None]:
        """See `TorchCuda`."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream(handle)):
            yield

    def wait_for_current(self, handle: int) -> None:
        """See `TorchCuda`."""
        self._before.record(torch.cuda.current_stream(self._device))
        self._before.wait(self._stream(handle))

    def continue_after(self, handle: int) -> None:
        """See `TorchCuda`."""
        self._after.record(self._stream(handle))
        self._after.wait(torch.cuda.current_stream(self._device))

    def new_pool(self) -> object:
        """See `TorchCuda`."""
        return torch.cuda.graph_pool_handle()

    def new_graph(self) -> TorchGraph:
        """See `TorchCuda`."""
        return torch.cuda.CUDAGraph(keep_graph=True)

    @contextmanager
    def capture(self, graph: TorchGraph, pool: object, handle: int) -> Iterator[None]:
        """See `TorchCuda`. On entry torch waits for the device, gives cached memory back, and may run gc."""
        assert isinstance(graph, torch.cuda.CUDAGraph)
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream(self._device)
            try:
                with torch.cuda.graph(
                    graph,
                    pool=pool,  # type: ignore[arg-type]
                    stream=self._stream(handle),
                    capture_error_mode="thread_local",
                ):
                    yield
            except BaseException:
                self._end_lost(graph, pool)
                raise
            finally:
                # torch.cuda.graph leaves its stream the current one if the capture cannot be ended
                torch.cuda.set_stream(before)

    def _end_lost(self, graph: TorchGraph, pool: object) -> None:
        """Tell torch's allocator that a capture is over which the driver could not end.

        # Note [lost captures]: torch tells its allocator so only after the driver has ended a capture without an error.
        Else the allocator goes on as in a capture: it frees nothing that was used on several streams, and asks the
        graph of each stream whether it is captured, also after the graph has gone. So the graph is kept, empty.
        """
        with suppress(RuntimeError):  # torch has told it: the driver ended the capture, the error was another
            torch._C._cuda_endAllocateToPool(self._device.index, pool)  # type: ignore[arg-type]
            _lost.append(graph)

    def _stream(self, handle: int) -> torch.cuda.Stream:
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.ExternalStream(handle, self._device)  # type: ignore[no-untyped-call]
        return self._streams[handle]


_lost: list[TorchGraph] = []
"""See Note [lost captures]."""
