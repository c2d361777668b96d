"""Modes of a plan's blocks by the cost model: slices for few tokens, gathers for many, and nothing without figures."""

from __future__ import annotations

import pytest

from graphshard.core.plan import Plan
from graphshard.core.specs import BlockSpec, DeviceSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.cost.auto_plan import auto_plan
from graphshard.cost.dual_choice import CostChooser, as_cost_block
from graphshard.cost.published import hardware
from graphshard.schedule.dual import mode_rows

HIDDEN, WIDE = 4096, 16384
GPU = DeviceSpec("cuda", "NVIDIA H100 80GB HBM3", 80 * 2**30)
SHAPES = [StepShape(1), StepShape(4), StepShape(4096)]


def big_model(num_layers: int = 3) -> ModelSpec:
    """Layers of an attention and a block, as wide as real ones, with a bias in the block."""
    weights, segments, blocks = [], [], []
    for layer in range(num_layers):
        at = f"layers.{layer}"
        weights.append(WeightSpec(f"{at}.attn", (HIDDEN, HIDDEN), "bfloat16"))
        weights += [WeightSpec(f"{at}.{name}", (WIDE, HIDDEN), "bfloat16") for name in ("gate", "up", "down")]
        weights.append(WeightSpec(f"{at}.bias", (WIDE,), "bfloat16"))
        columns, rows = tuple(f"{at}.{name}" for name in ("gate", "up", "bias")), (f"{at}.down",)
        begin = len(segments) + 1
        segments += [
            SegmentSpec("attn", layer, (f"{at}.attn",)),
            SegmentSpec("gate_up", layer, columns),
            SegmentSpec("down", layer, rows),
        ]
        prepare, finish = SegmentSpec("mlp.prepare", layer, ()), SegmentSpec("mlp.finish", layer, ())
        compute = SegmentSpec("mlp.compute", layer, (*columns, *rows))
        block = BlockSpec(
            f"{at}.mlp", layer, begin, begin + 2, columns, rows, HIDDEN, HIDDEN, "bfloat16", prepare, compute, finish
        )
        blocks.append(block)
    return ModelSpec("big", tuple(weights), tuple(segments), blocks=tuple(blocks))


def plan_of(device: DeviceSpec = GPU, **choices: object) -> Plan:
    return auto_plan(big_model(), 8, device, None, SHAPES, {"dual": "auto", "units": "layer", **choices})


def test_a_cost_block_is_the_blocks_gemms() -> None:
    model = big_model(1)
    block = as_cost_block(model, model.blocks[0])
    assert [(gemm.n, gemm.k, gemm.split) for gemm in block.gemms] == [
        (WIDE, HIDDEN, "column"),
        (WIDE, HIDDEN, "column"),
        (HIDDEN, WIDE, "row"),
    ]
    assert block.num_bytes == 2 * (3 * WIDE * HIDDEN + WIDE)
    assert block.why_not_sliced(8) == "" and "no multiple of 5 ranks" in block.why_not_sliced(5)


def test_few_tokens_take_slices_and_many_are_gathered() -> None:
    plan = plan_of()
    assert [set(modes) for _, modes in plan.modes] == [{"tensor_parallel"}, {"tensor_parallel"}, {"gather"}]
    assert "modes: by the cost model with the figures of h100" in "\n".join(plan.block_reasons)
    rows = mode_rows(plan)
    assert len(rows) == 3 and all(row["why"].startswith("predicted: ") for row in rows)


def test_the_choice_is_the_estimates_own() -> None:
    model = big_model(2)
    block = model.blocks[1]
    for tokens in (1, 64, 256, 1024, 8192):
        for is_ahead in (False, True):
            chosen = CostChooser(hardware("h100"), 8, "pull", is_ahead).choose(model, block, tokens)
            least, most = (float(text.split()[-1]) for text in chosen.reason.split(" us")[:2])
            assert least <= most and f"{tokens} tokens a rank" in chosen.reason
    assert CostChooser(hardware("h100"), 8, "pull", True).choose(model, block, 8192).mode == "gather"
    assert CostChooser(hardware("h100"), 8, "pull", False).choose(model, block, 1).mode == "tensor_parallel"


def test_dual_shards_blocks_whose_gathers_would_not_hide() -> None:
    """The residency solver would keep them: nothing of this step is long enough to hide their gathers."""
    model = big_model()
    solved = auto_plan(model, 8, GPU, None, SHAPES[:1], {})
    assert not any("mlp" in unit.name for unit in solved.units)
    plan = auto_plan(model, 8, GPU, None, SHAPES[:1], {"dual": "auto"})
    assert [unit.name for unit in plan.units if unit.is_sliced] == [block.name for block in model.blocks]
    assert plan.modes == ((SHAPES[0], ("tensor_parallel",) * 3),)
    assert plan.reasons[0].startswith("what is sharded follows from rules: dual was asked for")


def test_an_unknown_machine_follows_the_rule() -> None:
    plan = plan_of(DeviceSpec("host", "any", 2**40))
    assert any("no figures of this machine" in reason for reason in plan.block_reasons)


@pytest.mark.parametrize("dual", ["off", "gather", "tensor_parallel"])
def test_nobody_is_asked_where_the_mode_is_given(dual: str) -> None:
    plan = plan_of(dual=dual)
    assert not any("cost model" in reason for reason in plan.block_reasons)
    assert bool(plan.modes) == (dual != "off")
