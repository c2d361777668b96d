"""What a caller asks for becomes a compiled plan: a choice by name or a finished plan, limits, figures of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from graphshard.comm.group import LONGEST_TIMEOUT_S, Group
from graphshard.core.errors import LoadError, SpecError
from graphshard.core.layout import build_layout
from graphshard.core.plan import Plan
from graphshard.core.slices import why_not_sliced
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.cost.auto_plan import auto_plan, read_figures
from graphshard.cost.hardware import HardwareSpec
from graphshard.load.shard_manifest import ShardManifest
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import Agreed
from graphshard.runtime.compiled import Compiled, compile_plan
from graphshard.schedule.auto import make_plan

_PLACING = frozenset(
    {"units", "include", "exclude", "min_shard_bytes", "outside_layers", "placed", "alignment_bytes", "replicated"}
)
"""Choices that say where bytes lie: who makes one does not want that of shard files."""

PlanChoice = Plan | Literal["auto", "replicated"]
Hardware = HardwareSpec | str | Path | None


@dataclass(frozen=True)
class PlanRequest:
    """How a plan is made: see `graphshard.compile`."""

    plan: PlanChoice = "auto"
    choices: Mapping[str, Any] | None = None
    """Options of `make_plan` that were asked for."""
    hardware: Hardware = None
    shapes: Sequence[StepShape] = ()
    defaults: Mapping[str, Any] | None = None
    """Options that hold wherever they were not asked for."""
    saved: ShardManifest | None = None
    """Of the shard files that will be loaded: where bytes lie, unless a choice says otherwise."""


def compile_request(model: ModelSpec, group: Group, agreed: Agreed, request: PlanRequest) -> Compiled:
    """The plan that `request` comes to, compiled. Local.

    Raises:
        SpecError: an unknown plan or option, or choices beside a finished plan.
        ProgramError: the verifier found a race.
        LoadError: shard files have what stays whole in chunks, or no slices where some were asked for.
    """
    plan, choices = request.plan, dict(request.choices or {})
    if isinstance(plan, Plan):
        if choices:
            raise SpecError(f"{', '.join(choices)} cannot be chosen beside a finished plan: make_plan takes them")
        return compile_plan(model, plan)
    if plan not in ("auto", "replicated"):
        raise SpecError(f"unknown plan {plan!r}; known: auto, replicated, or a graphshard.Plan")
    shapes, device = list(request.shapes) or [StepShape(1)], agreed.spec
    if plan == "replicated":
        made = make_plan(model, group.world_size, device, replicated=True, step_shapes=shapes, **choices)
    else:
        figures = read_figures(request.hardware)
        made = auto_plan(model, group.world_size, device, figures, shapes, choices, request.defaults)
        saved = request.saved
        if saved is not None and not _PLACING & set(choices) and not saved.has_layout(build_layout(model, made)):
            _refuse_saved(model, saved, made)
            as_saved = {"placed": saved.units, "alignment_bytes": saved.alignment_bytes}
            made = auto_plan(model, group.world_size, device, figures, shapes, choices | as_saved)
            made = replace(made, reasons=("units placed: as the shard files have them", *made.reasons))
    return compile_plan(model, made)


def _refuse_saved(model: ModelSpec, saved: ShardManifest, made: Plan) -> None:
    """LoadError if shard files have a weight in chunks that no plan may shard, or lack slices that were asked for."""
    in_slices = {unit.weights for unit in saved.units if unit.is_sliced}
    sharded = {name for unit in saved.units for name in unit.weights}
    for block in model.blocks if made.modes else ():
        could_be = sharded.intersection(block.weights) and not why_not_sliced(
            [model.weight(name) for name in block.weights], saved.world_size
        )
        if could_be and block.weights not in in_slices:
            raise LoadError(
                f"the shard files of {saved.model} do not have the weights of {block.name} in slices, and dual asks "
                "for them: load the checkpoint with dual and save the shards again, or leave dual off"
            )
    name = next((name for unit in saved.units for name in unit.weights if name in model.why_whole), None)
    if name is not None:
        raise LoadError(
            f"the shard files of {saved.model} have the weight {name} in chunks, and it stays whole here: it is "
            f"{model.why_whole[name]}; load the checkpoint and save the shards again"
        )


def limits_of(timeout_s: float, hooks: Hooks | None, progress: bool) -> dict[str, Any]:
    """What `build_runtime` takes beside the plan. SpecError for a timeout that is none."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        longest = f"{LONGEST_TIMEOUT_S:.0f} (a day)"
        raise SpecError(f"timeout_s={timeout_s!r} is not a time to wait: give seconds above 0, at most {longest}")
    return {"timeout_s": timeout_s, "hooks": hooks or Hooks(), "progress": progress}
