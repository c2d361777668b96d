"""Walking a captured graph: what the driver says is in it, node by node. Nothing here knows what was meant to be there.

cuda-python asks the questions; it must ask the library that made the graph, so that is checked first.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from graphshard._core import Driver
from graphshard.core.errors import DeviceError
from graphshard.device.as_libcuda import why_not_libcuda

KINDS = {
    "KERNEL": "kernel",
    "MEMCPY": "memcpy",
    "MEMSET": "memset",
    "HOST": "host",
    "GRAPH": "graph",
    "EMPTY": "empty",
    "WAIT_EVENT": "event_wait",
    "EVENT_RECORD": "event_record",
    "BATCH_MEM_OP": "batch_mem_op",
}
"""Node kinds as `_core.Graph.num_nodes` names them, by cuda.h's; any other one is `other`."""
_PREFIX = "CU_GRAPH_NODE_TYPE_"


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a captured graph. Addresses and bytes are those of memcpy and memset nodes, else 0."""

    kind: str
    after: tuple[int, ...] = ()
    """The nodes that it waits for, by index."""
    destination: int = 0
    source: int = 0
    num_bytes: int = 0
    name: str = ""
    """A kernel's, where the driver tells it."""

    def __str__(self) -> str:
        if self.kind == "memcpy":
            return f"memcpy of {self.num_bytes} B to {self.destination:#x}"
        return f"{self.kind} {self.name}".rstrip()


class GraphDriver(Protocol):
    """What is asked about a graph; handles are ints. Errors are DeviceError."""

    def nodes(self, graph: int) -> list[int]:
        """All nodes, in the driver's order."""

    def edges(self, graph: int) -> list[tuple[int, int]]:
        """(node, a node that waits for it)."""

    def kind(self, node: int) -> str:
        """One of `KINDS`' values, or other."""

    def copy(self, node: int) -> tuple[int, int, int]:
        """Destination, source and bytes of a memcpy node."""

    def fill(self, node: int) -> tuple[int, int]:
        """Destination and bytes of a memset node."""

    def kernel_name(self, node: int) -> str:
        """The name of a kernel node's function; empty where the driver does not tell it."""


def walk_graph(driver: GraphDriver, graph: int) -> tuple[Node, ...]:
    """The nodes of `graph`, in the order in which they were captured.

    Raises:
        DeviceError: the driver lists a node before one that it waits for, so its order is not that of the capture.
    """
    handles = driver.nodes(graph)
    index = {handle: i for i, handle in enumerate(handles)}
    after: list[list[int]] = [[] for _ in handles]
    for before, later in driver.edges(graph):
        if index[before] >= index[later]:
            raise DeviceError(
                f"the driver lists node {index[later]} of a captured graph before node {index[before]}, for which it "
                "waits: its order is not that of the capture, so nodes cannot be told apart by it"
            )
        after[index[later]].append(index[before])
    return tuple(_node(driver, handle, tuple(sorted(after[i]))) for i, handle in enumerate(handles))


def _node(driver: GraphDriver, handle: int, after: tuple[int, ...]) -> Node:
    kind = driver.kind(handle)
    if kind == "memcpy":
        destination, source, num_bytes = driver.copy(handle)
        return Node(kind, after, destination, source, num_bytes)
    if kind == "memset":
        destination, num_bytes = driver.fill(handle)
        return Node(kind, after, destination, 0, num_bytes)
    return Node(kind, after, name=driver.kernel_name(handle) if kind == "kernel" else "")


def walk(driver: Driver, graph: int) -> tuple[Node, ...]:
    """The nodes of the graph with this handle, which `driver` captured, as cuda-python reads them.

    Raises:
        DeviceError: cuda-python is not installed, or has another driver than the graph's; says what to do.
    """
    return walk_graph(CudaPython.of(driver), graph)


def why_no_walk(driver: Driver) -> str | None:
    """Why captured graphs of `driver` cannot be walked in this process; None if they can."""
    return why_no_bindings() or why_not_libcuda(driver)


def why_no_bindings() -> str | None:
    """Why no graph can be walked with this interpreter; None if there is cuda-python."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return "graphs are walked with cuda-python, which is not installed: pip install 'cuda-bindings>=12.9'"
    return None


class CudaPython:
    """`GraphDriver` by `cuda.bindings.driver`."""

    def __init__(self, bindings: ModuleType | Any) -> None:
        self._cu = bindings

    @staticmethod
    def of(driver: Driver) -> CudaPython:
        """For graphs of `driver`; a handle given to another library would crash the process."""
        reason = why_no_walk(driver)
        if reason is not None:
            raise DeviceError(f"a captured graph cannot be looked at: {reason}")
        from cuda.bindings import driver as bindings  # not a dependency of graphshard itself

        return CudaPython(bindings)

    def nodes(self, graph: int) -> list[int]:
        """All nodes, in the driver's order."""
        handle = self._cu.CUgraph(graph)
        (count,) = self._ask("cuGraphGetNodes", handle, 0)[1:]
        nodes, _ = self._ask("cuGraphGetNodes", handle, count)
        return [int(node) for node in nodes[:count]]

    def edges(self, graph: int) -> list[tuple[int, int]]:
        """(node, a node that waits for it). The newer question also answers for edges that carry data."""
        name = "cuGraphGetEdges_v2" if hasattr(self._cu, "cuGraphGetEdges_v2") else "cuGraphGetEdges"
        handle = self._cu.CUgraph(graph)
        count = self._ask(name, handle, 0)[-1]
        if count == 0:
            return []
        before, later = self._ask(name, handle, count)[:2]
        return [(int(a), int(b)) for a, b in zip(before[:count], later[:count], strict=True)]

    def kind(self, node: int) -> str:
        """One of `KINDS`' values, or other."""
        (kind,) = self._ask("cuGraphNodeGetType", self._cu.CUgraphNode(node))
        return KINDS.get(kind.name.removeprefix(_PREFIX), "other")

    def copy(self, node: int) -> tuple[int, int, int]:
        """Destination, source and bytes of a memcpy node."""
        (params,) = self._ask("cuGraphMemcpyNodeGetParams", self._cu.CUgraphNode(node))
        on_host = self._cu.CUmemorytype.CU_MEMORYTYPE_HOST
        num_bytes = params.WidthInBytes * params.Height * params.Depth
        base = params.dstHost if params.dstMemoryType == on_host else params.dstDevice
        rows = (params.dstY, params.dstPitch, params.dstZ, params.dstHeight)
        destination = _address(base, params.dstXInBytes, *rows)
        base = params.srcHost if params.srcMemoryType == on_host else params.srcDevice
        rows = (params.srcY, params.srcPitch, params.srcZ, params.srcHeight)
        return destination, _address(base, params.srcXInBytes, *rows), num_bytes

    def fill(self, node: int) -> tuple[int, int]:
        """Destination and bytes of a memset node."""
        (params,) = self._ask("cuGraphMemsetNodeGetParams", self._cu.CUgraphNode(node))
        return int(params.dst), params.elementSize * params.width * max(1, params.height)

    def kernel_name(self, node: int) -> str:
        """The name of a kernel node's function; empty where the driver does not tell it."""
        cu = self._cu
        try:
            (params,) = self._ask("cuGraphKernelNodeGetParams", cu.CUgraphNode(node))
            asked = ("cuFuncGetName", params.func) if int(params.func) else ("cuKernelGetName", params.kern)
            (name,) = self._ask(*asked)
        except (DeviceError, RuntimeError):  # an older driver, or the host's: the kind says enough
            return ""
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        """What the entry point returned besides its code."""
        answer: list[Any]
        code, *answer = getattr(self._cu, name)(*arguments)
        if code != self._cu.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"a captured graph could not be looked at: {name} gave {code.name} ({int(code)})")
        return answer


def _address(base: Any, x: int, y: int, pitch: int, z: int, height: int) -> int:
    return int(base or 0) + x + y * pitch + z * pitch * height
