"""The published conditions, and what `dual=` makes of a model's blocks: modes by step shape, with their reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tuned_cases import HOST, blocks_model, tuned_of

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.plan import Plan
from graphshard.core.specs import BlockSpec, ModelSpec, StepShape
from graphshard.schedule.auto import make_plan
from graphshard.schedule.dual import RULE_TOKENS, Chosen, mode_rows
from graphshard.schedule.emit import emit, emit_all
from graphshard.schedule.gating import why_not_tensor_parallel
from graphshard.schedule.tune_file import tune_text
from graphshard.verify import verify

MODEL = blocks_model()
SHAPES = (StepShape(1), StepShape(8), StepShape(512))


def plan_of(model: ModelSpec = MODEL, world_size: int = 2, **options: object) -> Plan:
    return make_plan(model, world_size, HOST, **{"step_shapes": SHAPES, "min_shard_bytes": 0, **options})


def sliced(plan: Plan) -> dict[str, list[bool]]:
    """By step shape: which blocks are tensor-parallel."""
    return {str(shape): [mode == "tensor_parallel" for mode in modes] for shape, modes in plan.modes}


PUBLISHED = {"is_asked": True, "is_sequence_parallel": True, "world_size": 8, "hidden": 7168, "intermediate": 6144}


def test_published_conditions_hold_over_eight_ranks() -> None:
    assert why_not_tensor_parallel(**PUBLISHED) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"is_asked": False}, "a block is not to be computed in slices: dual mode is off"),
        ({"is_sequence_parallel": False}, "a block is not sequence-parallel: ranks hold no tokens of their own"),
        ({"world_size": 1}, "a block has one rank"),
        ({"world_size": 5}, "a block does not divide: intermediate size 6144 is no multiple of 5 ranks"),
        ({"world_size": 3}, "a block does not divide: hidden size 7168 is no multiple of 3 ranks"),
    ],
)
def test_each_published_condition_has_its_reason(change: dict[str, object], why: str) -> None:
    found = why_not_tensor_parallel(**{**PUBLISHED, **change})  # type: ignore[arg-type]
    assert found.startswith(why), found


def test_off_is_the_plan_that_there_was() -> None:
    plan = plan_of()
    assert plan == plan_of(dual="off")
    assert not plan.modes and not plan.block_reasons and not any(unit.is_sliced for unit in plan.units)
    assert "modes" not in plan.text() and mode_rows(plan) == []


def test_gather_slices_and_gathers_always() -> None:
    plan = plan_of(dual="gather")
    assert [unit.name for unit in plan.units if unit.is_sliced] == [block.name for block in MODEL.blocks]
    assert sliced(plan) == {"1x1": [False] * 3, "8x1": [False] * 3, "512x1": [False] * 3}
    assert {row["why"] for row in mode_rows(plan)} == {"dual is gather"}
    assert len({program.digest for program in emit_all(MODEL, plan).values()}) == 1


def test_tensor_parallel_is_forced_at_every_step_shape() -> None:
    plan = plan_of(dual="tensor_parallel")
    assert sliced(plan) == {"1x1": [True] * 3, "8x1": [True] * 3, "512x1": [True] * 3}
    program = emit(MODEL, plan, StepShape(512))
    assert [block.index for block in program.blocks] == [0, 1, 2]
    units = {op.unit for op in program.ops if hasattr(op, "unit")}
    assert units == {unit.index for unit in plan.units if not unit.is_sliced}
    assert emit(MODEL, plan).blocks == (), "without a step shape every block is gathered"


def test_auto_without_figures_follows_a_stated_rule() -> None:
    plan = plan_of(dual="auto")
    assert sliced(plan) == {"1x1": [True] * 3, "8x1": [True] * 3, "512x1": [False] * 3}
    assert f"modes: no figures of this machine: blocks are tensor-parallel up to {RULE_TOKENS} tokens" in "\n".join(
        plan.block_reasons
    )
    last = mode_rows(plan)[-1]
    assert last["mode"] == "gather" and last["why"] == f"1024 tokens of all ranks, more than {RULE_TOKENS}"
    assert last["blocks"] == "layers.0.mlp to layers.2.mlp (3 blocks)" and last["step_shape"] == "512x1"


@pytest.mark.parametrize("is_file", [False, True])
def test_auto_follows_a_tune_file(is_file: bool, tmp_path: Path) -> None:
    tuned = tuned_of(MODEL, {1: (3.0, 1.0), 8: (3.0, 4.0), 512: (5.0, 9.0)})
    path = tmp_path / "tune.json"
    path.write_text(tune_text(tuned))
    plan = plan_of(dual="auto", tune=path if is_file else tuned)
    assert sliced(plan) == {"1x1": [True] * 3, "8x1": [False] * 3, "512x1": [False] * 3}
    assert any(reason.startswith("modes: tune file ") for reason in plan.block_reasons)
    assert mode_rows(plan)[0]["why"] == "measured: 1 ms against 3 ms at 1 tokens a rank"


def test_measurements_of_something_else_are_refused() -> None:
    tuned = tuned_of(blocks_model(spaced=False), {1: (3.0, 1.0)})
    with pytest.raises(SpecError, match="the tune file is of model"):
        plan_of(dual="auto", tune=tuned)
    with pytest.raises(SpecError, match="tune says how steps run blocks, and dual is off"):
        plan_of(tune=tuned)


@dataclass(frozen=True)
class WideAlone:
    """Whoever asks is told to slice the wide blocks."""

    headline: str = "by nobody"

    def choose(self, model: ModelSpec, block: BlockSpec, tokens_per_rank: int) -> Chosen:
        wide = model.weight(block.weights[0]).shape[0] > 64
        return Chosen("tensor_parallel" if wide else "gather", f"{tokens_per_rank} tokens")


def test_blocks_of_one_step_may_have_unlike_modes() -> None:
    plan = plan_of(dual="auto", chooser=WideAlone())
    assert sliced(plan)["8x1"] == [False, False, True]
    rows = [row for row in mode_rows(plan) if row["step_shape"] == "8x1"]
    assert [(row["blocks"], row["mode"]) for row in rows] == [
        ("layers.0.mlp to layers.1.mlp (2 blocks)", "gather"),
        ("layers.2.mlp", "tensor_parallel"),
    ]


def test_what_cannot_be_sliced_is_gathered_with_the_reason() -> None:
    plan = plan_of(world_size=3, dual="tensor_parallel")
    assert sliced(plan) == {"1x1": [False] * 3, "8x1": [False] * 3, "512x1": [False] * 3}
    said = "\n".join(plan.block_reasons)
    assert "layers.0.mlp to layers.1.mlp (2 blocks): not sliced: 64 rows of gate are no multiple of 3 ranks" in said
    assert "gather, it does not divide: intermediate size 64 is no multiple of 3 ranks" in said
    alone = plan_of(world_size=1, dual="tensor_parallel")
    assert not alone.units and "it has one rank" in mode_rows(alone)[0]["why"]
    kept = plan_of(dual="tensor_parallel", exclude=("layers.2.gate",))
    assert sliced(kept)["1x1"] == [True, True, False]
    assert "layers.2.mlp: not sliced: gate stays resident (excluded by gate)" in kept.block_reasons


def test_a_block_whose_sums_are_no_numbers_to_add_is_gathered() -> None:
    model = replace(MODEL, blocks=(replace(MODEL.blocks[0], dtype="float8_e4m3fn"), *MODEL.blocks[1:]))
    plan = plan_of(model, dual="tensor_parallel")
    assert sliced(plan)["1x1"] == [False, True, True]
    assert mode_rows(plan)[0]["why"] == "its partial sums are float8_e4m3fn, which cannot be added up"


def test_a_model_without_blocks_is_refused() -> None:
    plain = ModelSpec("plain", MODEL.weights, MODEL.segments)
    with pytest.raises(SpecError, match="dual is auto, and plain declares no blocks"):
        plan_of(plain, dual="auto")
    with pytest.raises(SpecError, match="unknown dual 'on'; known are off, gather, tensor_parallel, auto"):
        plan_of(dual="on")
    with pytest.raises(SpecError, match="a replicated plan keeps every weight resident, and dual"):
        plan_of(dual="auto", replicated=True)


@pytest.mark.parametrize("units", ["layer", "weight", "bytes:8KiB"])
@pytest.mark.parametrize("head", ["inside", "tail", "outside"])
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_decode_in_slices_and_prefill_gathered_are_verified_in_any_order(units: str, head: str, transport: str) -> None:
    plan = plan_of(dual="auto", units=units, head=head, transport=transport, prefetch_depth=1)
    programs = emit_all(MODEL, plan)
    assert programs[SHAPES[0]] is programs[SHAPES[1]] and programs[SHAPES[2]] != programs[SHAPES[0]]
    report = verify(programs, build_layout(MODEL, plan), model=MODEL, num_copies=plan.num_copies)
    assert report.is_good and report.num_programs == 2, report.text()


def test_a_block_that_reads_a_slot_is_refused_by_name() -> None:
    """Whatever else the compute on slices reads has to be resident: it would lie in a slot."""
    model = blocks_model()
    block = model.blocks[0]
    reads = (*block.compute.reads, "layers.0.mixer")
    changed = replace(block, compute=replace(block.compute, reads=reads))
    model = replace(model, blocks=(changed, *model.blocks[1:]))
    plan = plan_of(model, dual="tensor_parallel")
    with pytest.raises(SpecError, match=r"layers\.0\.mlp_compute is on slices and reads unit 0"):
        emit_all(model, plan)


def test_modes_written_by_hand_name_each_step_shape_and_known_modes() -> None:
    plan = plan_of(dual="tensor_parallel")
    with pytest.raises(SpecError, match="no modes for step shape 512x1"):
        emit_all(MODEL, replace(plan, modes=plan.modes[:-1]))
    wrong = ((SHAPES[0], ("tensor_paralel",) * 3), *plan.modes[1:])
    with pytest.raises(SpecError, match="unknown mode 'tensor_paralel'; known are gather, tensor_parallel"):
        emit_all(MODEL, replace(plan, modes=wrong))  # type: ignore[arg-type]
