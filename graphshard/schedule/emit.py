"""From a plan to its op list. Depends on the model's spec and the plan alone: not on memory, order of dicts, or rank.

    for the first `depth` residencies: ag_launch                          (head inside; else they are held at entry)
    at the first segment of residency i: ag_launch(i + depth), wait_once(i)
    segments, neighbours merged into one gemm where no other op lies between
    after the last segment of residency i: record_gate(i)
With a tail, i + depth wraps: the last residencies launch the next step's first ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.core.errors import SpecError
from graphshard.core.ops import AgLaunch, Gemm, Op, RecordGate, RecordOutputs, WaitOnce
from graphshard.core.plan import Plan, Residency
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.schedule.slots import IssueOrder, issue_order


def emit(model: ModelSpec, plan: Plan) -> Program:
    """The program of one step of `model` under `plan`.

    Raises:
        SpecError: a segment reads a sharded weight outside all residencies of its unit.
    """
    stays = plan.residencies
    order = issue_order([(stay.begin, stay.end) for stay in stays], plan.prefetch_depth, plan.head)
    held = stays[: order.num_held]
    entry: list[int | None] = [None] * plan.num_slots
    for stay in held:
        entry[stay.slot] = stay.unit
    ops = _ops(model, plan, order)
    return Program(
        ops=tuple(ops),
        num_slots=plan.num_slots,
        num_units=len(plan.units),
        num_segments=len(model.segments),
        entry=tuple(entry),
        exit=_exit(entry, ops),
        outside=tuple(AgLaunch(s.unit, s.slot, "prefetch") for s in held) if plan.head == "outside" else (),
    )


def emit_all(model: ModelSpec, plan: Plan) -> dict[StepShape, Program]:
    """The program of every step shape of `plan`, smallest first; equal programs are one object."""
    program = emit(model, plan)  # gathers do not depend on the number of tokens
    return dict.fromkeys(sorted(plan.step_shapes), program)


def _ops(model: ModelSpec, plan: Plan, order: IssueOrder) -> list[Op]:
    stays = plan.residencies
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[Residency]] = {}
    for index, stay in enumerate(stays):
        opens.setdefault(stay.begin, []).append(index)
        closes.setdefault(stay.end, []).append(stay)
    reads = _reads(model, plan)
    # the first gathers, unless they are held at entry
    ops: list[Op] = [_launch(stay) for stay in stays[order.num_held : order.depth]]
    begin = 0
    for segment in sorted({0, len(model.segments), *opens, *closes}):
        if begin < segment:
            ops.append(_gemm(model, reads, begin, segment))
            begin = segment
        ops += [RecordGate(stay.unit, stay.slot) for stay in closes.get(segment, ())]
        for index in opens.get(segment, ()):
            ahead = index + order.depth
            if order.tail or order.num_held <= ahead < len(stays):
                ops.append(_launch(stays[ahead % len(stays)]))
            if index >= order.num_held:
                ops.append(WaitOnce(stays[index].unit, stays[index].slot))
    if order.tail:
        ops.append(RecordOutputs())
    return ops


def _launch(stay: Residency) -> AgLaunch:
    return AgLaunch(stay.unit, stay.slot)


def _gemm(model: ModelSpec, reads: Sequence[Sequence[int]], begin: int, end: int) -> Gemm:
    """One op for segments `[begin, end)`."""
    first, last = model.segments[begin], model.segments[end - 1]
    name = first.name if end == begin + 1 else f"{first.name}..{last.name}"
    layer = first.layer if all(model.segments[i].layer == first.layer for i in range(begin, end)) else None
    units = sorted({unit for i in range(begin, end) for unit in reads[i]})
    return Gemm(begin, end, layer, name, tuple(units))


def _reads(model: ModelSpec, plan: Plan) -> list[tuple[int, ...]]:
    """The units that each segment reads, checked to lie inside one of their residencies."""
    unit_of = {name: unit.index for unit in plan.units for name in unit.weights}
    stays_of: dict[int, list[Residency]] = {}
    for stay in plan.residencies:
        stays_of.setdefault(stay.unit, []).append(stay)
    found = []
    for index, segment in enumerate(model.segments):
        units = sorted({unit_of[name] for name in segment.reads if name in unit_of})
        for unit in units:
            if not any(stay.begin <= index < stay.end for stay in stays_of.get(unit, ())):
                raise SpecError(
                    f"segment {segment.path} reads unit {unit} ({plan.units[unit].name}) outside its residency"
                )
        found.append(tuple(units))
    return found


def _exit(entry: Sequence[int | None], ops: Sequence[Op]) -> tuple[int | None, ...]:
    """What each slot holds after the last op: the unit of its last gather, or what it held at entry."""
    held = list(entry)
    for op in ops:
        if isinstance(op, AgLaunch):
            held[op.slot] = op.unit
    return tuple(held)
