"""Units that somebody else decided: they are taken as they are, and everything else follows from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from replays import HOST, check_replays

from graphshard.core.errors import SpecError
from graphshard.core.plan import Unit
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import LLAMA_WEIGHTS, synthetic_model

LLAMA = synthetic_model(3, LLAMA_WEIGHTS, vocab_size=128)
ASKED = [
    {"units": "layer"},
    {"units": "weight", "prefetch_depth": 2, "head": "tail"},
    {"units": "bytes:200KiB", "outside_layers": True},
    {"units": "layer", "include": ["*q_proj*", "*embed*"]},
]


@pytest.mark.parametrize("asked", ASKED, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_given_units_stay_as_they_are_at_any_world_size(asked: dict[str, object], world_size: int) -> None:
    first = make_plan(LLAMA, 2, HOST, **asked)
    rest = {key: value for key, value in asked.items() if key in ("prefetch_depth", "head")}
    again = make_plan(LLAMA, world_size, HOST, placed=first.units, **rest)
    assert again.units == first.units and again.unit_policy == "placed"
    assert [d.unit for d in again.decisions] == [d.unit for d in first.decisions]
    if rest:
        assert again.residencies == first.residencies
    check_replays(LLAMA, again)


def test_no_units_at_all_are_a_plan_that_keeps_everything() -> None:
    plan = make_plan(LLAMA, 2, HOST, placed=())
    assert plan.units == () and plan.unit_policy == "replicated"


def test_units_of_another_model_are_refused() -> None:
    units = make_plan(LLAMA, 2, HOST, units="layer").units
    stranger = replace(units[1], weights=(*units[1].weights, "stranger"))
    with pytest.raises(SpecError, match=r"unit 1 \(layers.1\) has the weight stranger: .* has no such weight"):
        make_plan(LLAMA, 2, HOST, placed=(units[0], stranger))
    unread = ModelSpec("m", (WeightSpec("a", (9,), "uint8"),), (SegmentSpec("s", 0, ()),))
    with pytest.raises(SpecError, match="no segment reads it"):
        make_plan(unread, 2, HOST, placed=(Unit(0, "a", ("a",)),))


@pytest.mark.parametrize(
    "other", [*({k: v} for k, v in ASKED[3].items()), {"exclude": "*q_proj*"}, {"min_shard_bytes": 1}]
)
def test_what_given_units_decide_cannot_be_asked_for_beside_them(other: dict[str, object]) -> None:
    units = make_plan(LLAMA, 2, HOST, units="layer").units
    with pytest.raises(SpecError, match=f"{next(iter(other))} cannot be chosen beside placed"):
        make_plan(LLAMA, 2, HOST, placed=units, **other)
    with pytest.raises(SpecError, match="placed"):
        make_plan(LLAMA, 2, HOST, placed=units, replicated=True)
