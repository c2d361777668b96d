"""A captured step: what a server embeds and a benchmark replays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from graphshard._core import Calls, Graph, GraphExec, Step
from graphshard.core.errors import DeviceError, ProgramError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.evidence.inspection import CapturedNodes
from graphshard.runtime.evidence.report import CopyEngineEvidence, GraphReport, LaunchCost, judge

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


class Captured(Protocol):
    """A captured list with its compute; on CUDA `runtime.cuda.CapturedStep`."""

    @property
    def bound(self) -> BoundProgram:
        """What was captured."""

    @property
    def calls(self) -> Calls:
        """What compute nodes call, which may raise."""

    @property
    def handle(self) -> int:
        """The driver's graph, for walking."""

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Which nodes each op became, see `_core.Graph.spans`."""

    def launch(self) -> None:
        """Enqueue a replay."""

    def close(self) -> None:
        """Give the graph back. Idempotent."""


@dataclass(frozen=True)
class HostCaptured:
    """What a graph keeps alive: its list's memory, its calls with their arena blocks."""

    graph: Graph
    exec: GraphExec
    bound: BoundProgram
    calls: Calls

    @staticmethod
    def capture(calls: Calls, executor: str, seed: int, bound: BoundProgram, timeout_s: float) -> HostCaptured:
        """Capture `bound` with `calls` as its compute. Nothing runs.

        Raises:
            DriverError: the driver refused, or a capture that others opened did not end in time.
        """
        graph = bound.op_list.capture(calls, (), timeout_s)
        return HostCaptured(graph, graph.instantiate(executor, seed), bound, calls)

    @property
    def handle(self) -> int:
        """See `Captured`."""
        return self.graph.handle

    def spans(self) -> list[tuple[int, int, int, int]]:
        """See `Captured`."""
        return self.graph.spans()

    def launch(self) -> None:
        """See `Captured`."""
        self.exec.launch(self.bound.streams[0])

    def close(self) -> None:
        """The graph goes with its last reference."""


class StepGraph:
    """One captured step shape. Made by `Runtime.graph`; `inputs` and `outputs` are static tensors.

    Write the inputs, replay, read the outputs:

        step.inputs["tokens"].copy_(tokens); step.replay(); logits = step.outputs["logits"]
    """

    def __init__(
        self, runtime: Runtime, shape: StepShape, bound: BoundProgram, capture: Callable[[BoundProgram], Captured]
    ) -> None:
        """Capture `bound` by `capture`. Nothing of the step runs.

        Raises:
            DeviceError: the driver refused.
        """
        self._capture: Callable[[BoundProgram], Captured] | None = capture  # owns what compute was recorded into
        self._captured: Captured | None = capture(bound)
        self._embedded: Step | None = None
        self._is_alike = False
        self.shape = shape
        self.inputs: dict[str, Tensor] = runtime.buffers(shape, "input")
        self.outputs: dict[str, Tensor] = runtime.buffers(shape, "output")
        self._runtime = runtime

    def replay(self) -> None:
        """Run the captured step on what the inputs hold now.

        Order:   after everything that this runtime was asked to do before. On `host` the calling thread is the
                 current stream, so this returns when `outputs` may be read (a tail prefetch may still run). On `cuda`
                 it is torch's: what the current stream gets from now on may read them, the host after `synchronize`.
        Blocks:  the host, bounded by the runtime's timeout; on `cuda` only while two steps are in flight.
        Capture: no.

        Raises:
            ProgramError: the runtime was closed.
            DeviceError: the graph was closed, or a window has been remapped since it was captured.
            CommError: the step did not end in time.
        """
        self._runtime.at_step_boundary()
        captured = self._open()
        self._runtime.step(self.shape, captured.bound, captured.launch, captured.calls)

    def synchronize(self) -> None:
        """Wait, bounded, until the replays so far have ended and the host may read `outputs`: `Runtime.synchronize`."""
        self._runtime.synchronize()

    def promise_alike(self) -> None:
        """Promise that all ranks replay this step alike from C: as often, and in one order with all their other calls.

        `handle` wants it under a collective transport. What C issues is posted on no control page, so nobody compares
        it with what peers issue, and a gather that a peer does not come to waits without a limit. An eager step of
        Python's has ended (`synchronize`) before C replays.
        """
        self._is_alike = True

    @property
    def handle(self) -> int:
        """What `gs_step_open` of graphshard.h takes, while this graph is open: a server then replays it without Python.

        What it opened stays valid until it is released, also when this graph, its runtime and their memory are dropped
        or closed here. Steps of Python's and of the server's may alternate; neither may begin while the other's run.

        Raises:
            DeviceError: the graph was closed.
            ProgramError: gathers need all ranks (transport nccl), and `promise_alike` was not called; or they come from
                outside the graph, too.
        """
        captured = self._open()
        if self._runtime.needs_all_ranks(self.shape) and not self._is_alike:
            raise ProgramError(
                f"step shape {self.shape}: its {_needing(captured.bound)} need all ranks, and nobody watches what a "
                "server replays from C; if all ranks replay it alike, say so by promise_alike(), else use transport "
                "pull, and blocks that are gathered"
            )
        if self._embedded is None:
            self._embedded = self._runtime.embed(self.shape, captured, self.inputs, self.outputs)
        return self._embedded.handle

    def num_nodes(self) -> dict[str, int]:
        """The captured graph's nodes, by kind."""
        if isinstance(self._captured, HostCaptured):
            return self._captured.graph.num_nodes()
        return {} if self._captured is None else dict(Counter(node.kind for node in self.look().nodes))

    def report(
        self, strict: bool = True, num_launches: int = 0, copy_engine: CopyEngineEvidence | Path | None = None
    ) -> GraphReport:
        """What the captured graph is shown to be: each gather's nodes by kind, its copies and bytes.

        The graph is walked in this process; on `host` that takes the variables of `device.host_driver_environment()`
        when it is started. Collective as a step if launches are timed.

        Args:
            strict: refuse kernel nodes in gathers; else they are a warning, and `problems` of the report.
            num_launches: steps to run on what the inputs hold, for the host's cost of a launch.
            copy_engine: evidence, or the file of one, that gathers run on copy engines; a walk alone does not show it.

        Raises:
            DeviceError: a gather has a kernel node (`strict`), the graph is closed, or it cannot be walked here.
            SpecError: the evidence is of another machine.
        """
        launches = []
        for _ in range(num_launches):
            self.replay()
            launches.append(self._runtime.launch_s)
        launch = LaunchCost.of(launches) if launches else None
        return judge(self.look().report(launch, copy_engine), strict)

    def look(self) -> CapturedNodes:
        """The captured graph's nodes, walked."""
        captured = self._open()
        return CapturedNodes(self._runtime, self.shape, captured.bound, captured.handle, captured.spans())

    @property
    def is_closed(self) -> bool:
        """Whether the graph was given back, by hand or because a window was remapped."""
        return self._captured is None

    def capture_again(self, bound: BoundProgram) -> None:
        """Capture `bound` in place of what was captured, with the same compute: slots are where they were, windows not.

        Used by the runtime. If the driver refuses, the old graph stays, and the windows that it reads.
        """
        if self._captured is not None and self._capture is not None:
            old, self._captured = self._captured, self._capture(bound)
            self._give_back(old)

    def _open(self) -> Captured:
        if self._captured is None:
            raise DeviceError(f"the graph of step shape {self.shape} is closed; capture again with Runtime.capture")
        return self._captured

    def close(self) -> None:
        """Give the graph back, and what only it kept alive. Idempotent; a later replay is refused."""
        if self._captured is not None:
            self._give_back(self._captured)
        self._captured = self._capture = None

    def _give_back(self, captured: Captured) -> None:
        # A server's reference owns the graph and its pool: they go when it is released.
        if self._embedded is None or self._embedded.num_references == 1:
            captured.close()
        self._embedded = None


def _needing(bound: BoundProgram) -> str:
    return "gathers" if bound.is_collective else "tensor-parallel blocks"
