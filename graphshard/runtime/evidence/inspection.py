"""Looking at a captured step: the walk, its attribution and the evidence, put together for one runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.evidence.attribution import GatherNodes, Places, Span, gathers_of, problems_of
from graphshard.runtime.evidence.report import (
    CopyEngineEvidence,
    GraphReport,
    LaunchCost,
    check_copy_engine,
    kinds_of,
    rows_of,
)
from graphshard.runtime.evidence.sequence import Seen, seen_calls, seen_nodes
from graphshard.runtime.evidence.traced import bound_program
from graphshard.runtime.evidence.walk import Node, walk

if TYPE_CHECKING:
    from graphshard.runtime.runtime import Runtime


class CapturedNodes:
    """The nodes of one captured step, walked once, and which op of its bound list each belongs to."""

    def __init__(self, runtime: Runtime, shape: StepShape, bound: BoundProgram, graph: int, spans: list[Span]) -> None:
        """Walk the graph with this handle, in which the ops of `bound` became the nodes that `spans` names.

        Raises:
            DeviceError: this process cannot walk graphs of the runtime's driver; says what to do.
        """
        self.nodes: tuple[Node, ...] = walk(runtime.driver, graph)
        self._runtime, self._shape, self._bound = runtime, shape, bound
        self._spans, self._bound_ops = spans, bound.op_list.ops()
        self.places = places_of(runtime)

    def gathers(self) -> list[GatherNodes]:
        """Each gather's nodes, in the program's order."""
        bound = self._bound
        return gathers_of(self.nodes, self._spans, self._bound_ops, bound.program, bound.sources, self.places)

    def seen(self) -> Seen:
        """What the graph does, op by op."""
        bound = self._bound
        streams = bound.lowered.streams
        return seen_nodes(self.nodes, self._spans, self._bound_ops, bound.sources, streams, self.places)

    def report(self, launch: LaunchCost | None = None, shown: CopyEngineEvidence | Path | None = None) -> GraphReport:
        """As `StepGraph.report`; what is wrong with gathers is in it, and is no error."""
        runtime, driver = self._runtime, self._runtime.driver
        transport = runtime.plan.transport
        copy_engine = CopyEngineEvidence.load(shown) if isinstance(shown, Path) else shown
        if copy_engine is not None:
            check_copy_engine(copy_engine, driver.device_name, driver.version, transport)
        gathers = self.gathers()
        return GraphReport(
            rank=runtime.rank,
            world_size=runtime.plan.world_size,
            step_shape=str(self._shape),
            transport=transport,
            device=driver.device_name,
            driver=driver.path,
            driver_version=driver.version,
            nodes=kinds_of(self.nodes),
            gathers=rows_of(gathers),
            problems=tuple(problems_of(gathers, self.nodes)),
            launch=launch,
            copy_engine=copy_engine,
        )


def places_of(runtime: Runtime) -> Places:
    """What lies where in the memory that `runtime` reads and writes."""
    return Places.of(runtime.layout, runtime.memory, runtime._transport)


def traced_run(runtime: Runtime, shape: StepShape) -> Seen:
    """Run one eager step of `shape` on what the inputs hold, and tell what the driver was given (collective as a step).

    Raises:
        CommError: the step did not end in time.
    """
    bound = bound_program(runtime, shape)
    bound.op_list.set_trace(True)
    try:
        runtime.run(shape.batch_size, shape.tokens_per_sequence)
        return seen_calls(bound.op_list.take_trace(), bound.sources, bound.lowered.streams, places_of(runtime))
    finally:
        bound.op_list.set_trace(False)


def listed(runtime: Runtime, shape: StepShape) -> Seen:
    """What an eager step of `shape` would hand to the driver, by its bound list. Nothing is run."""
    bound = bound_program(runtime, shape)
    return seen_calls(bound.op_list.ops(), bound.sources, bound.lowered.streams, places_of(runtime))
