"""A captured step: what a server embeds and a benchmark replays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from graphshard._core import Calls, Graph, GraphExec
from graphshard.core.errors import DeviceError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


@dataclass(frozen=True)
class _Captured:
    """What a graph keeps alive: its list's memory, its calls with their arena blocks."""

    graph: Graph
    exec: GraphExec
    bound: BoundProgram
    calls: Calls

    def launch(self) -> None:
        self.exec.launch(self.bound.streams[0])


class StepGraph:
    """One captured step shape. Made by `Runtime.graph`; `inputs` and `outputs` are static tensors.

    Write the inputs, replay, read the outputs:

        step.inputs["tokens"].copy_(tokens); step.replay(); logits = step.outputs["logits"]
    """

    def __init__(self, runtime: Runtime, shape: StepShape, bound: BoundProgram, calls: Calls, executor: str) -> None:
        """Capture `bound` with `calls` as its compute. Nothing runs.

        Raises:
            DeviceError: the driver refused.
        """
        graph = bound.op_list.capture(calls)
        self._captured: _Captured | None = _Captured(
            graph, graph.instantiate(executor, runtime.hooks.seed), bound, calls
        )
        self.shape = shape
        self.inputs: dict[str, Tensor] = runtime.buffers(shape, "input")
        self.outputs: dict[str, Tensor] = runtime.buffers(shape, "output")
        self._runtime = runtime

    def replay(self) -> None:
        """Run the captured step on what the inputs hold now.

        Order:   after everything that this runtime was asked to do before. On `host` the calling thread is the
                 current stream, so this returns when `outputs` may be read (a tail prefetch may still run).
        Blocks:  the host, bounded by the runtime's timeout.
        Capture: no.

        Raises:
            ProgramError: the runtime was closed.
            DeviceError: the graph was closed, or a window has been remapped since it was captured.
            CommError: the step did not end in time.
        """
        self._runtime.check_open()
        captured = self._captured
        if captured is None:
            raise DeviceError(f"the graph of step shape {self.shape} is closed; capture again with Runtime.capture")
        self._runtime.step(self.shape, captured.bound, captured.launch, captured.calls)

    def num_nodes(self) -> dict[str, int]:
        """The captured graph's nodes, by kind."""
        return {} if self._captured is None else self._captured.graph.num_nodes()

    @property
    def is_closed(self) -> bool:
        """Whether the graph was given back, by hand or because a window was remapped."""
        return self._captured is None

    def close(self) -> None:
        """Give the graph back, and what only it kept alive. Idempotent; a later replay is refused."""
        self._captured = None
