"""Units: who is sharded, with whom, and why not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.specs import DeviceSpec, KeptWeight, ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.units import UnitRules, choose_units, unit_cap, unit_stays


def small_llama() -> ModelSpec:
    weights = [WeightSpec("embed", (1000, 64), "float32")]
    segments = [SegmentSpec("embed", None, ("embed",))]
    for layer in range(2):
        prefix = f"layers.{layer}."
        weights += [
            WeightSpec(f"{prefix}norm", (64,), "float32"),
            WeightSpec(f"{prefix}q_proj", (64, 256), "float32"),
            WeightSpec(f"{prefix}o_proj", (256, 64), "float32"),
            WeightSpec(f"{prefix}empty", (0, 64), "float32"),
        ]
        segments += [
            SegmentSpec("q_proj", layer, (f"{prefix}norm", f"{prefix}q_proj", f"{prefix}empty")),
            SegmentSpec("o_proj", layer, (f"{prefix}o_proj",)),
        ]
    weights += [WeightSpec("rotary", (64,), "float32"), WeightSpec("shared", (64, 512), "float32")]
    segments += [SegmentSpec("mix", 1, ("shared",)), SegmentSpec("head", None, ("embed", "shared"))]
    return ModelSpec("small", tuple(weights), tuple(segments))


def test_every_resident_weight_has_its_reason() -> None:
    decisions, units = choose_units(small_llama(), UnitRules("layer", exclude=("*.1.o_proj",)))
    assert {d.weight: (d.unit, d.reason) for d in decisions} == {
        "embed": (None, "outside the layers, read by embed"),
        "layers.0.norm": (None, "256 B is below min_shard_bytes 64.0 KiB"),
        "layers.0.q_proj": (0, "64.0 KiB read by layers.0.q_proj"),
        "layers.0.o_proj": (0, "64.0 KiB read by layers.0.o_proj"),
        "layers.0.empty": (None, "has no bytes"),
        "layers.1.norm": (None, "256 B is below min_shard_bytes 64.0 KiB"),
        "layers.1.q_proj": (1, "64.0 KiB read by layers.1.q_proj"),
        "layers.1.o_proj": (None, "excluded by *.1.o_proj"),
        "layers.1.empty": (None, "has no bytes"),
        "rotary": (None, "no segment reads it"),
        "shared": (None, "outside the layers, read by head"),
    }
    assert [(unit.name, unit.weights) for unit in units] == [
        ("layers.0", ("layers.0.q_proj", "layers.0.o_proj")),
        ("layers.1", ("layers.1.q_proj",)),
    ]


def test_what_the_model_keeps_is_resident_unless_it_is_included() -> None:
    kept = (KeptWeight("layers.0.q_proj", "rewritten after loading"), KeptWeight("layers.1.norm", "a norm is small"))
    model = replace(small_llama(), kept=kept)
    decisions, _ = choose_units(model, UnitRules("layer", exclude=("*.1.norm",)))
    reasons = {d.weight: d.reason for d in decisions if d.unit is None}
    assert reasons["layers.0.q_proj"] == "rewritten after loading"
    assert reasons["layers.1.norm"] == "excluded by *.1.norm"
    decisions, _ = choose_units(model, UnitRules("layer", include=("*.q_proj",)))
    assert [d.weight for d in decisions if d.unit is not None] == ["layers.0.q_proj", "layers.1.q_proj"]


def test_a_model_with_rules_of_its_own_shards_all_else_however_small() -> None:
    model = replace(small_llama(), kept=(KeptWeight("layers.0.norm", "a norm is small"),))

    def sharded(**options: int) -> set[str]:
        plan = make_plan(model, 2, DeviceSpec("host", "any", 2**62), units="layer", **options)
        return {d.weight for d in plan.decisions if d.unit is not None}

    large = {f"layers.{layer}.{name}" for layer in range(2) for name in ("q_proj", "o_proj")}
    assert sharded() == large | {"layers.1.norm"}
    assert sharded(min_shard_bytes=1024) == large
    model = replace(model, kept=())
    assert sharded() == large


def test_a_model_keeps_only_what_it_has() -> None:
    with pytest.raises(SpecError, match=r"model small: keeps unknown weights \['layers.9.norm'\]"):
        replace(small_llama(), kept=(KeptWeight("layers.9.norm", "a norm is small"),))


def test_include_shards_the_named_alone() -> None:
    decisions, units = choose_units(small_llama(), UnitRules("weight", include=("embed", "*.norm", "shared")))
    assert [unit.name for unit in units] == ["embed", "layers.0.norm", "layers.1.norm", "shared"]
    assert {d.reason for d in decisions if d.unit is None} == {
        "no include pattern names it",
        "has no bytes",
        "no segment reads it",
    }
    # embed has two far stays; shared is read by neighbours and stays on
    assert unit_stays(small_llama(), units) == [(0, 0, 1), (1, 1, 2), (2, 3, 4), (3, 5, 7), (0, 6, 7)]


def test_caps_group_whole_weights_of_a_layer() -> None:
    sizes = [30, 30, 50, 200, 10, 60]
    names = [f"layers.0.w{i}" for i in range(6)] + [f"layers.1.w{i}" for i in range(6)]
    model = ModelSpec(
        "m",
        tuple(WeightSpec(name, (sizes[i % 6],), "uint8") for i, name in enumerate(names)),
        tuple(SegmentSpec(name.split(".")[2], i // 6, (name,)) for i, name in enumerate(names)),
    )
    _, units = choose_units(model, UnitRules("bytes:100", min_shard_bytes=0))
    assert [len(unit.weights) for unit in units] == [2, 1, 1, 2] * 2
    assert units[0].name == "layers.0.w0..layers.0.w1" and units[2].weights == ("layers.0.w3",)
    _, units = choose_units(model, UnitRules("bytes:1GiB", min_shard_bytes=0))
    assert [len(unit.weights) for unit in units] == [6, 6]
    _, units = choose_units(model, UnitRules("weight", min_shard_bytes=0))
    assert [unit.name for unit in units] == names


def test_weights_outside_the_layers_group_by_neighbourhood() -> None:
    model = ModelSpec(
        "m",
        tuple(WeightSpec(name, (64,), "uint8") for name in ("embed", "layers.0.w", "norm", "head")),
        (
            SegmentSpec("embed", None, ("embed",)),
            SegmentSpec("w", 0, ("layers.0.w",)),
            SegmentSpec("norm", None, ("norm",)),
            SegmentSpec("head", None, ("head",)),
        ),
    )
    _, units = choose_units(model, UnitRules("layer", min_shard_bytes=0, outside_layers=True))
    assert [unit.weights for unit in units] == [("embed",), ("layers.0.w",), ("norm", "head")]


def test_a_layer_that_runs_twice_is_gathered_twice() -> None:
    model = ModelSpec(
        "looped",
        tuple(WeightSpec(f"layers.{i}.w", (64,), "uint8") for i in range(3)),
        tuple(SegmentSpec(f"pass{p}", i, (f"layers.{i}.w",)) for p in range(2) for i in range(3)),
    )
    _, units = choose_units(model, UnitRules("layer", min_shard_bytes=0))
    assert unit_stays(model, units) == [(0, 0, 1), (1, 1, 2), (2, 2, 3), (0, 3, 4), (1, 4, 5), (2, 5, 6)]


def test_a_weight_of_two_layers_is_a_unit_alone() -> None:
    def model(first: int, second: int) -> ModelSpec:
        return ModelSpec(
            "m",
            (*(WeightSpec(f"layers.{i}.w", (64,), "uint8") for i in range(4)), WeightSpec("both", (64,), "uint8")),
            tuple(
                SegmentSpec("w", i, (f"layers.{i}.w", "both") if i in (first, second) else (f"layers.{i}.w",))
                for i in range(4)
            ),
        )

    _, units = choose_units(model(1, 2), UnitRules("layer", min_shard_bytes=0))
    assert [unit.name for unit in units] == ["layers.0", "layers.1", "both", "layers.2", "layers.3"]
    decisions, _ = choose_units(model(0, 3), UnitRules("layer", min_shard_bytes=0))
    assert decisions[-1].reason == "read far apart, by layers.0.w and layers.3.w: a unit would be gathered twice"


@pytest.mark.parametrize("policy", ["", "layers", "bytes", "bytes:", "row:3"])
def test_unknown_policies_list_the_known(policy: str) -> None:
    with pytest.raises(SpecError, match=r"unknown unit policy .*known are layer, weight, bytes:CAP"):
        unit_cap(policy)


def test_a_cap_that_is_no_size_is_refused() -> None:
    with pytest.raises(SpecError, match="'4MB' is not a number of bytes"):
        unit_cap("bytes:4MB")


def test_patterns_that_match_nothing_are_refused() -> None:
    with pytest.raises(SpecError, match=r"pattern 'model\.\*' matches no weight of small; its names look like embed"):
        choose_units(small_llama(), UnitRules("layer", exclude=("model.*",)))
