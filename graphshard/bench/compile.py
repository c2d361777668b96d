"""How long it takes to decide and to prove: plan, layout, programs and verification, with no device."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from graphshard.core.layout import build_layout
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit_all
from graphshard.schedule.synthetic import LLAMA_WEIGHTS, synthetic_model
from graphshard.verify import verify


@dataclass(frozen=True)
class CompileRequest:
    """What to compile."""

    num_layers: int = 93
    num_shapes: int = 16
    world_size: int = 8
    units: str = "layer"
    prefetch_depth: int = 1
    head: str = "inside"


def measure_compile(request: CompileRequest) -> dict[str, object]:
    """One row `{total_s, plan_s, layout_s, programs_s, verify_s, ...}`; the model itself is made before.

    Raises:
        ProgramError: the programs are not free of races.
    """
    model = synthetic_model(request.num_layers, LLAMA_WEIGHTS)
    device = DeviceSpec(kind="cuda", name="bench", memory_bytes=2**62)
    shapes = [StepShape(batch_size) for batch_size in range(1, request.num_shapes + 1)]
    times = [time.perf_counter()]
    plan = make_plan(
        model,
        request.world_size,
        device,
        units=request.units,
        prefetch_depth=request.prefetch_depth,
        head=request.head,
        step_shapes=shapes,
    )
    times.append(time.perf_counter())
    layout = build_layout(model, plan)
    times.append(time.perf_counter())
    programs = emit_all(model, plan)
    times.append(time.perf_counter())
    verify(programs, layout).raise_if_bad()
    times.append(time.perf_counter())
    parts = [end - begin for begin, end in pairwise(times)]
    return {
        "total_s": times[-1] - times[0],
        **dict(zip(("plan_s", "layout_s", "programs_s", "verify_s"), parts, strict=True)),
        "num_units": len(plan.units),
        "num_programs": len(programs),
        "num_ops": len(next(iter(programs.values())).ops),
        "units": request.units,
        "prefetch_depth": request.prefetch_depth,
        "head": request.head,
    }
