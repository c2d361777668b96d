"""Mutations of programs and of lowered lists, each kind with the rules that name its harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphshard.core.lowering import Compute, CopyRun, Lowered, LoweredOp, Record, Wait
from graphshard.core.ops import AgLaunch, Gemm, Op, RecordGate, WaitOnce
from graphshard.core.program import Program


@dataclass(frozen=True)
class Mutant:
    """A changed program (`lowered` None: lower it) or a changed list of an unchanged program.

    `rules` are those that name its harm; `by_definition` means that it counts as harmful whatever it does to bytes.
    """

    kind: str
    program: Program
    rules: frozenset[int]
    lowered: Lowered | None = None
    by_definition: bool = False


def _without(ops: tuple, index: int) -> tuple:
    return ops[:index] + ops[index + 1 :]


def _moved(ops: tuple, index: int, to: int) -> tuple:
    """`ops` with op `index` at place `to` of what remains."""
    rest = _without(ops, index)
    return rest[:to] + (ops[index],) + rest[to:]


def _swapped(ops: tuple, index: int, op: object) -> tuple:
    return ops[:index] + (op,) + ops[index + 1 :]


def _mutant(program: Program, kind: str, ops: tuple[Op, ...], rules: set[int], by_definition: bool = False) -> Mutant:
    return Mutant(kind, replace(program, ops=ops), frozenset(rules), None, by_definition)


def program_mutants(program: Program, places: Sequence[int] | None = None) -> Iterator[Mutant]:
    """Every mutant of the op list itself; with `places` only those of the ops there."""
    for index in places if places is not None else range(len(program.ops)):
        op = program.ops[index]
        if isinstance(op, AgLaunch):
            yield from _launch_mutants(program, index, op)
        elif isinstance(op, WaitOnce):
            yield from _wait_mutants(program, index, op)
        elif isinstance(op, RecordGate):
            yield from _gate_mutants(program, index, op)
        elif isinstance(op, Gemm):
            yield from _gemm_mutants(program, index, op)
    if places is None:
        yield from _state_mutants(program)


def _launch_mutants(program: Program, index: int, op: AgLaunch) -> Iterator[Mutant]:
    ops = program.ops
    yield _mutant(program, "drop ag_launch", _without(ops, index), {2, 9})
    for to in range(index):
        # R2 where it overwrites an earlier stay of the same unit: gathered again, before it was read
        yield _mutant(program, "launch earlier", _moved(ops, index, to), {2, 6})
    for to in range(index + 1, len(ops)):
        yield _mutant(program, "launch later", _moved(ops, index, to), {2, 3, 6, 9})
    for slot in range(program.num_slots):
        if slot != op.slot:
            changed = _swapped(ops, index, replace(op, slot=slot))
            yield _mutant(program, "gather into another slot", changed, {2, 6, 9})
    for unit in range(program.num_units):
        if unit != op.unit:
            yield _mutant(program, "gather another unit", _swapped(ops, index, replace(op, unit=unit)), {2, 9})
    again = ops[: index + 1] + ops[index:]
    yield _mutant(program, "gather twice", again, {2, 12}, by_definition=True)
    yield _mutant(program, "launch on compute", _swapped(ops, index, replace(op, stream="compute")), {3, 6})
    yield _mutant(program, "launch on prefetch", _swapped(ops, index, replace(op, stream="prefetch")), {3, 6})


def _wait_mutants(program: Program, index: int, op: WaitOnce) -> Iterator[Mutant]:
    ops = program.ops
    yield _mutant(program, "drop wait", _without(ops, index), {3})
    yield _mutant(program, "duplicate wait", ops[: index + 1] + ops[index:], {4}, by_definition=True)
    yield _mutant(program, "wait on copy", _swapped(ops, index, replace(op, stream="copy")), {3})
    for to in range(index + 1, len(ops)):
        yield _mutant(program, "wait later", _moved(ops, index, to), {3})
    for to in range(index):
        yield _mutant(program, "wait earlier", _moved(ops, index, to), {2, 3, 9})
    for slot in range(program.num_slots):
        if slot != op.slot:
            yield _mutant(program, "wait for another slot", _swapped(ops, index, replace(op, slot=slot)), {2, 3, 9})


def _gate_mutants(program: Program, index: int, op: RecordGate) -> Iterator[Mutant]:
    ops = program.ops
    readers = [i for i in range(index) if isinstance(ops[i], Gemm) and op.unit in ops[i].units]
    # a gate that is gone or stands before its reader is a fault wherever it does no harm, too
    yield _mutant(program, "drop gate", _without(ops, index), {5}, by_definition=True)
    for to in range(index):
        is_early = bool(readers) and to <= readers[-1]
        yield _mutant(program, "gate earlier", _moved(ops, index, to), {5}, by_definition=is_early)
    for to in range(index + 1, len(ops)):
        yield _mutant(program, "gate later", _moved(ops, index, to), {5, 6})
    yield _mutant(program, "gate on copy", _swapped(ops, index, replace(op, stream="copy")), {5}, by_definition=True)
    for slot in range(program.num_slots):
        if slot != op.slot:
            changed = _swapped(ops, index, replace(op, slot=slot))
            yield _mutant(program, "gate of another slot", changed, {5}, by_definition=True)


def _gemm_mutants(program: Program, index: int, op: Gemm) -> Iterator[Mutant]:
    ops = program.ops
    yield _mutant(program, "drop gemm", _without(ops, index), {1}, by_definition=True)
    yield _mutant(program, "gemm on copy", _swapped(ops, index, replace(op, stream="copy")), {3, 5})
    for unit in op.units:
        for other in range(program.num_units):
            if other not in op.units:
                units = tuple(other if name == unit else name for name in op.units)
                yield _mutant(
                    program, "read another unit", _swapped(ops, index, replace(op, units=units)), {2, 3, 5, 6}
                )


def _state_mutants(program: Program) -> Iterator[Mutant]:
    """Slots renamed over a whole stay, entry and exit states, gathers from outside."""
    for index, op in enumerate(program.ops):
        if not isinstance(op, AgLaunch):
            continue
        for slot in range(program.num_slots):
            if slot != op.slot:
                yield _mutant(program, "stay in another slot", _renamed(program, index, slot), {2, 5, 6, 9})
    for slot, unit in enumerate(program.entry):
        for other in (None, *range(program.num_units)):
            if unit is not None and other != unit:
                entry = program.entry[:slot] + (other,) + program.entry[slot + 1 :]
                yield Mutant("entry states another unit", replace(program, entry=entry), frozenset({2, 9}))
    for slot, unit in enumerate(program.exit):
        for other in range(program.num_units):
            if other != unit:
                states = program.exit[:slot] + (other,) + program.exit[slot + 1 :]
                changed = replace(program, exit=states)
                yield Mutant("exit states another unit", changed, frozenset({9}), by_definition=True)
    for index in range(len(program.outside)):
        changed = replace(program, outside=_without(program.outside, index))
        yield Mutant("drop outside gather", changed, frozenset({9}))


def _renamed(program: Program, launch: int, slot: int) -> tuple[Op, ...]:
    """The stay that op `launch` begins lies in `slot`: its launch, wait and gate all say so."""
    ops = list(program.ops)
    begun = ops[launch]
    assert isinstance(begun, AgLaunch)
    for index in range(launch, len(ops)):
        op = ops[index]
        if not isinstance(op, AgLaunch | WaitOnce | RecordGate) or (op.unit, op.slot) != (begun.unit, begun.slot):
            continue
        if isinstance(op, AgLaunch) and index > launch:
            break
        ops[index] = replace(op, slot=slot)
        if isinstance(op, RecordGate):
            break
    return tuple(ops)


def modulo_slots(program: Program, num_slots: int) -> Program:
    """The fault of a ring: stay number i lies in slot i mod k, also where the wrap does not fit.

    The tail's gathers go on counting, so what entry states is met or missed by the same arithmetic.
    """
    ops: list[Op] = []
    turns: dict[int, int] = {}
    number = 0
    entry: list[int | None] = [None] * num_slots
    for unit in (unit for unit in program.entry if unit is not None):
        entry[number % num_slots], turns[unit] = unit, number % num_slots
        number += 1
    held = list(entry)
    pending: dict[int, int] = {}
    for op in program.ops:
        if isinstance(op, AgLaunch):
            pending[op.unit] = number % num_slots
            held[number % num_slots] = op.unit
            ops.append(replace(op, slot=number % num_slots))
            number += 1
        elif isinstance(op, WaitOnce):
            turns[op.unit] = pending[op.unit]
            ops.append(replace(op, slot=turns[op.unit]))
        elif isinstance(op, RecordGate):
            ops.append(replace(op, slot=turns[op.unit]))
        else:
            ops.append(op)
    return replace(program, ops=tuple(ops), num_slots=num_slots, entry=tuple(entry), exit=tuple(held))


def list_mutants(program: Program, lowered: Lowered, places: Sequence[int] | None = None) -> Iterator[Mutant]:
    """Every mutant of the lowered list of an unchanged program; with `places` only those of the list's ops there."""
    for index in places if places is not None else range(len(lowered.ops)):
        op = lowered.ops[index]
        owner = type(program.ops[op.op]) if 0 <= op.op < len(program.ops) else None
        if isinstance(op, Wait):
            changes = _list_wait_changes(lowered, index, op, owner)
        elif isinstance(op, Record):
            changes = _list_record_changes(lowered, index, op, owner)
        elif isinstance(op, CopyRun):
            changes = _list_copy_changes(lowered, index)
        else:
            assert isinstance(op, Compute)
            changes = _list_compute_changes(lowered, index, op)
        for kind, ops, rules, by_definition in changes:
            yield Mutant(f"list: {kind}", program, frozenset(rules), replace(lowered, ops=ops), by_definition)


Changes = Iterator[tuple[str, tuple[LoweredOp, ...], set[int], bool]]
"""Kind, changed list, rules that name the harm, harmful by definition."""


def _list_wait_changes(lowered: Lowered, index: int, op: Wait, owner: type | None) -> Changes:
    """`owner` is the verb of the op that the wait belongs to, None for the list's own fork and join."""
    ops = lowered.ops
    # a wait_once; a gate or a fan-out of a gather; the fork and join
    rules = {3} if owner is WaitOnce else {3, 6} if owner is AgLaunch else {8}
    # a branch of the copy stream is forked from it once more: its own fork may go
    is_border = owner is None and op.stream in ("compute", "copy")
    yield "drop fork or join" if owner is None else "drop wait", _without(ops, index), rules, is_border
    yield "duplicate wait", ops[: index + 1] + ops[index:], {4}, True
    for to in range(index + 1, len(ops)):
        yield "wait later", _moved(ops, index, to), rules, False
    for to in range(index):
        yield "wait earlier", _moved(ops, index, to), {9}, False
    for event in range(lowered.num_events):
        if event != op.event:
            yield "wait for another event", _swapped(ops, index, replace(op, event=event)), rules | {9}, False
    for stream in lowered.streams:
        if stream != op.stream:
            changed = _swapped(ops, index, replace(op, stream=stream))
            yield "wait on another stream", changed, rules, False


def _list_record_changes(lowered: Lowered, index: int, op: Record, owner: type | None) -> Changes:
    ops = lowered.ops
    # a gate; ready or a fan-out of a gather; the fork and join
    rules = {5} if owner is RecordGate else {3, 6} if owner is AgLaunch else {8}
    yield "drop record", _without(ops, index), {9} if op.event != lowered.outputs_event else {1}, False
    for to in range(index):
        yield "record earlier", _moved(ops, index, to), rules, False
    for to in range(index + 1, len(ops)):
        yield "record later", _moved(ops, index, to), {9}, False
    for stream in lowered.streams:
        if stream != op.stream:
            yield "record on another stream", _swapped(ops, index, replace(op, stream=stream)), rules, False


def _list_copy_changes(lowered: Lowered, index: int) -> Changes:
    ops = lowered.ops
    yield "drop copies", _without(ops, index), {2}, True
    for to in range(index):
        # R2 where only some of a gather's copies come before what the slot held: they are overwritten
        yield "copies earlier", _moved(ops, index, to), {2, 6, 8}, False
    for to in range(index + 1, len(ops)):
        yield "copies later", _moved(ops, index, to), {2, 3}, False
    for stream in lowered.streams:
        if stream != ops[index].stream:
            changed = _swapped(ops, index, replace(ops[index], stream=stream))
            yield "copies on another stream", changed, {3, 6}, False


def _list_compute_changes(lowered: Lowered, index: int, op: Compute) -> Changes:
    ops = lowered.ops
    yield "drop compute", _without(ops, index), {1}, True
    for place, (unit, slot) in enumerate(op.reads):
        reads = _swapped(op.reads, place, (unit, slot + 1))
        yield "read another slot", _swapped(ops, index, replace(op, reads=reads)), {2}, False
    for to in range(index):
        yield "compute earlier", _moved(ops, index, to), {2, 3, 9}, False
    for to in range(index + 1, len(ops)):
        yield "compute later", _moved(ops, index, to), {5, 6}, False
    for stream in lowered.streams:
        if stream != op.stream:
            changed = _swapped(ops, index, replace(op, stream=stream))
            yield "compute on another stream", changed, {3, 5}, False
