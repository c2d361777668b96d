"""The walk, against sums that can be done by hand, and its speed's shape; spans as a measured step has them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from small_models import CUDA, layered_model, machine

from graphshard.core.errors import ProgramError
from graphshard.core.layout import build_layout
from graphshard.core.lowering import Record, Wait
from graphshard.core.plan import Plan
from graphshard.core.program import Program
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.cost import timeline
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.segments import SegmentTime, StepTimes
from graphshard.cost.timeline import Prediction, predict
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.synthetic import synthetic_model

HOST = DeviceSpec("host", "test", 2**33)


def fixed(model: ModelSpec, alone: float, shared: float | None = None, cached: float | None = None) -> StepTimes:
    one = SegmentTime(alone, alone if shared is None else shared, alone if cached is None else cached)
    return StepTimes(StepShape(1), (one,) * len(model.segments))


def gathers_of(us: float) -> HardwareSpec:
    """A machine where every gather takes `us`."""
    spec = machine(memory_bytes_per_s=1e18)
    return replace(spec, links=(replace(spec.links[0], bytes_per_s=1e18, t0_us=us),))


def walk(
    num_layers: int, times: tuple[float, ...], hardware: HardwareSpec, **options: object
) -> tuple[Prediction, Program, Plan]:
    model, _ = layered_model([[64]] * num_layers)
    plan = make_plan(model, 2, CUDA, **{"units": "layer", "include": ["*"], **options})
    program = emit(model, plan)
    made = predict(program, build_layout(model, plan), fixed(model, *times), hardware, executor=plan.executor)
    return made, program, plan


def test_depth_1_hides_all_but_the_first_gather() -> None:
    """Gathers of 10 us under compute of 12."""
    made, _, _ = walk(5, (12.0,), gathers_of(10.0), prefetch_depth=1)
    assert made.duration_us == pytest.approx(10 + 5 * 12) and made.replicated_us == 60
    assert made.exposed_us == ((0, pytest.approx(10.0)),) and made.added_us == pytest.approx(10.0)


def test_longer_gathers_are_the_critical_path() -> None:
    """Gathers of 30 us, compute of 12: two slots, so a gather begins when the compute before the last is done."""
    made, _, _ = walk(4, (12.0,), gathers_of(30.0), prefetch_depth=1)
    assert made.duration_us == pytest.approx(4 * 30 + 12)
    assert [span.kind for span in made.critical_path] == ["copy"] * 4 + ["compute"]
    assert made.total_exposed_us == pytest.approx(4 * 30 + 12 - 48)
    assert made.critical_path[0].begin_us == 0 and made.critical_path[-1].end_us == made.duration_us


def test_depth_0_gathers_after_the_only_slot_is_read() -> None:
    made, _, _ = walk(4, (12.0,), gathers_of(30.0), prefetch_depth=0)
    assert made.duration_us == pytest.approx(4 * 42)
    assert dict(made.exposed_us) == pytest.approx(dict.fromkeys(range(4), 30.0))


def test_the_tail_hides_the_first_gather_too() -> None:
    """Its prefetch of the next step's first unit is waited for at the end, where it is not hidden."""
    made, _, _ = walk(4, (12.0,), gathers_of(10.0), prefetch_depth=1, head="tail")
    assert made.exposed_us == () and made.join_us == 0 and made.duration_us == pytest.approx(48)
    longer, _, _ = walk(4, (12.0,), gathers_of(30.0), prefetch_depth=1, head="tail")
    assert longer.join_us == pytest.approx(30 - 12)


def test_overlap_slows_both() -> None:
    """Compute is 1.5 times as long beside a gather, a gather twice as long beside compute."""
    hardware = replace(gathers_of(10.0), overlap_copy=2.0)
    made, _, _ = walk(2, (40.0, 60.0), hardware, prefetch_depth=1)
    # 10 alone; then the second gather needs 20 beside compute, which does 20 / 1.5 of its 40 us meanwhile
    assert made.duration_us == pytest.approx(10 + 20 + (40 - 20 / 1.5) + 40)
    assert made.total_exposed_us == pytest.approx(10) and made.added_us == pytest.approx(10 + 20 - 20 / 1.5)


def test_copies_on_two_streams_share_the_link() -> None:
    one, _, _ = walk(4, (12.0,), gathers_of(30.0), prefetch_depth=1)
    model, _ = layered_model([[64]] * 4)
    plan = make_plan(model, 2, CUDA, units="layer", include=["*"], prefetch_depth=1, num_copy_streams=2)
    two = predict(
        emit(model, plan), build_layout(model, plan), fixed(model, 12.0), gathers_of(30.0), num_copy_streams=2
    )
    assert two.duration_us == pytest.approx(one.duration_us)
    assert {span.lane for span in two.timeline.spans} == {"compute", "copy", "copy1"}


def test_one_worker_does_everything_in_turn() -> None:
    """On a host, cooperative: nothing overlaps; a weight just gathered is in the cache."""
    hardware = replace(gathers_of(10.0), kind="host")
    cold, _, plan = walk(3, (12.0, 12.0, 7.0), hardware, prefetch_depth=0, executor="cooperative")
    assert plan.executor == "cooperative" and cold.duration_us == pytest.approx(3 * 22)
    assert dict(cold.exposed_us) == pytest.approx(dict.fromkeys(range(3), 10.0))
    cached = replace(hardware, cache_bytes=2**20)
    warm, _, _ = walk(3, (12.0, 12.0, 7.0), cached, prefetch_depth=0, executor="cooperative")
    assert warm.duration_us == pytest.approx(3 * 17) and warm.added_us == pytest.approx(15)
    # at depth 1 the next gather comes between: both units have to fit
    unit = 64 * 32 * 2
    tight = replace(hardware, cache_bytes=unit)
    assert walk(3, (12.0, 12.0, 7.0), tight, prefetch_depth=1, executor="cooperative")[0].duration_us == pytest.approx(
        10 * 3 + 12 * 2 + 7
    )
    threaded, _, _ = walk(3, (12.0, 12.0, 7.0), cached, prefetch_depth=1, executor="threaded")
    assert threaded.duration_us == pytest.approx(10 + 36), "another core's cache"


def test_bytes() -> None:
    made, program, plan = walk(4, (12.0,), gathers_of(10.0), prefetch_depth=1)
    model, _ = layered_model([[64]] * 4)
    layout = build_layout(model, plan)
    assert made.reserved_bytes == layout.shard_bytes + layout.slot_bytes + layout.resident_bytes
    assert made.peak_slot_bytes == 2 * layout.units[0].num_bytes == layout.slot_bytes
    assert made.num_nodes == 4 + 4 * 2 and made.launch_us == 5.0 + 0.5 * 12
    assert program.num_slots == 2


def test_spans_of_a_lane_do_not_overlap_and_read_as_measured_ones() -> None:
    made, _, _ = walk(6, (12.0, 14.0), gathers_of(20.0), prefetch_depth=2)
    for lane in made.timeline.lanes:
        spans = [span for span in made.timeline.spans if span.lane == lane]
        assert all(before.end_us <= after.begin_us + 1e-9 for before, after in pairwise(spans))
    kinds = {span.kind for span in made.timeline.spans}
    assert kinds == {"compute", "copy", "wait"}
    assert {span.name for span in made.timeline.spans if span.kind == "copy"} == {f"unit={i}" for i in range(6)}
    assert all(span.segment == "s0" for span in made.timeline.spans if span.kind == "compute")


def test_nccl_has_one_copy_and_its_own_figures() -> None:
    model, _ = layered_model([[64]] * 3)
    plan = make_plan(model, 2, CUDA, units="layer", include=["*"], prefetch_depth=1, transport="nccl")
    made = predict(emit(model, plan), build_layout(model, plan), fixed(model, 12.0), machine(), transport="nccl")
    assert len([span for span in made.timeline.spans if span.kind == "copy"]) == 3
    assert dict(made.exposed_us)[0] > 5.0  # its t0


def test_a_list_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> object:
        lowered = lower(*args)  # type: ignore[arg-type]
        first = next(op for op in lowered.ops if isinstance(op, Record) and op.stream == "copy")
        kept = tuple(op for op in lowered.ops if op is not first)
        assert any(isinstance(op, Wait) and op.event == first.event for op in kept)
        return replace(lowered, ops=kept)

    lower = timeline.lower
    monkeypatch.setattr(timeline, "lower", broken)
    with pytest.raises(ProgramError, match=r"the list does not end: .*stream compute at op .* an event that nothing"):
        walk(3, (12.0,), gathers_of(10.0), prefetch_depth=1)


def test_a_long_list() -> None:
    """1,000 layers of 9 weights: some 70,000 lowered ops."""
    model = synthetic_model(1000, (("a", (64, 64)),) * 1 + tuple((f"w{i}", (64, 64)) for i in range(8)))
    plan = make_plan(model, 4, CUDA, units="weight", prefetch_depth=1, min_shard_bytes=0)
    made = predict(emit(model, plan), build_layout(model, plan), fixed(model, 5.0), gathers_of(4.0))
    assert made.duration_us == pytest.approx(4 + 9000 * 5)
