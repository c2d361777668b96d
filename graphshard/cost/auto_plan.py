"""`plan="auto"`: by the residency solver where the machine's figures are known, by `make_plan`'s rules elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphshard.core.plan import Plan
from graphshard.core.sizes import parse_bytes
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.cost.choose import ChooseRequest, choose
from graphshard.cost.dual_choice import CostChooser
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.hardware_file import named_hardware
from graphshard.cost.plain import plain_facts
from graphshard.cost.published import PUBLISHED, hardware
from graphshard.schedule.auto import make_plan
from graphshard.schedule.options import AUTO

_DUAL_DECIDES = (
    "what is sharded follows from rules: dual was asked for, and blocks in slices need no gather that hides, which is "
    "what the residency solver looks for"
)
DECIDED = frozenset({"units", "prefetch_depth", "num_slots", "include", "exclude", "executor", "placed", "replicated"})
"""What `choose` decides. Whoever asks for one of these has decided, and the rules fill in the rest."""


def auto_plan(
    model: ModelSpec,
    world_size: int,
    device: DeviceSpec,
    figures: HardwareSpec | None,
    step_shapes: Sequence[StepShape],
    choices: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Plan:
    """The plan that is made when nobody says which.

    Args:
        model: what exists.
        world_size: ranks that share one copy.
        device: what the ranks agreed on about their devices.
        figures: of the machine, equal on all ranks; None: looked up by the device's name (`figures_of`).
        step_shapes: what will be captured.
        choices: options of `make_plan` that were asked for.
        defaults: options that hold wherever they were not asked for, whoever decides; one rank has no use for them.

    Raises:
        SpecError: as `make_plan` and `choose`.
    """
    defaults = (defaults or {}) if world_size > 1 else {}
    figures = figures or figures_of(device)
    is_dual = choices.get("dual", "off") != "off"
    if figures is None or DECIDED & set(choices) or world_size == 1 or is_dual:
        options = {**defaults, **choices, **_chooser(figures, world_size, device, choices)}
        plan = make_plan(model, world_size, device, step_shapes=step_shapes, **options)
        is_told = is_dual and figures is not None and not DECIDED & set(choices) and bool(plan.units)
        return replace(plan, reasons=(_DUAL_DECIDES, *plan.reasons)) if is_told else plan
    limit = choices.get("memory_limit_bytes")
    chosen = choose(
        ChooseRequest(
            model=model,
            facts=plain_facts(model, world_size),
            hardware=figures,
            device=device,
            world_size=world_size,
            step_shapes=tuple(step_shapes),
            memory_limit_bytes=parse_bytes(limit) if isinstance(limit, str) else limit,
            transport=choices.get("transport", "pull"),
        )
    )
    options = {**chosen.options, **choices, "step_shapes": step_shapes}
    if not chosen.options.get("replicated"):
        options |= defaults
    plan = make_plan(model, world_size, device, **options)
    return replace(plan, reasons=(*chosen.reasons, *plan.reasons))


def _chooser(
    figures: HardwareSpec | None, world_size: int, device: DeviceSpec, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Who chooses modes of blocks, if that is left to us and the machine is known: an option for `make_plan`."""
    is_left = options.get("dual") == "auto" and options.get("tune") is None and "chooser" not in options
    if not is_left or figures is None or world_size == 1:
        return {}
    depth = options.get("prefetch_depth", AUTO)
    is_ahead = depth > 0 if isinstance(depth, int) else device.kind == "cuda" or device.spare_cores > 0
    return {"chooser": CostChooser(figures, world_size, options.get("transport", "pull"), is_ahead)}


def figures_of(device: DeviceSpec) -> HardwareSpec | None:
    """The published figures of a GPU by its name (`NVIDIA H100 80GB HBM3`); None for others, and for a host."""
    if device.kind != "cuda":
        return None
    words = device.name.lower().replace("-", " ").split()
    name = next((name for name in sorted(PUBLISHED, key=len, reverse=True) if name in words), None)
    return None if name is None else hardware(name)


def read_figures(source: HardwareSpec | str | Path | None) -> HardwareSpec | None:
    """A machine's figures: as they are, by a published name, or from a file of `graphshard calibrate`.

    Raises:
        SpecError: neither a known name nor a readable file.
    """
    if source is None or isinstance(source, HardwareSpec):
        return source
    return named_hardware(source)
