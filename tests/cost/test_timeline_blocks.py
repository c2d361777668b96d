"""Predicted steps with tensor-parallel blocks: exchanges are spans on compute, no block's weights are waited for."""

from __future__ import annotations

import pytest
from test_dual_choice import GPU, HIDDEN, big_model

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.specs import StepShape
from graphshard.cost.dual import DualEstimate
from graphshard.cost.dual_choice import as_cost_block, block_times
from graphshard.cost.host_step import predict_step
from graphshard.cost.plain import plain_facts
from graphshard.cost.published import hardware
from graphshard.cost.segments import step_times
from graphshard.cost.timeline import predict
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit

SHAPE = StepShape(4)


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_a_step_in_slices_is_walked(transport: str) -> None:
    model, machine = big_model(2), hardware("h100")
    facts = plain_facts(model, 8)
    plans = {
        dual: make_plan(model, 8, GPU, dual=dual, step_shapes=[SHAPE], transport=transport)
        for dual in ("gather", "tensor_parallel")
    }
    steps = {dual: predict_step(model, facts, plan, SHAPE, machine) for dual, plan in plans.items()}
    spans = steps["tensor_parallel"].timeline.spans
    exchanges = [span.name for span in spans if span.name.startswith(("act_gather", "reduce_scatter"))]
    assert exchanges == [f"{verb} block={block}" for block in (0, 1) for verb in ("act_gather", "reduce_scatter")]
    assert all(span.lane == "compute" for span in spans if span.name in exchanges)
    assert steps["tensor_parallel"].duration_us < steps["gather"].duration_us, "four tokens a rank are few"
    waited = {unit for unit, _ in steps["tensor_parallel"].exposed_us}
    assert waited <= {unit.index for unit in plans["tensor_parallel"].units if not unit.is_sliced}


def test_parts_add_up_to_the_estimate() -> None:
    model, machine = big_model(1), hardware("h100")
    (time,) = block_times(model, machine, 8, 4)
    estimate = DualEstimate(as_cost_block(model, model.blocks[0]), machine, 8)
    whole = time.gather_us + time.compute_us + time.scatter_us
    assert estimate.times(32).tensor_parallel_us == pytest.approx(whole)
    assert time.gather_us == time.scatter_us > 0 and HIDDEN > 0


def test_times_of_blocks_that_nobody_gave_are_missed_by_name() -> None:
    model, machine = big_model(1), hardware("h100")
    plan = make_plan(model, 8, GPU, dual="tensor_parallel", step_shapes=[SHAPE])
    times = step_times(model, plain_facts(model, 8), SHAPE, machine)
    with pytest.raises(SpecError, match="block 0 is tensor-parallel, and its times are not known"):
        predict(emit(model, plan, SHAPE), build_layout(model, plan), times, machine)
