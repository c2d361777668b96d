"""A step of several graphs before it is run: its sequence walked in time, on model streams.

The list is the verified one (`core.sequence_lowering`). Graphs share the stream `compute`; spans say whose op it was:
lanes are `draft.compute`, `draft.copy`, `draft.prefetch`, `target.compute`, ... A gather from outside comes after all
that was issued before it: on `host` the host has waited for that, on a GPU its stream does. Streams go on by themselves
(executor `threaded`, and every GPU), as in `timeline.predict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout
from graphshard.core.lowering import ORIGIN, ActOp, Compute, CopyRun, Lowered, LoweredOp, Record, Wait, lower
from graphshard.core.ops import RecordOutputs
from graphshard.core.sequence import Fold, Held, PrefetchLaunch, PrefetchWait, SequenceOp, StepSequence
from graphshard.core.sequence_lowering import ENTRY_STEP, LoweredSequence, Source, lower_sequences
from graphshard.core.timeline import Overlap, Span, Timeline, overlap_of, prefetch_name, prefetch_wait_name
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.segments import StepTimes
from graphshard.cost.timeline import NOTHING, Walk, Work, gathers_us

_HOST = -2
"""The op index of waits for what was issued before: there was nothing to do yet, so they are no spans."""


@dataclass(frozen=True)
class GraphCost:
    """What a graph of a sequence is made of, in time."""

    layout: Layout
    times: StepTimes
    transport: str
    """Whose figures its gathers have."""
    num_copies: int
    """Of a gather: one from each rank under `pull`, a single one under `nccl`."""
    num_copy_streams: int = 1
    folds_us: Mapping[str, float] = field(default_factory=dict)
    """By segment: each fold alone."""


@dataclass(frozen=True)
class SequencePrediction:
    """One step of a sequence as the model sees it, in steady state."""

    timeline: Timeline
    exposed_us: tuple[tuple[str, int, float], ...]
    """(graph, unit, us) that `compute` stands still for a gather from outside, before the graph's replay."""

    def overlap(self, graph: str, segment: str) -> Overlap:
        """How much of `graph`'s gathers from outside runs beside the fold `segment`."""
        return overlap_of(self.timeline.spans, graph, segment)


def predict_sequence(
    sequence: StepSequence, costs: Mapping[str, GraphCost], hardware: HardwareSpec, num_steps: int = 2
) -> SequencePrediction:
    """Walk `num_steps` steps of `sequence`, one after the other, and return the last.

    Its timeline begins when the step before it ended; what that one launched and was not done by then is in it.

    Raises:
        SpecError: a graph or a fold has no cost, or the hardware no figures for a transport.
        ProgramError: the list does not end, since a stream waits for an event that is never recorded.
    """
    work = _SequenceWork(sequence, costs, hardware, num_steps)
    lowered, begin = _with_host(work.made, sequence, num_steps - 1)
    walk = Walk(lowered, work)
    spans = walk.run().spans
    last = NOTHING if begin is None else walk.recorded[begin]
    begin_us = 0.0 if last == NOTHING else spans[last].end_us
    shown = [
        replace(span, begin_us=max(0.0, span.begin_us - begin_us), end_us=span.end_us - begin_us)
        for span in spans
        if span.end_us > begin_us and not _is_host_order(span)
    ]
    ordered = by_lane(shown, [graph.name for graph in sequence.graphs])
    waits = [
        (op.graph, op.unit, span.duration_us)
        for op in dict.fromkeys(one for one in sequence.ops if isinstance(one, PrefetchWait))
        for span in ordered
        if span.kind == "wait" and span.name == prefetch_wait_name(op.graph, op.unit)
    ]
    return SequencePrediction(Timeline(0, tuple(ordered)), tuple(waits))


def by_lane(spans: Sequence[Span], graphs: Sequence[str]) -> list[Span]:
    """`spans` by lane, each lane in time: graphs in the order of `graphs`, of each compute first and prefetch last."""

    def place(span: Span) -> tuple[int, int, str, float]:
        graph, _, stream = span.lane.rpartition(".")
        return graphs.index(graph), {"compute": 0, "prefetch": 2}.get(stream, 1), stream, span.begin_us

    return sorted(spans, key=place)


def _is_host_order(span: Span) -> bool:
    """A wait for something to do: of a gather's stream for its launch, or that of its graph."""
    return span.kind == "wait" and (not span.name or (span.unit is None and not span.lane.endswith(".compute")))


class _SequenceWork:
    """How long each op of the joined list takes, and what its span says (`timeline.Walked`)."""

    def __init__(
        self, sequence: StepSequence, costs: Mapping[str, GraphCost], hardware: HardwareSpec, num_steps: int
    ) -> None:
        self.sequence, self.costs, self.hardware = sequence, costs, hardware
        missing = [graph.name for graph in sequence.graphs if graph.name not in costs]
        if missing:
            raise SpecError(f"graphs {', '.join(missing)} have no cost; given are {', '.join(costs) or 'none'}")
        self.works = {graph.name: self.work_of(graph.name) for graph in sequence.graphs}
        copies = {name: cost.num_copies for name, cost in costs.items()}
        lists = {
            graph.name: lower(graph.program, copies[graph.name], costs[graph.name].num_copy_streams)
            for graph in sequence.graphs
        }
        self.made = lower_sequences([sequence] * num_steps, copies, lists)

    def work_of(self, name: str) -> Work:
        cost, program = self.costs[name], self.sequence.graph(name).program
        gathers = gathers_us(cost.layout, cost.transport, self.hardware)
        return Work(program, cost.layout, cost.times, gathers, cost.num_copies, self.hardware)

    def issued(self, source: Source) -> SequenceOp:
        """What the host issued, for an op that is in no graph's list."""
        if source.step != ENTRY_STEP:
            return self.sequence.ops[source.op]
        launch = self.sequence.entry[source.op]
        assert not isinstance(launch, Held), launch  # held units are no ops
        return launch

    def in_graph(self, op: LoweredOp, source: Source) -> LoweredOp:
        """As the graph's own list has it."""
        index = -1 if source.program_op is None else source.program_op
        if isinstance(op, CopyRun):
            return replace(op, op=index, unit=op.unit - self.made.units[source.graph])
        return replace(op, op=index)

    def copy_us(self, op: CopyRun) -> float:
        source = self.made.source(op)
        inner = self.in_graph(op, source)
        assert isinstance(inner, CopyRun), inner
        return self.works[source.graph].copy_us(inner)

    def compute_us(self, op: Compute) -> tuple[float, float]:
        source = self.made.source(op)
        if source.program_op is not None:
            return self.works[source.graph].compute_us(op)
        fold = self.issued(source)
        assert isinstance(fold, Fold), fold
        folds_us = self.costs[fold.graph].folds_us
        if fold.segment not in folds_us:
            raise SpecError(f"fold {fold.segment} of graph {fold.graph} has no time: give it in GraphCost.folds_us")
        return folds_us[fold.segment], folds_us[fold.segment] * self.hardware.overlap_compute

    def exchange_us(self, op: ActOp) -> float:
        return self.works[self.made.source(op).graph].exchange_us(op)

    def gate_slot(self, op: Record) -> int | None:
        return None  # bytes in slots are each graph's own prediction

    def unit_of(self, op: LoweredOp) -> int | None:
        source = None if op.op == _HOST else self.made.source(op)
        if source is None or source.program_op is None:
            return None
        return self.works[source.graph].unit_of(self.in_graph(op, source))

    def span(self, op: LoweredOp, begin_us: float, end_us: float) -> Span:
        if op.op == _HOST:
            return Span(op.stream, "wait", "", begin_us, end_us)
        source = self.made.source(op)
        lane = f"{source.graph}.{ORIGIN}" if op.stream == ORIGIN else op.stream
        if source.program_op is not None:
            return replace(self.works[source.graph].span(self.in_graph(op, source), begin_us, end_us), lane=lane)
        issued = self.issued(source)
        if isinstance(issued, Fold):
            return Span(lane, "compute", issued.segment, begin_us, end_us, segment=issued.segment)
        if isinstance(issued, PrefetchLaunch):
            if not isinstance(op, CopyRun):
                return Span(lane, "wait", "", begin_us, end_us)  # there was nothing to do yet
            return Span(lane, "copy", prefetch_name(issued.graph, issued.unit), begin_us, end_us, issued.unit)
        if isinstance(issued, PrefetchWait):
            return Span(lane, "wait", prefetch_wait_name(issued.graph, issued.unit), begin_us, end_us, issued.unit)
        return Span(lane, "wait", "discard", begin_us, end_us)


def _with_host(made: LoweredSequence, sequence: StepSequence, step: int) -> tuple[Lowered, int | None]:
    """The list with the host in it: (list, the event after which `step` begins).

    A gather from outside is launched when the replay or the fold before it has been done.
    """
    ops: list[LoweredOp] = []
    num_events = made.lowered.num_events
    seen: int | None = None
    begin: int | None = None
    group = outputs_of = (ENTRY_STEP, _HOST)
    for op in made.lowered.ops:
        source = made.source(op)
        if (source.step, source.op) != group:
            group = (source.step, source.op)
            if source.step == step and begin is None:
                begin = seen
            if seen is not None and source.program_op is None and op.stream != ORIGIN:
                ops.append(Wait(seen, op.stream, _HOST))
        ops.append(op)
        if isinstance(op, Compute) and source.program_op is None:
            seen = num_events
            ops.append(Record(seen, ORIGIN, op.op))
            num_events += 1
        elif isinstance(op, Record) and op.stream == ORIGIN and source.program_op is not None and outputs_of != group:
            seen = op.event  # the last one of the list, unless its outputs are said to be ready before
            if source.program_op >= 0:
                is_outputs = isinstance(sequence.graph(source.graph).program.ops[source.program_op], RecordOutputs)
                outputs_of = group if is_outputs else outputs_of
    return Lowered(tuple(ops), made.lowered.streams, num_events, made.lowered.outputs_event), begin
