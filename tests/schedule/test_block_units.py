"""The weights of a block are one unit, sliced where they can be, whatever the policy; the rest is grouped as ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.plan import Plan, Unit
from graphshard.core.specs import BlockSpec, KeptWeight, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.schedule.units import UnitRules, choose_units, explain_blocks, place_units

MLP = ("gate", "up", "down")


def model(num_features: int = 24, dtype: str = "float32", **changes: object) -> ModelSpec:
    """Two layers with an attention, an MLP that is a block, and a small norm; gate's bias belongs to the block."""
    weights, segments, blocks = [], [], []
    for layer in range(2):
        name = f"layers.{layer}."
        shapes = {"norm": (64,), "q": (64, 256), "o": (64, 256), "after": (64, 256)}
        weights += [WeightSpec(name + one, shape, "float32") for one, shape in shapes.items()]
        weights += [WeightSpec(name + one, (num_features, 1024), dtype) for one in MLP]
        weights.append(WeightSpec(name + "bias", (num_features,), dtype))
        begin = len(segments) + 2
        segments += [
            SegmentSpec("q", layer, (name + "norm", name + "q")),
            SegmentSpec("o", layer, (name + "o",)),
            SegmentSpec("gate_up", layer, (name + "norm", name + "up", name + "gate", name + "bias")),
            SegmentSpec("down", layer, (name + "down",)),
            SegmentSpec("after", layer, (name + "after",)),
        ]
        columns, rows = tuple(name + one for one in ("gate", "up", "bias")), (name + "down",)
        blocks.append(
            BlockSpec(
                name + "mlp",
                layer,
                begin,
                begin + 2,
                columns,
                rows,
                1024,
                1024,
                dtype,
                SegmentSpec("tp_prepare", layer, (name + "norm",)),
                SegmentSpec("tp_compute", layer, (*columns, *rows)),
                SegmentSpec("tp_finish", layer, ()),
            )
        )
    made = ModelSpec("small", tuple(weights), tuple(segments), blocks=tuple(blocks))
    return replace(made, **changes)  # type: ignore[arg-type]


def units_of(spec: ModelSpec, rules: UnitRules) -> dict[str, tuple[tuple[str, ...], bool]]:
    """By name: the weights without their layer, and whether they are sliced."""
    _, units = choose_units(spec, rules)
    assert [unit.index for unit in units] == list(range(len(units)))
    return {unit.name: (tuple(name.split(".")[-1] for name in unit.weights), unit.is_sliced) for unit in units}


BLOCK = ("gate", "up", "bias", "down")


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_a_block_is_one_sliced_unit_under_every_policy(world_size: int) -> None:
    rules = UnitRules("layer", slice_blocks=True, world_size=world_size)
    # a bias of 24 float32 in 3 or 6 parts is 32 or 16 bytes; in 2 parts 48
    assert units_of(model(), rules) == {
        "layers.0": (("q", "o", "after"), False),
        "layers.0.mlp": (BLOCK, True),
        "layers.1": (("q", "o", "after"), False),
        "layers.1.mlp": (BLOCK, True),
    }
    found = units_of(model(), replace(rules, policy="weight"))
    assert [name for name in found if name.startswith("layers.0")] == [
        "layers.0.q",
        "layers.0.o",
        "layers.0.mlp",
        "layers.0.after",
    ]
    assert found["layers.0.mlp"] == (BLOCK, True)
    found = units_of(model(), replace(rules, policy="bytes:1B"))
    assert found["layers.0.mlp"] == (BLOCK, True) and len(found) == 8


@pytest.mark.parametrize(
    ("world_size", "dtype", "why"),
    [
        (1, "float32", "one rank keeps every row"),
        (5, "float32", "24 rows of layers.0.gate are no multiple of 5 ranks"),
        (4, "float16", "a slice of layers.0.bias is 12 B, no multiple of 16 B"),
        (2, "int4", "layers.0.gate is int4, of elements below a byte"),
    ],
)
def test_a_block_that_cannot_be_sliced_is_a_flat_unit_of_its_own(world_size: int, dtype: str, why: str) -> None:
    """So files of one number of ranks can be made into those of another: units are the same."""
    spec, rules = model(dtype=dtype), UnitRules("layer", slice_blocks=True, world_size=world_size, min_shard_bytes=1024)
    decisions, units = choose_units(spec, rules)
    assert units_of(spec, rules)["layers.0.mlp"] == (BLOCK, False)
    assert explain_blocks(spec, decisions, units, world_size)[0] == f"layers.0.mlp: not sliced: {why}"


def test_without_the_option_nothing_changes() -> None:
    bare = replace(model(), blocks=())
    for policy in ("layer", "weight", "bytes:200KiB"):
        rules = UnitRules(policy, world_size=2)
        assert choose_units(model(), rules) == choose_units(bare, rules)
        assert choose_units(bare, replace(rules, slice_blocks=True)) == choose_units(bare, rules)


def test_blocks_are_explained() -> None:
    spec, rules = model(), UnitRules("layer", slice_blocks=True, world_size=2)

    def told(rules: UnitRules, spec: ModelSpec = spec) -> tuple[str, ...]:
        return explain_blocks(spec, *choose_units(spec, rules), rules.world_size)

    assert told(rules) == tuple(
        f"layers.{layer}.mlp: sliced, each of 2 ranks keeps 12 of 24 rows of each weight" for layer in range(2)
    )
    assert told(replace(rules, exclude=("*.0.up",)))[0] == (
        "layers.0.mlp: not sliced: layers.0.up stays resident (excluded by *.0.up)"
    )
    assert told(replace(rules, exclude=("*.0.up",)))[1] == told(rules)[1]
    kept = replace(spec, kept=(KeptWeight("layers.1.down", "a rule of the model"),))
    assert told(rules, kept)[1] == "layers.1.mlp: not sliced: layers.1.down stays resident (a rule of the model)"
    assert told(replace(rules, min_shard_bytes=2**20))[0].startswith("layers.0.mlp: not sliced: layers.0.gate stays")
    assert told(replace(rules, slice_blocks=False, min_shard_bytes=0))[0] == (
        "layers.0.mlp: not sliced: its weights are not one sliced unit"
    )


def test_a_block_that_lacks_a_weight_is_grouped_as_any_weights() -> None:
    rules = UnitRules("layer", slice_blocks=True, world_size=2, exclude=("*.0.up",))
    found = units_of(model(), rules)
    # its bias is too small to be sharded alone
    assert found["layers.0"] == (("q", "o", "gate", "down", "after"), False)
    assert found["layers.1.mlp"] == (BLOCK, True)


def test_a_bias_that_is_first_read_inside_a_block_stays_resident() -> None:
    """In slices its gather could not be waited for in time; a norm that is read before, or a matrix, is no such one."""
    spec = model()
    (first, _), names = spec.blocks, ("layers.0.bias2", "layers.0.norm", "layers.0.after")
    segments = [
        replace(one, reads=(*one.reads, names[0])) if one.path == "layers.0.down" else one for one in spec.segments
    ]
    spec = replace(
        spec,
        weights=(*spec.weights, WeightSpec(names[0], (1024,), "float32")),
        segments=tuple(segments),
        blocks=(replace(first, finish=replace(first.finish, reads=names)), *spec.blocks[1:]),
    )
    for slice_blocks in (True, False):
        rules = UnitRules("layer", slice_blocks=slice_blocks, world_size=2, min_shard_bytes=0)
        why = {one.weight: one.reason for one in choose_units(spec, rules)[0] if one.unit is None}
        due = {names[0]: "read by layers.0.tp_finish, behind what a block computes in slices"}
        assert why == (due if slice_blocks else {})
    included = UnitRules("layer", include=("*",), slice_blocks=True, world_size=2)
    assert not [one for one in choose_units(spec, included)[0] if one.unit is None]


def test_given_units_are_sliced_as_blocks_list_them() -> None:
    spec = model()
    (block, _) = spec.blocks
    decisions = place_units(spec, [Unit(0, "mlp", block.weights, is_sliced=True)])
    assert {d.weight for d in decisions if d.unit == 0} == set(block.weights)
    for weights in (block.weights[::-1], block.weights[:2], (*block.weights, "layers.0.q"), ("layers.0.q",)):
        with pytest.raises(SpecError, match=r"unit 0 \(mlp\) is sliced, and small has no block of the weights"):
            place_units(spec, [Unit(0, "mlp", weights, is_sliced=True)])


def test_what_is_chosen_can_be_laid_out() -> None:
    for world_size in range(1, 9):
        spec = model()
        decisions, units = choose_units(spec, UnitRules("layer", slice_blocks=True, world_size=world_size))
        plan = Plan(
            "small",
            world_size,
            decisions,
            units,
            (),
            0,
            0,
            "inside",
            "pull",
            "cooperative",
            (StepShape(1),),
            "layer",
        )
        layout = build_layout(spec, plan)
        assert [unit.is_sliced for unit in layout.units] == [unit.is_sliced for unit in units]
        assert any(unit.is_sliced for unit in units) == (world_size in (2, 3, 6))
