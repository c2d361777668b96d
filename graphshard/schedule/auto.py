"""`make_plan`: the choices that a user did not make, each with its reason, before anything is reserved or measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.plan import Executor, Plan, Residency, Unit
from graphshard.core.sizes import align_up, bytes_unit, format_bytes, in_unit
from graphshard.core.specs import DeviceSpec, ModelSpec
from graphshard.schedule.dual import MODES_BY, DualRequest, ModeChooser, choose_modes
from graphshard.schedule.options import AUTO, PlanOptions, capture_shapes
from graphshard.schedule.slots import assign_slots, issue_order
from graphshard.schedule.tune_file import as_tuned
from graphshard.schedule.tuned import Tuned
from graphshard.schedule.units import (
    DEFAULT_MIN_SHARD_BYTES,
    UnitRules,
    choose_units,
    keep_all,
    place_units,
    unit_stays,
)

REPLICATED = "replicated"
"""The unit policy that a plan with no units prints."""
PLACED = "placed"
"""The unit policy that a plan prints whose units were given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to fill in what was left to us; `reasons` are printed with the plan."""

    units: str
    prefetch_depth: int
    executor: Executor
    reasons: tuple[str, ...] = ()


def make_plan(model: ModelSpec, world_size: int, device: DeviceSpec, **options: Any) -> Plan:
    """Decide what is sharded over `world_size` ranks, into which units and slots, and how far ahead it is gathered.

    Args:
        model: what exists.
        world_size: ranks over which each unit is cut.
        device: what the ranks agreed on about their devices.
        options: the fields of `PlanOptions`.

    Raises:
        SpecError: an unknown option, a request that contradicts itself, or no plan fits the memory.
    """
    known = [field.name for field in fields(PlanOptions)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise SpecError(f"unknown plan options {', '.join(unknown)}; known are {', '.join(known)}")
    if not isinstance(world_size, int) or world_size < 1:
        raise SpecError(f"world_size is {world_size!r}: a plan needs at least one rank")
    asked = PlanOptions(**options)
    asked = replace(asked, chooser=_chooser(model, world_size, device, asked))
    plans = (_plan(model, world_size, asked, choice) for choice in _choices(asked, world_size, device))
    limit = asked.memory_limit
    plan = next(plans) if limit is None else _first_that_fits(model, plans, limit, device.granularity_bytes)
    return _compared(plan, asked, device)


def _chooser(model: ModelSpec, world_size: int, device: DeviceSpec, asked: PlanOptions) -> ModeChooser | None:
    """Who chooses modes where that is left to us; measurements must be of this model, group and device."""
    if asked.tune is None or world_size == 1:
        return asked.chooser
    tuned = as_tuned(asked.tune)
    tuned.check(model, world_size, asked.transport, device)
    return tuned


def _compared(plan: Plan, asked: PlanOptions, device: DeviceSpec) -> Plan:
    """`plan`; it says, and a warning does, if its modes were chosen by times of steps that are not like its own."""
    tuned, is_chosen = asked.chooser, any(reason.startswith(MODES_BY) for reason in plan.block_reasons)
    if not isinstance(tuned, Tuned) or asked.dual != "auto" or not is_chosen:
        return plan
    again = "or measure with `graphshard tune`"
    if device.kind == "cuda" and device.name != tuned.device:  # told by a warning alone: each rank has its own device
        warnings.warn(
            f"the tune file is of {tuned.device}, this is {device.name}: take one of it, {again}", stacklevel=3
        )
    unlike = tuned.unlike(device, plan.prefetch_depth, plan.executor)
    if not unlike:
        return plan
    text = f"the tune file is of other steps: measured with {unlike}; choose alike, {again}"
    warnings.warn(text, stacklevel=3)
    return replace(plan, block_reasons=(*plan.block_reasons, text))


def _choices(asked: PlanOptions, world_size: int, device: DeviceSpec) -> list[Choice]:
    """The ways to fill in `auto`, best first; later ones need less memory."""
    if asked.replicated:
        return [_kept(asked, "asked for")]
    if asked.placed is not None and not asked.placed:
        return [_kept(asked, "the units that were given are none")]
    if world_size == 1 and asked.units == AUTO and asked.placed is None:
        return [_kept(asked, "one rank: a gather would only copy the rank's own bytes")]
    best = _best(asked, device)
    if asked.memory_limit is None:
        return [best]
    units = "weight" if asked.units == AUTO and asked.placed is None else best.units
    depths = [best.prefetch_depth, 0] if asked.prefetch_depth == AUTO else [best.prefetch_depth]
    reason = "the faster choice does not fit memory_limit_bytes"
    smaller = [
        Choice(units, depth, best.executor, (f"units {units}, prefetch_depth {depth}: {reason}",)) for depth in depths
    ]
    return [best, *smaller]


def _kept(asked: PlanOptions, reason: str) -> Choice:
    executor = "cooperative" if asked.executor == AUTO else asked.executor
    return Choice(REPLICATED, 0, executor, (f"every weight is resident: {reason}",))


def _best(asked: PlanOptions, device: DeviceSpec) -> Choice:
    """What runs fastest on `device` as far as its kind and spare cores tell."""
    reasons = []
    units, executor = asked.units, asked.executor
    spare = device.kind == "cuda" or device.spare_cores > 0
    if asked.placed is not None:
        units = PLACED
    elif units == AUTO and device.kind == "cuda":
        units = "layer"
        reasons.append("units layer: a device with copy engines does best with the fewest gathers")
    elif units == AUTO:
        units = "weight"
        reasons.append("units weight: on a host a gemm reads its weight from the cache that the gather has just filled")
    if asked.prefetch_depth != AUTO:
        depth = asked.prefetch_depth
    else:
        depth = 1 if spare else 0
        engine = "copy engines gather" if device.kind == "cuda" else f"{device.spare_cores} spare cores gather"
        why = f"{engine} while ranks compute" if spare else "no spare core, so no free copy engine: gather before use"
        reasons.append(f"prefetch_depth {depth}: {why}")
    if executor == AUTO:
        executor = "threaded" if depth > 0 and spare else "cooperative"
        if device.kind == "host":
            why = "a thread a stream on spare cores" if executor == "threaded" else "one worker, no wake-ups"
            reasons.append(f"executor {executor}: {why}")
    return Choice(units, depth, executor, tuple(reasons))


def _plan(model: ModelSpec, world_size: int, asked: PlanOptions, choice: Choice) -> Plan:
    units: tuple[Unit, ...] = ()
    if choice.units == REPLICATED:
        decisions = keep_all(model, choice.reasons[0])
    elif asked.placed is not None:
        units = tuple(asked.placed)
        decisions = place_units(model, units)
    else:
        rules = UnitRules(
            policy=choice.units,
            include=tuple(asked.include),
            exclude=tuple(asked.exclude),
            min_shard_bytes=_min_shard_bytes(model, asked),
            outside_layers=asked.outside_layers,
            slice_blocks=asked.dual != "off",
            world_size=world_size,
        )
        decisions, units = choose_units(model, rules)
    residencies, reasons = _residencies(model, units, asked, choice)
    shapes = capture_shapes(asked.step_shapes)
    modes, block_reasons = choose_modes(
        DualRequest(model, world_size, asked.dual, shapes, units, decisions, asked.chooser)
    )
    return Plan(
        model=model.name,
        world_size=world_size,
        decisions=decisions,
        units=units,
        residencies=residencies,
        num_slots=1 + max((residency.slot for residency in residencies), default=-1),
        prefetch_depth=choice.prefetch_depth,
        head=asked.head,
        transport=asked.transport,
        executor=choice.executor,
        step_shapes=shapes,
        unit_policy=choice.units,
        alignment_bytes=asked.alignment_bytes,
        num_copy_streams=asked.num_copy_streams,
        reasons=(*choice.reasons, *reasons),
        modes=modes,
        block_reasons=block_reasons,
    )


def _min_shard_bytes(model: ModelSpec, asked: PlanOptions) -> int:
    if asked.min_shard_bytes != AUTO:
        return asked.min_shard_bytes
    return 0 if model.kept else DEFAULT_MIN_SHARD_BYTES


def _residencies(
    model: ModelSpec, units: Sequence[Unit], asked: PlanOptions, choice: Choice
) -> tuple[tuple[Residency, ...], tuple[str, ...]]:
    """Residencies with their slots, and a reason where fewer slots are used than were asked for."""
    stays = unit_stays(model, units)
    bytes_of = [sum(align_up(model.weight(n).num_bytes, asked.alignment_bytes) for n in u.weights) for u in units]
    order = issue_order([(begin, end) for _, begin, end in stays], choice.prefetch_depth, asked.head)
    num_slots = None if asked.num_slots == AUTO else asked.num_slots
    slots = assign_slots(order, [bytes_of[unit] for unit, _, _ in stays], num_slots)
    residencies = tuple(
        Residency(unit, begin, end, slot) for (unit, begin, end), slot in zip(stays, slots, strict=True)
    )
    used = len(set(slots))
    if num_slots is None or num_slots == used:
        return residencies, ()
    return residencies, (f"num_slots {used} of the {num_slots} asked for: more would never be filled",)


def _first_that_fits(model: ModelSpec, plans: Iterable[Plan], limit: int, granularity: int) -> Plan:
    layouts = []
    for plan in plans:
        layout = build_layout(model, plan)
        if layout.reserved_bytes(granularity) <= limit:
            return plan
        layouts.append(layout)
    smallest = min(layouts, key=lambda layout: layout.reserved_bytes(granularity))
    raise SpecError(f"no plan fits {format_bytes(limit)}: the smallest needs {describe_memory(smallest, granularity)}")


def describe_memory(layout: Layout, granularity_bytes: int) -> str:
    """`9.1 GiB = 6.2 chunks + 2.4 slots (2 x 1.2) + 0.5 resident; the slot size is set by layers.0.down_proj`."""
    needed = layout.reserved_bytes(granularity_bytes)
    unit = bytes_unit(needed)
    areas = (layout.shard_bytes, layout.slot_bytes, layout.resident_bytes)
    chunks, slots, resident = (in_unit(align_up(area, granularity_bytes), unit) for area in areas)
    parts = f"{chunks} chunks + {slots} slots{_slots_text(layout, unit)} + {resident} resident"
    text = f"{in_unit(needed, unit)} {unit} = {parts}"
    if not layout.units:
        return text
    largest = max(layout.units, key=lambda u: u.num_bytes)
    view = max(largest.views, key=lambda v: v.num_bytes)
    return f"{text}; the slot size is set by {view.weight}"


def _slots_text(layout: Layout, unit: str) -> str:
    if not layout.slots:
        return ""
    sizes = {slot.num_bytes for slot in layout.slots}
    largest = in_unit(max(sizes), unit)
    return f" ({len(layout.slots)} x {largest})" if len(sizes) == 1 else f" ({len(layout.slots)} up to {largest})"
