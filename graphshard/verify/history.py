"""The op list read in issue order: every stay of a unit in a slot, with the ops that touch it."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphshard.core.ops import AgLaunch, Gemm, RecordGate, WaitOnce
from graphshard.core.program import Program


@dataclass(slots=True)
class Stay:
    """Unit `unit` lies in `slot` from op `launch` until op `overwritten`.

    `launch` None: from the program's entry; `overwritten` None: to its end. `waits`, `reads`, `gates` are op indices.
    """

    unit: int
    slot: int
    launch: int | None
    overwritten: int | None = None
    waits: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)


@dataclass(slots=True)
class History:
    """All stays of a program in issue order, and the waits and gates that belong to none of them."""

    stays: list[Stay] = field(default_factory=list)
    last: dict[int, Stay] = field(default_factory=dict)
    """What each slot holds at the end, by issue order."""
    stray_waits: list[int] = field(default_factory=list)
    stray_gates: list[tuple[int, Stay | None]] = field(default_factory=list)
    """Gates of a unit that its slot does not hold, and what it holds instead."""


def history_of(program: Program) -> History:
    """Walk `program` once. Reads find their unit where the latest wait for it, or else the latest gather, says."""
    history = History()
    for slot, unit in enumerate(program.entry):
        if unit is not None:
            _enter(history, Stay(unit, slot, None))
    for index, op in enumerate(program.ops):
        if isinstance(op, AgLaunch):
            _enter(history, Stay(op.unit, op.slot, index))
        elif isinstance(op, Gemm):
            for unit in op.units:
                stay = _read_stay(history, unit)
                if stay is not None:
                    stay.reads.append(index)
        elif isinstance(op, WaitOnce | RecordGate):
            held = history.last.get(op.slot)
            is_held = held is not None and held.unit == op.unit
            if isinstance(op, WaitOnce):
                held.waits.append(index) if held and is_held else history.stray_waits.append(index)
            else:
                held.gates.append(index) if held and is_held else history.stray_gates.append((index, held))
    return history


def _enter(history: History, stay: Stay) -> None:
    """Begin `stay`, ending the one that its slot had."""
    before = history.last.get(stay.slot)
    if before is not None:
        before.overwritten = stay.launch
    history.stays.append(stay)
    history.last[stay.slot] = stay


def _read_stay(history: History, unit: int) -> Stay | None:
    """The stay where a read of `unit` looks; None if no slot holds it."""
    held = [stay for stay in history.last.values() if stay.unit == unit]
    return max(held, key=_freshness, default=None)


def _freshness(stay: Stay) -> tuple[bool, int, int]:
    """Waited for and open stays first, the latest wait first, then the latest gather."""
    is_begun = (bool(stay.waits) or stay.launch is None) and not stay.gates
    return is_begun, max(stay.waits, default=-1), -1 if stay.launch is None else stay.launch
