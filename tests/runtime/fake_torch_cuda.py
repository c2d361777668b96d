"""The seam to torch.cuda over the host driver: captures, graphs and streams are real, kernels are host functions."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from graphshard._core import CaptureLock, Driver, DriverError

_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_ENTRY_POINTS = {
    "cuStreamCreate": 2000,
    "cuStreamDestroy": 4000,
    "cuStreamSynchronize": 2000,
    "cuEventCreate": 2000,
    "cuEventRecord": 2000,
    "cuStreamWaitEvent": 3020,
    "cuLaunchHostFunc": 10000,
    "cuStreamBeginCapture": 10010,
    "cuStreamEndCapture": 10000,
    "cuGraphInstantiateWithFlags": 11040,
    "cuGraphLaunch": 10000,
    "cuGraphDestroy": 10000,
    "cuGraphExecDestroy": 10000,
}
_NON_BLOCKING, _GLOBAL, _THREAD_LOCAL, _NO_TIMING = 1, 0, 1, 2


class Calls:
    """The driver's entry points; a failing one raises RuntimeError, as torch does."""

    def __init__(self, library: str) -> None:
        get = ctypes.CDLL(library).cuGetProcAddress_v2
        self._functions: dict[str, Any] = {}
        for name, version in _ENTRY_POINTS.items():
            address = ctypes.c_void_p()
            assert get(name.encode(), ctypes.byref(address), version, ctypes.c_uint64(0), None) == 0, name
            assert address.value, name
            self._functions[name] = ctypes.CFUNCTYPE(ctypes.c_int)(address.value)

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self._functions[name](*arguments)
        if code != 0:
            raise RuntimeError(f"CUDA error {code} in {name}")


class FakeGraph:
    """`torch.cuda.CUDAGraph(keep_graph=True)`."""

    def __init__(self, torch_cuda: FakeTorchCuda) -> None:
        self._torch = torch_cuda
        self.graph, self.exec = ctypes.c_void_p(), ctypes.c_void_p()
        self.kept: list[object] = []

    def instantiate(self) -> None:
        self._torch.note("instantiate")
        self._torch.calls("cuGraphInstantiateWithFlags", ctypes.byref(self.exec), self.graph, ctypes.c_uint64(0))

    def replay(self) -> None:
        self._torch.note("replay")
        self._torch.calls("cuGraphLaunch", self.exec, self._torch.stream(self._torch.current_stream()))

    def reset(self) -> None:
        self._torch.note("reset")
        if self.exec:
            self._torch.calls("cuGraphExecDestroy", self.exec)
        if self.graph:
            self._torch.calls("cuGraphDestroy", self.graph)
        self.graph, self.exec = ctypes.c_void_p(), ctypes.c_void_p()
        self._torch.kernels += self.kept  # a replay in flight may still call them
        self.kept = []

    def raw_cuda_graph(self) -> int:
        return self.graph.value or 0


class FakeTorchCuda:
    """The seam `TorchCuda`, and what segments call: `kernel`. `log` is what was asked of it, in order."""

    def __init__(self, driver: Driver) -> None:
        self.calls = Calls(driver.path)
        self.log: list[str] = []
        self.gc_in_captures: list[bool] = []
        self.was_locked: list[bool] = []
        self.num_pools = 0
        self.pools: list[object] = []
        """The pool of each capture."""
        self._thread = threading.local()
        self._driver = driver
        self.kernels: list[object] = []
        """What streams may still call; cleared by a test that has waited for all of them."""
        self._graph: FakeGraph | None = None
        self._event = ctypes.c_void_p()
        self._enter()
        self.calls("cuEventCreate", ctypes.byref(self._event), _NO_TIMING)
        self._default = self.new_stream()

    def note(self, what: str) -> None:
        self.log.append(what)

    def new_stream(self) -> int:
        """A stream of the caller's own, as torch's pool gives them; it lives as long as the process."""
        self._enter()
        stream = ctypes.c_void_p()
        self.calls("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def set_stream(self, handle: int) -> None:
        self._thread.current = handle

    def synchronize(self, handle: int) -> None:
        self._enter()
        self.calls("cuStreamSynchronize", self.stream(handle))

    def stream(self, handle: int) -> ctypes.c_void_p:
        """For driver calls: a stream of ours plays the default stream, which the host driver lacks."""
        return ctypes.c_void_p(handle or self._default)

    def kernel(self, function: Callable[[], object]) -> None:
        """Enqueue `function` on the current stream, or capture it."""
        self._enter()
        thunk = _HOST_FUNCTION(lambda _: function())
        (self._graph.kept if self._graph is not None else self.kernels).append(thunk)
        if self._graph is not None and self.current_stream() == 0:
            raise RuntimeError("CUDA error 906: operation would make the legacy stream depend on a capturing stream")
        self.calls("cuLaunchHostFunc", self.stream(self.current_stream()), thunk, None)

    @contextmanager
    def strict_capture(self) -> Iterator[None]:
        """A capture of the caller's own on a new stream, lost if any thread makes an unsafe call: global mode."""
        stream, graph = ctypes.c_void_p(self.new_stream()), ctypes.c_void_p()
        self.calls("cuStreamBeginCapture", stream, _GLOBAL)
        try:
            yield
        finally:
            self.calls("cuStreamEndCapture", stream, ctypes.byref(graph))
        self.calls("cuGraphDestroy", graph)

    @property
    def is_capturing(self) -> bool:
        """`torch.cuda.is_current_stream_capturing()`, of the thread that captures."""
        return self._graph is not None

    # --- the seam ---

    def current_stream(self) -> int:
        return getattr(self._thread, "current", 0)

    @contextmanager
    def on_stream(self, handle: int) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(handle)
        try:
            yield
        finally:
            self.set_stream(before)

    def wait_for_current(self, handle: int) -> None:
        self._follow(handle, self.current_stream())

    def continue_after(self, handle: int) -> None:
        self._follow(self.current_stream(), handle)

    def new_pool(self) -> object:
        self.num_pools += 1
        return ("pool", self.num_pools)

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)

    @contextmanager
    def capture(self, graph: FakeGraph, pool: object, handle: int) -> Iterator[None]:
        self._enter()
        self.note("capture begins")
        self.pools.append(pool)
        self.gc_in_captures.append(gc.isenabled())
        self.was_locked.append(_is_locked())
        with self.on_stream(handle):
            self.calls("cuStreamBeginCapture", self.stream(handle), _THREAD_LOCAL)
            self._graph = graph
            try:
                yield
            finally:
                self._graph = None
                self.note("capture ends")
                self.calls("cuStreamEndCapture", self.stream(handle), ctypes.byref(graph.graph))

    def _follow(self, later: int, earlier: int) -> None:
        self._enter()
        self.calls("cuEventRecord", self._event, self.stream(earlier))
        self.calls("cuStreamWaitEvent", self.stream(later), self._event, 0)

    def _enter(self) -> None:
        self._driver.free_bytes  # noqa: B018 - makes the context current on this thread


def _is_locked() -> bool:
    try:
        with CaptureLock(0.0):
            return False
    except DriverError:
        return True
