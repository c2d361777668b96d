"""The yardstick of a captured step: the same copies, waits and segments in a plain torch.cuda.CUDAGraph.

Made by torch alone, from the same list over the same addresses; only the word that says `done` to the host is left out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from graphshard.core.errors import ProgramError
from graphshard.core.lowering import Compute
from graphshard.core.specs import StepShape
from graphshard.gpu_check.setup import TIMEOUT_S
from graphshard.runtime.cuda.window import capture_window
from graphshard.runtime.evidence.traced import bound_program
from graphshard.runtime.evidence.walk import walk
from graphshard.runtime.runtime import Runtime


class _Bytes:
    """Device memory at an address, as torch takes it; whoever has the tensor keeps the memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class PlainGraph:
    """A step of `runtime` that torch captured by itself. Not to be replayed beside the runtime's own steps."""

    def __init__(self, runtime: Runtime, shape: StepShape, device: torch.device) -> None:
        """Run the step once, then capture it.

        Raises:
            ProgramError: the bound list has an op that torch has no call for.
        """
        self._runtime, self._device = runtime, device
        self._bound = bound_program(runtime, shape)
        self._state, self._segments = runtime.state(shape), runtime._compute.segments
        self._streams = [torch.cuda.Stream(device) for _ in self._bound.streams]  # type: ignore[no-untyped-call]
        self._events = [torch.cuda.Event() for _ in range(self._bound.lowered.num_events)]  # type: ignore[no-untyped-call]
        self._ops = self._bound.op_list.ops()
        self._copies = {
            op[0]: (self._view(op[4], op[6]), self._view(op[5], op[6])) for op in self._ops if op[1] == "copy"
        }
        torch.cuda.synchronize(device)
        with torch.cuda.stream(self._streams[0]):
            self._issue()
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        with (
            capture_window("the plain graph", TIMEOUT_S),
            torch.cuda.graph(self._graph, stream=self._streams[0], capture_error_mode="thread_local"),
        ):
            self._issue()
        self._graph.instantiate()

    def replay(self) -> None:
        """Launch it on torch's current stream."""
        self._graph.replay()

    def num_nodes(self) -> dict[str, int]:
        """By kind."""
        nodes = walk(self._runtime.driver, self._graph.raw_cuda_graph())
        return dict(sorted(Counter(node.kind for node in nodes).items()))

    def close(self) -> None:
        """Give the graph back; before the runtime is closed."""
        torch.cuda.synchronize(self._device)
        self._graph.reset()

    def _view(self, address: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_Bytes(address, num_bytes), device=self._device)

    def _issue(self) -> None:
        for index, kind, stream, which, _, _, _ in self._ops:
            on = self._streams[stream]
            if kind == "record":
                self._events[which].record(on)
            elif kind == "wait":
                on.wait_event(self._events[which])
            elif kind == "copy":
                destination, source = self._copies[index]
                with torch.cuda.stream(on):
                    destination.copy_(source, non_blocking=True)
            elif kind == "call":
                compute = self._bound.computes[which]
                assert isinstance(compute, Compute), compute
                with torch.cuda.stream(on), torch.inference_mode():
                    self._state.run(self._segments[compute.begin : compute.end])
            elif kind != "write_value":  # the word that tells the host
                raise ProgramError(f"op {index} is a {kind}, for which torch has no call")
