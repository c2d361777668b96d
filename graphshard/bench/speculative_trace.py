"""A whole step of draft and target in time, measured with an event after every bound op.

Graphs are captured once more for it (`runtime.evidence.traced`): they have more nodes than the real ones, so they are
never those whose overlap is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from graphshard._core import Event
from graphshard.bench.speculative import SHAPE, SpeculativeRig, in_turn
from graphshard.bench.stats import quantile
from graphshard.bench.trace import bound_of, bound_rows, spans_of
from graphshard.core.errors import CommError
from graphshard.core.sequence import COMMIT_FOLD
from graphshard.core.timeline import Span, Timeline, prefetch_name, prefetch_wait_name
from graphshard.cost.speculative import by_lane
from graphshard.runtime.evidence.traced import TracedStep
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.sequence import DRAFT, TARGET

NUM_TRACED = 11
"""Steps; the last one is the timeline, and segments have their medians over all but the first."""
SETTING = "own"


class _TracedGraph:
    """One runtime's step, and an event that says when its launching stream had come to it."""

    def __init__(self, name: str, runtime: Runtime) -> None:
        bound = bound_of(runtime, SHAPE)
        self.name, self._runtime, self._program = name, runtime, bound.program
        self._rows = bound_rows(bound, runtime.group.world_size, runtime.rank)
        origin = bound.lowered.streams[0]
        timed = [i for i, row in enumerate(self._rows) if row.stream == origin or row.kind != "record"]
        self._step = TracedStep(runtime, SHAPE, timed)
        self._compute = bound.streams[0]
        self.came = Event(runtime.driver, timing=True)

    def run(self) -> None:
        self._compute.record(self.came)
        self._step.run()

    def spans(self, zero: Event) -> Iterator[Span]:
        """Of the last run, in us since `zero`."""
        for span in spans_of(self._rows, self._step.done_us(zero), self._program, has_one_worker=False):
            if span.kind != "wait" or span.unit is not None:
                yield replace(span, lane=f"{self.name}.{span.lane}")


class _Tracer:
    """Steps one after another. The draft's gather is looked at after the next step, which waits for it."""

    def __init__(self, rig: SpeculativeRig) -> None:
        self._rig = rig
        self._draft, self._target = _TracedGraph(DRAFT, rig.drafts[SETTING]), _TracedGraph(TARGET, rig.target)
        self._gathers = [rig.timed_prefetches(SETTING) for _ in range(2)]
        self._zeros = [Event(rig.target.driver, timing=True) for _ in range(2)]
        self._origin = bound_of(rig.target, SHAPE).streams[0]

    def steps(self) -> list[list[Span]]:
        """The spans of NUM_TRACED steps, each counted from where the host began to issue it."""
        runs = {graph.name: graph.run for graph in (self._draft, self._target)}
        found: list[list[Span]] = []
        for number in range(NUM_TRACED):
            this, before = number % 2, 1 - number % 2
            zero = self._zeros[this]
            self._origin.record(zero)
            if not zero.synchronize(self._rig.request.timeout_s):  # streams do not wait for each other's events
                raise CommError(f"a traced step did not begin within {self._rig.request.timeout_s:.1f} s")
            self._rig.issue(SETTING, runs, self._gathers[this])
            spans = [*self._draft.spans(zero), *self._target.spans(zero), self._fold(zero)]
            spans += self._waited(self._target, this, zero)
            if number:
                found[-1].append(self._gather(DRAFT, before, self._zeros[before]))
                spans += self._waited(self._draft, before, zero)
            found.append(spans)
        last = (NUM_TRACED - 1) % 2
        self._gathers[last][DRAFT].synchronize()
        found[-1].append(self._gather(DRAFT, last, self._zeros[last]))
        return [by_lane(spans, (DRAFT, TARGET)) for spans in found]

    def _fold(self, zero: Event) -> Span:
        fold = self._rig.fold
        begin, end = (event.elapsed_us(zero) for event in (fold.begun, fold.ended))
        return Span("target.compute", "compute", COMMIT_FOLD, begin, end, segment=COMMIT_FOLD)

    def _waited(self, graph: _TracedGraph, which: int, zero: Event) -> Iterator[Span]:
        """The gather that `graph` waited for, as far as it is of this step, and the wait, if there was one."""
        gather = self._gather(graph.name, which, zero)
        if gather.end_us > 0:
            yield replace(gather, begin_us=max(0.0, gather.begin_us))
        came = graph.came.elapsed_us(zero)
        if gather.end_us > came:
            name = prefetch_wait_name(graph.name, 0)
            yield Span(f"{graph.name}.compute", "wait", name, came, gather.end_us, 0)

    def _gather(self, name: str, which: int, zero: Event) -> Span:
        prefetch = self._gathers[which][name]
        begin, end = (event.elapsed_us(zero) for event in (prefetch.begun, prefetch.ended))
        return Span(f"{name}.prefetch", "copy", prefetch_name(name, 0), begin, end, 0)


def trace_steps(rig: SpeculativeRig) -> dict[str, Any]:
    """`timeline`, the last traced step's, and `segments_us`, by graph and layer (collective)."""
    tracer = _Tracer(rig)
    steps = in_turn(rig, tracer.steps)
    timeline = Timeline(rig.group.rank, tuple(steps[-1]))
    return {"timeline": asdict(timeline), "segments_us": _segments_us(steps[1:])}


def _segments_us(steps: Sequence[Sequence[Span]]) -> dict[str, list[float]]:
    """The median of each layer's segment over the steps, by graph."""
    found: dict[str, dict[int, list[float]]] = {}
    for span in (span for spans in steps for span in spans):
        if span.kind == "compute" and span.layer is not None:
            graph = span.lane.partition(".")[0]
            found.setdefault(graph, {}).setdefault(span.layer, []).append(span.duration_us)
    return {graph: [quantile(sorted(layers[i]), 0.5) for i in sorted(layers)] for graph, layers in found.items()}
