"""`plan="auto"`: by the solver where figures are known, by the rules elsewhere or where somebody has decided."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.cost.auto_plan import auto_plan, figures_of, read_figures
from graphshard.cost.hardware_file import save_hardware
from graphshard.cost.published import hardware
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import LLAMA_WEIGHTS, synthetic_model

MODEL = synthetic_model(8, LLAMA_WEIGHTS)
GPU = DeviceSpec("cuda", "NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30, granularity_bytes=2**21)
HOST = DeviceSpec("host", "host", memory_bytes=2**40)
MANY = (StepShape(1, 4096),)


@pytest.mark.parametrize(
    "name, known",
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA GB200", "gb200"), ("NVIDIA B200", "b200")],
)
def test_a_gpu_is_known_by_its_name(name: str, known: str) -> None:
    figures = figures_of(DeviceSpec("cuda", name, memory_bytes=1))
    assert figures is not None and figures.name == known


def test_other_devices_have_no_published_figures() -> None:
    assert figures_of(DeviceSpec("cuda", "NVIDIA GeForce RTX 5070 Ti", memory_bytes=1)) is None
    assert figures_of(HOST) is None


def test_a_gpu_goes_by_the_solver_and_says_so() -> None:
    plan = auto_plan(MODEL, 8, GPU, None, MANY, {})
    assert plan.units and any("full gather" in reason for reason in plan.reasons)
    few = auto_plan(MODEL, 8, GPU, None, (StepShape(1),), {})
    assert sum(len(unit.weights) for unit in few.units) < sum(len(unit.weights) for unit in plan.units)


def test_whoever_decides_gets_the_rules() -> None:
    asked = {"units": "weight", "prefetch_depth": 2}
    assert auto_plan(MODEL, 8, GPU, None, MANY, asked) == make_plan(MODEL, 8, GPU, step_shapes=MANY, **asked)


def test_a_host_keeps_its_rules_without_a_file() -> None:
    assert auto_plan(MODEL, 2, HOST, None, MANY, {}) == make_plan(MODEL, 2, HOST, step_shapes=MANY)


def test_defaults_hold_whoever_decides() -> None:
    for device in (GPU, HOST):
        plan = auto_plan(MODEL, 8, device, None, MANY, {}, {"units": "layer"})
        assert plan.unit_policy == "layer"


def test_a_memory_limit_is_met() -> None:
    whole = make_plan(MODEL, 8, GPU, replicated=True, step_shapes=MANY)
    assert not whole.units
    limit = sum(weight.num_bytes for weight in MODEL.weights) * 3 // 4
    plan = auto_plan(MODEL, 8, GPU, None, MANY, {"memory_limit_bytes": limit})
    assert plan.units


def test_figures_come_by_name_or_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_hardware(hardware("h200"), path)
    assert read_figures("B200") == hardware("b200") and read_figures(path) == read_figures(hardware("h200"))
    assert read_figures(None) is None
    with pytest.raises(SpecError, match="cannot read the hardware file"):
        read_figures(tmp_path / "none.json")
    with pytest.raises(SpecError, match="unknown hardware 'h101': did you mean h100"):
        read_figures("h101")
