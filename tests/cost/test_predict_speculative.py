"""A step of draft and target walked in time, against sums that can be done by hand; and the arithmetic of overlaps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from small_models import CUDA, layered_model, machine

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.plan import HeadPolicy
from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SequenceOp,
    StepSequence,
)
from graphshard.core.specs import StepShape
from graphshard.core.timeline import Overlap, Span, overlap_of, prefetch_name
from graphshard.cost.hardware import HardwareKind, HardwareSpec
from graphshard.cost.segments import SegmentTime, StepTimes
from graphshard.cost.speculative import GraphCost, SequencePrediction, predict_sequence
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.sequence import emit_sequences

GATHER_US = 10.0
FOLD = "commit_fold"
Graph = tuple[Program, GraphCost]


def gathers(kind: HardwareKind = "host", **changes: object) -> HardwareSpec:
    """A machine where every gather takes GATHER_US."""
    spec = machine(memory_bytes_per_s=1e18, kind=kind, **changes)
    return replace(spec, links=(replace(spec.links[0], bytes_per_s=1e18, t0_us=GATHER_US),))


def graph(num_layers: int, segment_us: float, head: HeadPolicy, fold_us: float | None = None) -> Graph:
    """A unit and a segment a layer, at depth 1."""
    model, _ = layered_model([[64]] * num_layers)
    plan = make_plan(model, 2, CUDA, units="layer", include=["*"], prefetch_depth=1, head=head)
    times = StepTimes(StepShape(1), (SegmentTime(segment_us, segment_us, segment_us),) * num_layers)
    folds = {} if fold_us is None else {FOLD: fold_us}
    return emit(model, plan), GraphCost(build_layout(model, plan), times, "pull", 2, folds_us=folds)


def step(
    draft: Graph, target: Graph, hardware: HardwareSpec, num_draft_replays: int = 1, kind: str = "step"
) -> SequencePrediction:
    sequences = emit_sequences(target[0], draft[0], num_draft_replays=num_draft_replays, fold=FOLD)
    return predict_sequence(sequences[kind], {"draft": draft[1], "target": target[1]}, hardware)


def test_a_prefetch_under_a_longer_fold_is_hidden() -> None:
    """Draft 3 x 12; target 10 for its own first gather, 3 x 20; fold 30 with a gather of 10 beside it."""
    made = step(graph(3, 12.0, "outside"), graph(3, 20.0, "inside", 30.0), gathers())
    assert made.timeline.duration_us == pytest.approx(36 + 10 + 60 + 30)
    assert made.exposed_us == ()
    found = made.overlap("draft", FOLD)
    assert (found.prefetch_us, found.overlap_us, found.share) == pytest.approx((10.0, 10.0, 1.0))
    (prefetch,) = [span for span in made.timeline.spans if span.name == prefetch_name("draft", 0)]
    assert prefetch.lane == "draft.prefetch" and prefetch.begin_us == pytest.approx(106.0)


def test_a_prefetch_over_a_shorter_fold_is_waited_for() -> None:
    """Fold 4: of the gather's 10 us 6 are left, and the next draft run waits for them."""
    made = step(graph(3, 12.0, "outside"), graph(3, 20.0, "inside", 4.0), gathers())
    assert {one[0]: one[2] for one in made.exposed_us} == pytest.approx({"draft": 6.0})
    found = made.overlap("draft", FOLD)
    assert (found.overlap_us, found.late_us, found.share) == pytest.approx((4.0, 6.0, 0.4))
    # the step begins with the rest of the gather before: 6 more than the sum of the work
    assert made.timeline.duration_us == pytest.approx(6 + 36 + 10 + 60 + 10)


def shared_or_own(stream: str) -> SequencePrediction:
    """The target's own first gather is issued from outside as well, before the draft's; fold 12."""
    draft, target = graph(3, 12.0, "outside"), graph(3, 20.0, "outside", 12.0)
    launches = (PrefetchLaunch("target", 0, 0, "copy"), PrefetchLaunch("draft", 0, 0, stream))  # type: ignore[arg-type]
    ops: tuple[SequenceOp, ...] = (
        PrefetchWait("draft", 0, 0),
        Replay("draft"),
        PrefetchWait("target", 0, 0),
        Replay("target"),
        *launches,
        Fold("target", FOLD),
    )
    graphs = (SequenceGraph("draft", draft[0]), SequenceGraph("target", target[0]))
    sequence = StepSequence(graphs, ops, launches, launches)
    return predict_sequence(sequence, {"draft": draft[1], "target": target[1]}, gathers())


def test_a_shared_stream_queues() -> None:
    """On one stream 10 us of the target's come first: 2 of 12 are left. On two they share the link, 20 us each."""
    shared = shared_or_own("copy")
    found = shared.overlap("draft", FOLD)
    assert (found.prefetch_us, found.overlap_us, found.late_us) == pytest.approx((10.0, 2.0, 8.0))
    assert {span.lane for span in shared.timeline.spans if span.name.startswith("prefetch d")} == {"target.copy"}
    own = shared_or_own("prefetch").overlap("draft", FOLD)
    assert (own.prefetch_us, own.overlap_us, own.late_us) == pytest.approx((20.0, 12.0, 8.0))


def test_runs_of_the_draft_gather_in_between() -> None:
    """Two runs: the second one's first unit is gathered after the first, on the host with nothing beside it."""
    made = step(graph(3, 12.0, "outside"), graph(3, 20.0, "inside", 30.0), gathers(), num_draft_replays=2)
    assert made.timeline.duration_us == pytest.approx(2 * 36 + GATHER_US + 10 + 60 + 30)
    assert [us for _, _, us in made.exposed_us] == [pytest.approx(GATHER_US)]


def test_a_cold_step_gathers_first() -> None:
    """Every step as if nothing were in flight: the gather that the step before launched is not waited for twice."""
    made = step(graph(3, 12.0, "outside"), graph(3, 20.0, "inside", 30.0), gathers(), kind="cold")
    assert made.timeline.duration_us == pytest.approx(GATHER_US + 36 + 10 + 60 + 30)


def test_a_gpu_launches_when_verification_ends_too() -> None:
    """Its host runs ahead, but the gather's stream waits for what was launched before."""
    host, gpu = (step(graph(3, 12.0, "outside"), graph(3, 20.0, "inside", 30.0), gathers(k)) for k in ("host", "cuda"))
    assert gpu.timeline.duration_us == pytest.approx(host.timeline.duration_us)
    assert gpu.overlap("draft", FOLD).overlap_us == pytest.approx(GATHER_US)


def test_fold_and_gather_slow_each_other() -> None:
    """A gather takes twice as long beside compute, compute 1.5 times beside a gather."""
    hardware = gathers(overlap_copy=2.0, overlap_compute=1.5)
    made = step(graph(3, 12.0, "outside"), graph(3, 20.0, "inside", 30.0), hardware)
    found = made.overlap("draft", FOLD)
    assert found.prefetch_us == pytest.approx(20.0)
    assert found.fold_us == pytest.approx(20 + (30 - 20 / 1.5))


def test_spans_of_a_lane_do_not_overlap_and_lanes_are_in_order() -> None:
    made = step(graph(3, 12.0, "outside"), graph(4, 9.0, "tail", 4.0), gathers())
    assert made.timeline.lanes == ("draft.compute", "draft.copy", "draft.prefetch", "target.compute", "target.copy")
    for lane in made.timeline.lanes:
        spans = [span for span in made.timeline.spans if span.lane == lane]
        assert all(before.end_us <= after.begin_us + 1e-6 for before, after in pairwise(spans))
        assert all(span.end_us > span.begin_us >= 0 and span.name for span in spans)


def test_what_has_no_cost_is_named() -> None:
    draft, target = graph(3, 12.0, "outside"), graph(3, 20.0, "inside")
    with pytest.raises(SpecError, match="fold commit_fold of graph target has no time"):
        step(draft, target, gathers())
    sequence = emit_sequences(target[0], draft[0], fold=None)["step"]
    with pytest.raises(SpecError, match="graphs draft have no cost; given are target"):
        predict_sequence(sequence, {"target": target[1]}, gathers())


@pytest.mark.parametrize(
    ("prefetch", "overlap_us", "late_us"),
    [
        ((10.0, 14.0), 4.0, 0.0),  # inside
        ((6.0, 14.0), 4.0, 0.0),  # begins before
        ((18.0, 24.0), 2.0, 4.0),  # ends after
        ((5.0, 30.0), 10.0, 10.0),  # around
        ((0.0, 9.0), 0.0, 0.0),  # before
        ((22.0, 25.0), 0.0, 5.0),  # after: all of it, and the gap
    ],
)
def test_overlap_of_two_intervals(prefetch: tuple[float, float], overlap_us: float, late_us: float) -> None:
    found = Overlap.of(prefetch, (10.0, 20.0))
    assert (found.overlap_us, found.late_us, found.fold_us) == pytest.approx((overlap_us, late_us, 10.0))
    assert found.share == pytest.approx(overlap_us / (prefetch[1] - prefetch[0]))


def test_overlap_takes_the_last_gather_of_each_unit() -> None:
    """Of a step's spans: the first one is what the step before launched."""
    name = prefetch_name("draft", 0)
    spans = [
        Span("draft.prefetch", "copy", name, 0.0, 3.0, 0),
        Span("draft.prefetch", "copy", name, 50.0, 58.0, 0),
        Span("target.copy", "copy", prefetch_name("target", 0), 40.0, 70.0, 0),
        Span("target.compute", "compute", FOLD, 52.0, 60.0, segment=FOLD),
    ]
    assert overlap_of(spans, "draft", FOLD) == Overlap(8.0, 8.0, 6.0, 0.0)
    assert overlap_of(spans, "target", FOLD).late_us == 10.0
    with pytest.raises(ValueError, match="0 gathers of other"):
        overlap_of(spans, "other", FOLD)
