"""Weights that no plan may shard: what a fold reads, and what is borrowed; by any way to ask for a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from replays import HOST, check_replays

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, UnitLayout, build_layout
from graphshard.core.plan import Plan, Unit
from graphshard.core.specs import DeviceSpec, KeptWeight, ModelSpec, SegmentSpec, StepShape
from graphshard.cost.auto_plan import auto_plan
from graphshard.cost.published import hardware
from graphshard.runtime.compiled import compile_plan
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import LLAMA_WEIGHTS, synthetic_model
from graphshard.verify import verify

PLAIN = synthetic_model(3, LLAMA_WEIGHTS, vocab_size=128)
FOLDED = tuple(weight.name for weight in PLAIN.weights if "k_proj" in weight.name)
LENT = next(weight.name for weight in PLAIN.weights if "embed" in weight.name)
FOLD = SegmentSpec("commit_fold", None, FOLDED)
MODEL = replace(PLAIN, folds=(FOLD,), borrowed=(LENT,))
READ = "read by commit_fold, for all layers at once"
ASKED: list[dict[str, Any]] = [
    {"units": "layer"},
    {"units": "weight", "min_shard_bytes": 0},
    {"units": "bytes:200KiB", "outside_layers": True, "min_shard_bytes": 0},
    {"units": "layer", "include": ["*"], "exclude": ["*k_proj*", "*embed*"]},
    {"replicated": True},
]


def reasons_of(plan: Plan) -> dict[str, str]:
    return {decision.weight: decision.reason for decision in plan.decisions if decision.unit is None}


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_plan_keeps_them_and_says_why(asked: dict[str, Any], world_size: int) -> None:
    plan = make_plan(MODEL, world_size, HOST, **asked)
    reasons = reasons_of(plan)
    assert {name: reasons[name] for name in FOLDED} == dict.fromkeys(FOLDED, READ)
    assert reasons[LENT] == "borrowed from the target"
    assert bool(plan.units) != bool(asked.get("replicated"))
    check_replays(MODEL, plan)


def test_a_plan_without_them_is_that_of_the_plain_model() -> None:
    """Folds change what is resident, and nothing else: units, slots and programs are those of an exclusion."""
    excluded = make_plan(PLAIN, 2, HOST, units="layer", exclude=["*k_proj*"])
    plan = make_plan(replace(PLAIN, folds=(FOLD,)), 2, HOST, units="layer")
    assert plan.units == excluded.units and plan.residencies == excluded.residencies


@pytest.mark.parametrize(
    ("include", "name", "why"),
    [
        (["*q_proj*", "*k_proj*"], FOLDED[0], READ),
        (["*"], LENT, "borrowed from the target"),
        ([FOLDED[1]], FOLDED[1], READ),
    ],
)
def test_to_include_one_is_refused_by_name(include: list[str], name: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        make_plan(MODEL, 2, HOST, units="layer", include=include)
    assert f"names the weight {name}, which stays whole: it is {why}; say exclude=({name!r},)" in str(caught.value)


def test_units_that_have_one_are_refused_by_name() -> None:
    units = (Unit(0, "all", (PLAIN.weights[1].name, FOLDED[0])),)
    with pytest.raises(SpecError) as caught:
        make_plan(MODEL, 2, HOST, placed=units)
    assert f"unit 0 (all) shards the weight {FOLDED[0]}, which stays whole: it is {READ}" in str(caught.value)
    with pytest.raises(SpecError, match="stays whole: it is borrowed from the target"):
        make_plan(MODEL, 2, HOST, placed=(Unit(0, "embed", (LENT,)),))


def test_a_weight_that_only_a_fold_reads_is_refused_for_that_reason() -> None:
    segments = tuple(
        replace(segment, reads=tuple(name for name in segment.reads if name != FOLDED[0])) for segment in MODEL.segments
    )
    model = replace(MODEL, segments=segments)
    assert reasons_of(make_plan(model, 2, HOST, units="layer"))[FOLDED[0]] == READ
    with pytest.raises(SpecError, match="read by commit_fold"):
        make_plan(model, 2, HOST, placed=(Unit(0, "it", (FOLDED[0],)),))


def test_a_finished_plan_that_shards_one_is_refused_by_name() -> None:
    plan = make_plan(PLAIN, 2, HOST, units="layer")
    with pytest.raises(SpecError, match=rf"unit 0 \(layers.0\) shards the weight {FOLDED[0]}, which stays whole"):
        compile_plan(MODEL, plan)
    with pytest.raises(SpecError, match="shards the weight"):
        build_layout(MODEL, plan)


def test_a_layout_has_no_place_for_what_is_borrowed() -> None:
    plan = make_plan(PLAIN, 2, HOST, units="layer")
    whole = build_layout(PLAIN, plan)
    lent = build_layout(replace(PLAIN, borrowed=(LENT,)), plan)
    assert LENT not in {view.weight for view in lent.resident}
    embed = PLAIN.weight(LENT)
    assert whole.resident_bytes - lent.resident_bytes == -(-embed.num_bytes // 256) * 256


def test_the_verifier_finds_a_fold_that_reads_a_unit() -> None:
    """A judge of its own: also of a layout that nobody here would build."""
    plan = make_plan(PLAIN, 2, HOST, units="layer")
    compiled = compile_plan(PLAIN, plan)
    report = verify(compiled.programs, compiled.layout, model=replace(PLAIN, folds=(FOLD,)), num_copies=2)
    assert f"fold commit_fold reads weight {FOLDED[0]}, which lies in unit 0" in report.text()
    assert verify(compiled.programs, compiled.layout, model=PLAIN, num_copies=2).violations == ()


@pytest.mark.parametrize("share", [None, 0.9])
def test_the_solver_shards_none(share: float | None) -> None:
    gpu = DeviceSpec("cuda", "NVIDIA H100 80GB HBM3", memory_bytes=80 << 30, granularity_bytes=4096)
    big = synthetic_model(4, LLAMA_WEIGHTS, vocab_size=128)
    folded = tuple(weight.name for weight in big.weights if "k_proj" in weight.name)
    model = replace(big, folds=(SegmentSpec("commit_fold", None, folded),))
    whole = build_layout(model, make_plan(model, 2, gpu, replicated=True)).reserved_bytes(4096)
    choices = {} if share is None else {"memory_limit_bytes": int(whole * share)}
    plan = auto_plan(model, 2, gpu, hardware("h100"), [StepShape(1)], choices)
    assert plan.units or share is None
    assert not {name for unit in plan.units for name in unit.weights} & set(folded)


def test_a_model_s_own_rules_stay_beside_folds() -> None:
    norm = next(weight.name for weight in PLAIN.weights if "norm" in weight.name)
    model = replace(MODEL, kept=(KeptWeight(norm, "its own rule"),))
    assert reasons_of(make_plan(model, 2, HOST, units="layer"))[norm] == "its own rule"


def resident_of(layout: Layout) -> set[str]:
    units: tuple[UnitLayout, ...] = layout.units
    assert not {view.weight for unit in units for view in unit.views} & set(FOLDED)
    return {view.weight for view in layout.resident}


def test_what_a_fold_reads_lies_in_resident_memory() -> None:
    assert set(FOLDED) <= resident_of(build_layout(MODEL, make_plan(MODEL, 3, HOST, units="weight")))


def test_specs_of_models_without_folds_have_no_new_rules() -> None:
    spec = ModelSpec("m", PLAIN.weights, PLAIN.segments)
    assert make_plan(spec, 2, HOST, units="layer").units == make_plan(PLAIN, 2, HOST, units="layer").units
