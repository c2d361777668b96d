"""From what ranks measured to a hardware file, and from the file to a step; segments split out of an op list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graphshard.bench.calibrated import host_hardware
from graphshard.bench.pieces import split_segments
from graphshard.core.layout import build_layout
from graphshard.core.lowering import Compute, lower
from graphshard.core.ops import Gemm
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.hardware_file import load_hardware, save_hardware
from graphshard.cost.host_step import THREADED_PULL, predict_step
from graphshard.cost.plain import plain_facts
from graphshard.cost.segments import step_times
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.synthetic import synthetic_model
from graphshard.verify import verify

MODEL = synthetic_model(3, (("up", (1024, 512)), ("down", (512, 1024))))
HOST = DeviceSpec("host", "host", memory_bytes=2**40)
SHAPE = StepShape(1)
UNIT = MODEL.weights[0].num_bytes
SEGMENT_US, CACHED_US, GATHER_US, HANDOFF_US = 100.0, 60.0, 30.0, 5.0


def told(slower: float) -> dict[str, Any]:
    """A rank's measurements, `slower` times as long as they might be."""
    names = [segment.name for segment in MODEL.segments[:2]]

    def run(name: str, us: float, gathers: dict[int, float]) -> dict[str, Any]:
        segments = dict.fromkeys(names, us * slower)
        return {"run": name, "batch_size": 1, "segments": segments, "gathers": gathers, "step_us": 0.0}

    return {
        "model": MODEL.digest,
        "pieces": [run("replicated", SEGMENT_US, {}), run("gathered", CACHED_US, {UNIT: GATHER_US * slower})],
        "copy_us": {2**16: 10.0, 2**20: 100.0, 2**22: 390.0},
        "fan_out_us": {1: 1000.0, 2: 700.0},
        "launch": {
            "one_us": {"eager": 9.0, "cooperative": 8.0, "threaded": 20.0},
            "per_unit_us": {"eager": 4.0, "cooperative": 1.0, "threaded": 1.0 + HANDOFF_US},
            "num_ops": 10,
        },
        "gemm": [[1, 1024, 512, "float32", 200.0], [1024, 1024, 1024, "float32", 20_000.0]],
        "gemm_cached": [[1, 1024, 512, "float32", 50.0]],
        "contention": {"compute": 2.0, "copy": 2.0},
    }


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    facts = {"cores": 2, "cpu": "test", "l3_bytes": 4 * 4 * UNIT}
    return host_hardware([told(0.9), told(1.1)], facts, 2**34)


def step_us(machine: HardwareSpec, **options: Any) -> float:
    plan = make_plan(MODEL, 2, HOST, step_shapes=[SHAPE], **options)
    return predict_step(MODEL, plain_facts(MODEL, 2), plan, SHAPE, machine).duration_us


def test_figures_are_means_over_ranks_and_a_round_trip(machine: HardwareSpec, tmp_path: Path) -> None:
    assert machine.look_up("segment", MODEL.digest, MODEL.segments[0].name, 1, 1) == pytest.approx(SEGMENT_US)
    assert machine.look_up("gather", "pull", UNIT, 2) == pytest.approx(GATHER_US)
    assert machine.look_up("gather", THREADED_PULL, UNIT, 2) == pytest.approx(GATHER_US + HANDOFF_US)
    assert machine.derate[-1] == (2**21, 1.0) and machine.derate[0][1] < 1.0
    save_hardware(machine, tmp_path / "host.json")
    assert load_hardware(tmp_path / "host.json") == machine


def test_steps_are_sums_of_what_was_measured(machine: HardwareSpec) -> None:
    count = len(MODEL.segments)
    assert step_us(machine, replicated=True) == pytest.approx(count * SEGMENT_US)
    in_turn = step_us(machine, units="weight", prefetch_depth=0, executor="cooperative", min_shard_bytes=0)
    assert in_turn == pytest.approx(count * (GATHER_US + CACHED_US))


def test_a_copy_thread_on_the_same_core_hides_nothing(machine: HardwareSpec) -> None:
    """Each takes twice as long beside the other, so work is conserved; each gather costs a wake-up more."""
    count = len(MODEL.segments)
    beside = step_us(machine, units="weight", prefetch_depth=1, executor="threaded", min_shard_bytes=0)
    assert beside == pytest.approx(count * (GATHER_US + HANDOFF_US + CACHED_US))


def test_every_segment_is_a_gemm_of_its_own_and_the_list_is_still_sound() -> None:
    plan = make_plan(MODEL, 2, HOST, units="layer", prefetch_depth=1, step_shapes=[SHAPE], min_shard_bytes=0)
    whole = emit(MODEL, plan)
    split = split_segments(MODEL, whole)
    gemms = [op for op in split.ops if isinstance(op, Gemm)]
    assert [(op.begin, op.end) for op in gemms] == [(i, i + 1) for i in range(len(MODEL.segments))]
    assert sum(isinstance(op, Gemm) for op in whole.ops) < len(gemms)
    assert sum(isinstance(op, Compute) for op in lower(split, 2).ops) == len(gemms)
    verify({SHAPE: split}, build_layout(MODEL, plan), model=MODEL).raise_if_bad()


def test_measured_segments_are_those_of_the_model_that_was_measured(machine: HardwareSpec) -> None:
    """Models of one name and other shapes have segments of the same names."""
    name = MODEL.segments[0].name
    other = synthetic_model(3, (("up", (2048, 512)), ("down", (512, 2048))))
    assert other.name == MODEL.name and other.segments[0].name == name
    mine, theirs = (step_times(model, plain_facts(model, 2), SHAPE, machine).segments[0] for model in (MODEL, other))
    assert mine.alone_us == pytest.approx(SEGMENT_US) and theirs.alone_us != mine.alone_us
