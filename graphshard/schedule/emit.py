"""From a plan to its op list. Depends on the model's spec and the plan alone: not on memory, order of dicts, or rank.

    for the first `depth` residencies: ag_launch                          (head inside; else they are held at entry)
    at the first segment of residency i: ag_launch(i + depth), wait_once(i)
    segments, neighbours merged into one gemm where no other op lies between
    after the last segment of residency i: record_gate(i)
With a tail, i + depth wraps: the last residencies launch the next step's first ones.

# Note [one order for all modes]
The programs of a plan differ in the blocks that are tensor-parallel. Such a program leaves out the gathers, waits and
gates of those blocks' units, and changes nothing else: a unit is launched at the same segment and into the same slot as
in the program that gathers everything. So what is left is free of races as the whole was, and fits the same slots.

    in the place of a tensor-parallel block's segments: prepare, act_gather, compute, reduce_scatter, finish
Launches and waits that belong inside the block come before it, until the first gate there; the rest comes after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

from graphshard.core.errors import SpecError
from graphshard.core.ops import ActGather, AgLaunch, Gemm, Op, RecordGate, RecordOutputs, ReduceScatter, WaitOnce
from graphshard.core.plan import Mode, Plan, Residency, refuse_misplaced
from graphshard.core.program import Program, SlicedBlock, first_of_block
from graphshard.core.specs import BlockSpec, ModelSpec, SegmentSpec, StepShape
from graphshard.schedule.slots import issue_order


def emit(model: ModelSpec, plan: Plan, shape: StepShape | None = None) -> Program:
    """The program of one step of `model` under `plan`, in the modes of `shape`; None: every block is gathered.

    Raises:
        SpecError: a segment reads a sharded weight outside all residencies of its unit, or a block is to be
            tensor-parallel whose weights are not sliced; a mode is unknown, or `shape` has none though others have.
    """
    return _Emission(model, plan, () if shape is None else plan.modes_of(shape)).program()


def emit_all(model: ModelSpec, plan: Plan) -> dict[StepShape, Program]:
    """The program of every step shape of `plan`, smallest first; those of equal modes are one object.

    Raises:
        SpecError: as `emit`.
    """
    by_modes: dict[tuple[Mode, ...], Program] = {}
    programs = {}
    for shape in sorted(plan.step_shapes):
        modes = _wanted(plan.modes_of(shape))
        if modes not in by_modes:
            by_modes[modes] = _Emission(model, plan, modes).program()
        programs[shape] = by_modes[modes]
    return programs


def _wanted(modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """No modes and nothing but gathers are the same."""
    return modes if set(modes) - {"gather"} else ()


class _Emission:
    """One program in the making."""

    def __init__(self, model: ModelSpec, plan: Plan, modes: Sequence[Mode]) -> None:
        self.model, self.plan = model, plan
        stays = plan.residencies
        refuse_misplaced(plan)
        for stay in stays:
            if not 0 <= stay.begin < stay.end <= len(model.segments):
                raise SpecError(f"{stay} is refused: {model.name} has {len(model.segments)} segments")
        self.order = issue_order([(stay.begin, stay.end) for stay in stays], plan.prefetch_depth, plan.head)
        self.reads = _reads(model, plan)
        self.unit_of = {name: unit.index for unit in plan.units for name in unit.weights}
        self.blocks = _sliced_blocks(model, plan, modes)
        self.left_out = {self.unit_of[name] for block in self.blocks for name in model.blocks[block.index].weights}
        self.opens: dict[int, list[int]] = {}
        self.closes: dict[int, list[Residency]] = {}
        for index, stay in enumerate(stays):
            self.opens.setdefault(stay.begin, []).append(index)
            self.closes.setdefault(stay.end, []).append(stay)
        self.ops: list[Op] = []

    def program(self) -> Program:
        model, plan = self.model, self.plan
        held = [stay for stay in plan.residencies[: self.order.num_held] if stay.unit not in self.left_out]
        entry: list[int | None] = [None] * plan.num_slots
        for stay in held:
            entry[stay.slot] = stay.unit
        self.emit_ops()
        return Program(
            ops=tuple(self.ops),
            num_slots=plan.num_slots,
            num_units=len(plan.units),
            num_segments=len(model.segments),
            entry=tuple(entry),
            exit=_exit(entry, self.ops),
            outside=tuple(AgLaunch(s.unit, s.slot, "prefetch") for s in held) if plan.head == "outside" else (),
            blocks=self.blocks,
        )

    def emit_ops(self) -> None:
        num_segments = len(self.model.segments)
        # the first gathers, unless they are held at entry
        for stay in self.plan.residencies[self.order.num_held : self.order.depth]:
            self.launch(stay)
        borders = {0, num_segments, *self.opens, *self.closes}
        borders |= {border for block in self.blocks for border in (block.begin, block.end)}
        begins = {block.begin: block for block in self.blocks}
        begin = inside_until = 0
        for border in sorted(borders):
            if border < inside_until:
                continue  # inside a tensor-parallel block: emitted with it
            if begin < border:
                self.ops.append(_gemm(self.model, self.reads, begin, border))
            begin = border
            self.border(border)
            if border in begins:
                block = begins[border]
                self.block(block, [inner for inner in sorted(borders) if block.begin < inner < block.end])
                begin = inside_until = block.end
        if self.order.tail:
            self.ops.append(RecordOutputs())

    def border(self, border: int) -> None:
        """What happens between two segments: gates of what was read before, then launches and waits."""
        for stay in self.closes.get(border, ()):
            if stay.unit not in self.left_out:
                self.ops.append(RecordGate(stay.unit, stay.slot))
        stays, order = self.plan.residencies, self.order
        for index in self.opens.get(border, ()):
            ahead = index + order.depth
            if order.tail or order.num_held <= ahead < len(stays):
                self.launch(stays[ahead % len(stays)])
            stay = stays[index]
            if index >= order.num_held and stay.unit not in self.left_out:
                self.ops.append(WaitOnce(stay.unit, stay.slot))

    def launch(self, stay: Residency) -> None:
        if stay.unit not in self.left_out:
            self.ops.append(AgLaunch(stay.unit, stay.slot))

    def block(self, block: SlicedBlock, inner: Sequence[int]) -> None:
        """A tensor-parallel block; `inner` are the borders between its segments."""
        late = next((place for place, border in enumerate(inner) if self.gates_at(border)), len(inner))
        for border in inner[:late]:
            self.border(border)
        spec = self.model.blocks[block.index]
        prepare, compute, finish = (
            self.sliced_gemm(spec, block.first + part, segment) for part, segment in enumerate(spec.sliced_segments)
        )
        self.ops += [prepare, ActGather(block.index), compute, ReduceScatter(block.index), finish]
        for border in inner[late:]:
            self.border(border)

    def gates_at(self, border: int) -> bool:
        return any(stay.unit not in self.left_out for stay in self.closes.get(border, ()))

    def sliced_gemm(self, spec: BlockSpec, number: int, segment: SegmentSpec) -> Gemm:
        """One of a block's three segments; units that it reads beside the slices lie in slots by now."""
        units = sorted({self.unit_of[name] for name in segment.reads if name in self.unit_of} - self.left_out)
        for unit in units:
            stays = [stay for stay in self.plan.residencies if stay.unit == unit]
            readable = self.is_readable(spec, unit, stays)
            if segment is spec.compute or not readable:
                where = "is on slices" if segment is spec.compute else f"runs at segment {spec.begin}"
                raise SpecError(
                    f"block {spec.name}: {segment.path} {where} and reads unit {unit} ({self.plan.units[unit].name}), "
                    "which lies in no slot for it: keep its weights resident, or gather the block"
                )
        return Gemm(number, number + 1, segment.layer, segment.name, tuple(units))

    def is_readable(self, spec: BlockSpec, unit: int, stays: Iterable[Residency]) -> bool:
        """Whether `unit` has been waited for and lies in its slot through the whole block, as issued so far."""
        is_here = any(stay.begin < spec.end and stay.end > spec.begin for stay in stays)
        last = [op for op in self.ops if isinstance(op, WaitOnce | RecordGate) and op.unit == unit]
        held = any(stay.unit == unit for stay in self.plan.residencies[: self.order.num_held])
        return is_here and (isinstance(last[-1], WaitOnce) if last else held)


def _sliced_blocks(model: ModelSpec, plan: Plan, modes: Sequence[Mode]) -> tuple[SlicedBlock, ...]:
    """The blocks that `modes` make tensor-parallel."""
    if modes and len(modes) != len(model.blocks):
        raise SpecError(f"{len(modes)} modes for the {len(model.blocks)} blocks of {model.name}: give one for each")
    sliced = {unit.weights for unit in plan.units if unit.is_sliced}
    found = []
    for index, (block, mode) in enumerate(zip(model.blocks, modes, strict=False)):
        if mode not in get_args(Mode):
            raise SpecError(f"block {block.name}: unknown mode {mode!r}; known are {', '.join(get_args(Mode))}")
        if mode == "gather":
            continue
        if block.weights not in sliced:
            raise SpecError(f"block {block.name} cannot be tensor-parallel: its weights are no sliced unit of the plan")
        found.append(SlicedBlock(index, block.begin, block.end, first_of_block(model, index)))
    return tuple(found)


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
