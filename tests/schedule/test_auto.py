"""`make_plan`: its rules, its refusals, its memory, and its independence of everything but its arguments."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from replays import HOST, check_replays, layered

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.plan import Plan
from graphshard.core.sizes import DTYPE_BITS
from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit, emit_all
from graphshard.schedule.synthetic import LLAMA_WEIGHTS, synthetic_model

LLAMA = synthetic_model(4, LLAMA_WEIGHTS, vocab_size=128)
SPARE = replace(HOST, spare_cores=2)
CUDA = DeviceSpec("cuda", "H200", 141 * 2**30, 2**21)


def choices(plan: Plan) -> tuple[str, int, str]:
    return plan.unit_policy, plan.prefetch_depth, plan.executor


def test_the_rules_by_device() -> None:
    assert choices(make_plan(LLAMA, 2, HOST)) == ("weight", 0, "cooperative")
    assert choices(make_plan(LLAMA, 2, SPARE)) == ("weight", 1, "threaded")
    assert choices(make_plan(LLAMA, 2, CUDA))[:2] == ("layer", 1)


def test_a_choice_of_the_user_is_kept_and_needs_no_reason() -> None:
    plan = make_plan(LLAMA, 2, HOST, units="layer", prefetch_depth=2, executor="threaded")
    assert choices(plan) == ("layer", 2, "threaded") and plan.reasons == ()
    assert choices(make_plan(LLAMA, 2, HOST, prefetch_depth=1)) == ("weight", 1, "cooperative")


def test_every_automatic_choice_has_its_reason() -> None:
    reasons = make_plan(LLAMA, 2, HOST).reasons
    assert [reason.split(":")[0] for reason in reasons] == ["units weight", "prefetch_depth 0", "executor cooperative"]
    assert "no spare core" in reasons[1]
    assert "2 spare cores" in " ".join(make_plan(LLAMA, 2, SPARE).reasons)


def test_replicated_keeps_all() -> None:
    for plan in (make_plan(LLAMA, 2, HOST, replicated=True), make_plan(LLAMA, 1, HOST)):
        assert all(decision.unit is None and "resident" in decision.reason for decision in plan.decisions)
        assert plan.units == () and plan.num_slots == 0 and plan.unit_policy == "replicated"
        assert build_layout(LLAMA, plan).shard_bytes == 0
        check_replays(LLAMA, plan)
    assert make_plan(LLAMA, 1, HOST, units="layer").units != ()  # asked for, so done


def test_a_model_with_nothing_to_shard_is_a_plan() -> None:
    for model in (ModelSpec("empty", (), ()), ModelSpec("compute", (), (SegmentSpec("s", 0, ()),))):
        for head in ("inside", "outside", "tail"):
            plan = make_plan(model, 2, HOST, prefetch_depth=1, head=head)
            assert plan.units == () and check_replays(model, plan).num_slots == 0
            assert build_layout(model, plan).slot_bytes == 0


def test_a_layer_with_no_bytes_issues_no_gather() -> None:
    model = layered([64, 0, 64])
    plan = make_plan(model, 3, HOST, units="layer", min_shard_bytes=0)
    assert plan.decisions[1].reason == "has no bytes" and len(plan.units) == 2
    check_replays(model, plan)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size is 0: a plan needs at least one rank"),
        ({"world_size": 1.5}, "world_size is 1.5"),
        ({"unit": "layer"}, "unknown plan options unit; known are units, prefetch_depth, num_slots"),
        ({"units": "rows"}, "known are layer, weight, bytes:CAP"),
        ({"head": "outer"}, "unknown head policy 'outer'; known are inside, outside, tail"),
        ({"transport": "gloo"}, "unknown transport 'gloo'; known are pull, nccl"),
        ({"executor": "pool"}, "unknown executor 'pool'; known are auto, cooperative, threaded"),
        ({"prefetch_depth": -1}, "prefetch_depth is -1; it is a whole number that starts at 0"),
        ({"prefetch_depth": "deep"}, "prefetch_depth is 'deep'"),
        ({"num_slots": 0}, "num_slots is 0; it is a whole number that starts at 1"),
        ({"num_copy_streams": 0}, "num_copy_streams is 0"),
        ({"num_copy_streams": 65}, "num_copy_streams is 65; at most 64"),
        ({"num_slots": True}, "num_slots is True; it is a whole number"),
        ({"prefetch_depth": 1.0}, "prefetch_depth is 1.0; it is a whole number"),
        ({"units": 4}, "units is 4, not a text: write layer"),
        ({"alignment_bytes": 100}, "alignment_bytes is 100; it is a power of two from 16 on"),
        ({"alignment_bytes": 8}, "alignment_bytes is 8; it is a power of two from 16 on"),
        ({"alignment_bytes": "256"}, "alignment_bytes is '256'"),
        ({"memory_limit_bytes": "lots"}, "'lots' is not a number of bytes"),
        ({"memory_limit_bytes": 1.5}, "memory_limit_bytes is 1.5; it is a whole number"),
        ({"memory_limit_bytes": -1}, "memory_limit_bytes is -1; it is a whole number that starts at 0"),
        ({"include": 3}, "include is 3; it is a sequence of patterns"),
        ({"exclude": [None]}, r"exclude is \[None\]; it is a sequence of patterns"),
        ({"outside_layers": "no"}, "outside_layers is 'no'; it is True or False"),
        ({"step_shapes": 4}, r"step shapes are 4, not a sequence: write \[1, 2, 4\]"),
        ({"step_shapes": ("4",)}, "whole numbers that start at 1, not '4'"),
        (
            {"replicated": True, "units": "layer"},
            r"a replicated plan keeps every weight resident, and units \('layer'\)",
        ),
        ({"replicated": True, "prefetch_depth": 1, "include": "*"}, "and prefetch_depth, include "),
        ({"step_shapes": ()}, r"no step shape to capture: name at least one batch size, as in capture_sizes=\[1\]"),
        ({"step_shapes": (0,)}, "whole numbers that start at 1, not 0"),
        ({"exclude": ["x.*"]}, r"pattern 'x\.\*' matches no weight"),
        ({"prefetch_depth": 1, "num_slots": 1}, "num_slots 1 is too few .* the smallest that works is 2"),
    ],
)
def test_requests_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    world_size = options.pop("world_size", 2)
    with pytest.raises(SpecError, match=message):
        make_plan(LLAMA, world_size, HOST, **options)


def test_one_pattern_and_a_size_may_be_texts() -> None:
    assert make_plan(LLAMA, 2, HOST, exclude="*q_proj*") == make_plan(LLAMA, 2, HOST, exclude=["*q_proj*"])
    assert make_plan(LLAMA, 2, HOST, memory_limit_bytes="8 GiB") == make_plan(LLAMA, 2, HOST, memory_limit_bytes=2**33)
    with pytest.raises(SpecError, match=r"no plan fits 1\.0 KiB"):
        make_plan(LLAMA, 2, HOST, memory_limit_bytes="1KiB")


def test_slots_that_would_never_be_filled_are_not_reserved() -> None:
    plan = make_plan(layered([64] * 2), 2, HOST, units="layer", prefetch_depth=1, num_slots=5, min_shard_bytes=0)
    assert plan.num_slots == 2
    assert plan.reasons[-1] == "num_slots 2 of the 5 asked for: more would never be filled"


def test_memory_is_kept_within_a_chunk_and_two_units() -> None:
    for model, units, depth, head in itertools.product(
        (LLAMA, synthetic_model(5, LLAMA_WEIGHTS)), ("layer", "weight", "bytes:64MiB"), (0, 1), ("inside", "outside")
    ):
        for world_size in (2, 3, 8):
            layout = build_layout(
                model, make_plan(model, world_size, HOST, units=units, prefetch_depth=depth, head=head)
            )
            limit = layout.shardable_bytes / world_size + 2 * layout.largest_unit_bytes
            assert layout.shard_bytes + layout.slot_bytes <= 1.01 * limit


def test_a_memory_limit_makes_units_smaller_then_refuses() -> None:
    fits = build_layout(LLAMA, make_plan(LLAMA, 2, CUDA)).reserved_bytes(CUDA.granularity_bytes)
    assert choices(make_plan(LLAMA, 2, CUDA, memory_limit_bytes=fits))[:2] == ("layer", 1)
    smaller = make_plan(LLAMA, 2, CUDA, memory_limit_bytes=fits - 1)
    assert choices(smaller)[:2] == ("weight", 1)
    assert smaller.reasons == ("units weight, prefetch_depth 1: the faster choice does not fit memory_limit_bytes",)
    with pytest.raises(SpecError) as caught:
        make_plan(LLAMA, 2, CUDA, memory_limit_bytes=2**29)
    assert str(caught.value) == (
        "no plan fits 512.0 MiB: the smallest needs 948.0 MiB = 832.0 chunks + 112.0 slots (1 x 112.0) + 4.0 resident; "
        "the slot size is set by layers.0.gate_proj"
    )
    with pytest.raises(SpecError, match=r"no plan fits 0 B: the smallest needs .* slots \(2 x 0\.4\)"):
        make_plan(LLAMA, 2, CUDA, units="layer", prefetch_depth=1, memory_limit_bytes=0)
    with pytest.raises(SpecError, match=r"= 0\.0 chunks \+ 0\.0 slots \+ 1\.6 resident$"):
        make_plan(LLAMA, 2, CUDA, replicated=True, memory_limit_bytes=2**30)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_any_dtype_is_bytes(dtype: str) -> None:
    model = ModelSpec("m", (WeightSpec("layers.0.w", (33, 5), dtype),), (SegmentSpec("w", 0, ("layers.0.w",)),))
    layout = build_layout(model, make_plan(model, 2, HOST, units="layer", min_shard_bytes=0))
    assert layout.units[0].views[0].dtype == dtype
    assert layout.shardable_bytes == 33 * 5 * DTYPE_BITS[dtype] // 8


DIGESTS = """
from replays import HOST, random_model
from graphshard.core.layout import build_layout
from graphshard.core.lowering import lower
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
for seed in range(20):
    model = random_model(seed)
    for head in ("inside", "tail"):
        plan = make_plan(model, 3, HOST, units="bytes:2000", prefetch_depth=1, head=head, min_shard_bytes=0)
        program = emit(model, plan)
        print(model.digest, plan.digest, build_layout(model, plan).digest, program.digest, lower(program, 3, 2).digest)
"""


def test_digests_are_equal_in_every_process() -> None:
    found = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", DIGESTS], env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        assert len(done.stdout.splitlines()) == 40
        found.add(done.stdout)
    assert len(found) == 1


def test_the_order_of_arguments_does_not_matter() -> None:
    options = {
        "units": "weight",
        "prefetch_depth": 1,
        "min_shard_bytes": 0,
        "step_shapes": (4, 1, 2),
        "exclude": ("layers.0.*", "*q_proj"),
    }
    first = make_plan(LLAMA, 2, HOST, **options)
    backwards = dict(reversed(options.items()))
    backwards["step_shapes"] = (2, 4, 1, 4)
    assert make_plan(LLAMA, 2, HOST, **backwards).digest == first.digest
    assert first.step_shapes == (StepShape(1), StepShape(2), StepShape(4))


def test_no_number_of_one_rank_chooses_an_op() -> None:
    small, large = replace(HOST, memory_bytes=1), replace(HOST, memory_bytes=2**50, name="other")
    assert make_plan(LLAMA, 2, small) == make_plan(LLAMA, 2, large)


def bytecodes(num_layers: int, units: str) -> int:
    """What compiling a model of `num_layers` costs, in instructions of the interpreter: the same on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        model = synthetic_model(num_layers, LLAMA_WEIGHTS)
        plan = make_plan(model, 8, HOST, units=units, prefetch_depth=1, head="tail", step_shapes=range(1, 17))
        build_layout(model, plan)
        emit_all(model, plan)[StepShape(1)].text()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("units", ["layer", "weight"])
def test_work_grows_with_the_model_not_with_its_square(units: str) -> None:
    short, long = bytecodes(5, units), bytecodes(40, units)
    assert 5 < long / short < 9, f"8 x the layers cost {long / short:.1f} x the work"


def test_emit_needs_no_model_memory() -> None:
    model = synthetic_model(93, (("experts", (896, 3072, 7168)),))  # 3.4 TiB
    plan = make_plan(model, 8, CUDA)
    layout = build_layout(model, plan)
    assert layout.shard_bytes == 93 * 896 * 3072 * 7168 * 2 // 8
    assert emit(model, plan).num_slots == 2
