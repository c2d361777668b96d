"""A captured step: what a server embeds and a benchmark replays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from graphshard._core import Calls, Graph, GraphExec
from graphshard.core.errors import DeviceError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


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
        self._graph: Graph | None = bound.op_list.capture(calls)
        self._exec: GraphExec | None = self._graph.instantiate(executor, runtime.hooks.seed)
        self.shape = shape
        self.inputs: dict[str, Tensor] = runtime.buffers(shape, "input")
        self.outputs: dict[str, Tensor] = runtime.buffers(shape, "output")
        self._runtime, self._bound, self._calls = runtime, bound, calls
        self._generations = runtime.generations()

    def replay(self) -> None:
        """Run the captured step on what the inputs hold now.

        Order:   after everything that this runtime was asked to do before. On `host` the calling thread is the
                 current stream, so this returns when `outputs` may be read (a tail prefetch may still run).
        Blocks:  the host, bounded by the runtime's timeout.
        Capture: no.

        Raises:
            DeviceError: the graph was closed, or its memory has been remapped since it was captured.
            CommError: the step did not end in time.
        """
        self._runtime.step(self.shape, self._bound, self._launch, self._calls)

    def num_nodes(self) -> dict[str, int]:
        """The captured graph's nodes, by kind."""
        return {} if self._graph is None else self._graph.num_nodes()

    def close(self) -> None:
        """Give the graph back. Idempotent; a later replay is refused."""
        self._graph = None
        self._exec = None

    def _launch(self) -> None:
        if self._exec is None:
            raise DeviceError(f"the graph of step shape {self.shape} is closed; capture again with Runtime.capture")
        if self._generations != self._runtime.generations():
            raise DeviceError(
                f"the graph of step shape {self.shape} was captured over memory that has been remapped since: "
                "its addresses are stale; capture again with Runtime.capture"
            )
        self._exec.launch(self._bound.streams[0])
