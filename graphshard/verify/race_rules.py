"""R2 R3 R5 R6 R9 where two steps are shown to read wrong bytes: each race is put under the rule that prevents it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphshard.core.lowering import NO_SLOT
from graphshard.core.ops import RecordGate
from graphshard.verify.facts import Facts
from graphshard.verify.races import ENTRY_OP, Access, Content, Race
from graphshard.verify.report import Violation, op_text


def race_violations(facts: Facts, rule: int) -> Iterator[Violation]:
    """The races that `rule` is there to prevent."""
    for race in facts.races:
        violation = judge(facts, race)
        if violation.rule == rule:
            yield violation


def judge(facts: Facts, race: Race) -> Violation:
    """The one violation that `race` is."""
    if race.kind == "absent":
        return _absent(facts, race)
    if race.kind == "partial":
        assert race.held is not None
        text = f"{_reads(facts, race)}, {_source(facts, race.held)}, but not all of its copies are issued before"
        return _violation(2, race.read.step, race.read.op, race.read.unit, race.slot, text)
    if race.kind == "early":
        return _early(facts, race)
    if race.kind == "overwrite":
        return _overwrite(facts, race)
    assert race.write is not None
    what = f"{_op(facts, race.write)} may run before {_op(facts, race.read)} has filled slot {race.slot} with unit"
    return _violation(
        6, race.write.step, race.write.op, race.read.unit, race.slot, f"{what} {race.read.unit}; order the two gathers"
    )


def _absent(facts: Facts, race: Race) -> Violation:
    """A read whose unit is not where it looks: never gathered, overwritten, or not left there by the step before."""
    read, held = race.read, race.held
    program = facts.program_of(read.step)
    if race.slot == NO_SLOT:
        gate = _entry_gate(facts, read)
        if gate is not None:
            return _gate_before_read(facts, read, race.slot, gate)
        text = f"{_reads(facts, race)}, which is neither gathered before nor held at entry"
        return _violation(2, read.step, read.op, read.unit, None, text)
    wants_entry = 0 <= race.slot < len(program.entry) and program.entry[race.slot] == read.unit
    if wants_entry and read.step == 1 and (held is None or held.step == 0):
        found = "nothing" if held is None else f"unit {held.unit} ({_source(facts, held)})"
        text = f"{_reads(facts, race)}, held at entry, but the step before leaves {found} there"
        return _violation(9, read.step, read.op, read.unit, race.slot, text)
    if race.lost is not None and race.write is not None and race.lost.step == race.write.step:
        stay = facts.stay_of(race.lost.step, race.lost, race.slot)
        if stay is not None and stay.gates and stay.gates[0] < min(read.op, race.write.op):
            return _gate_before_read(facts, read, race.slot, stay.gates[0])
        if read.step == race.write.step:
            return _too_early(facts, race.slot, race.write, read, _gates_after(facts, read, race.slot))
    found = "holds nothing" if held is None else f"holds unit {held.unit} ({_source(facts, held)})"
    text = f"{_reads(facts, race)}, which {found}; gather unit {read.unit} before"
    return _violation(2, read.step, read.op, read.unit, race.slot, text)


def _early(facts: Facts, race: Race) -> Violation:
    """A read that does not wait for its gather, or a later gather of the same unit that does not wait for the read."""
    assert race.held is not None and race.write is not None
    read, write = race.read, race.write
    if write.step == read.step and write.op > read.op:
        return _too_early(facts, race.slot, write, read, _gates_after(facts, read, race.slot))
    stay = facts.stay_of(read.step, race.held, race.slot)
    waits = [] if stay is None else stay.waits
    hint = f"; its wait_once is op {waits[0]}" if waits else ""
    text = f"{_reads(facts, race)}, but no wait_once for it is ordered before ({_source(facts, race.held)}){hint}"
    return _violation(3, read.step, read.op, read.unit, race.slot, text)


def _overwrite(facts: Facts, race: Race) -> Violation:
    """A gather that does not wait for the reader of what it overwrites: no gate, a gate too early, or too late."""
    assert race.lost is not None and race.write is not None
    stay = facts.stay_of(race.read.step, race.lost, race.slot)
    nodes = facts.gate_nodes[race.read.step]
    gates = [] if stay is None else [gate for gate in stay.gates if gate in nodes]
    early = [gate for gate in gates if not facts.order.before(race.read.node, nodes[gate])]
    if early and early == gates:
        return _gate_before_read(facts, race.read, race.slot, early[0])
    return _too_early(facts, race.slot, race.write, race.read, gates or _gates_after(facts, race.read, race.slot))


def _gate_before_read(facts: Facts, read: Access, slot: int, gate: int) -> Violation:
    """R5: the gate says that the slot is free, and a reader still follows."""
    program = facts.program_of(read.step)
    slot = slot if slot != NO_SLOT else program.entry.index(read.unit)
    text = f"{op_text(program, gate)} is not after op {read.op}, which reads unit {read.unit} in slot {slot}"
    return _violation(5, read.step, gate, read.unit, slot, f"{text}; record it after the slot's last reader")


def _too_early(facts: Facts, slot: int, write: Access, read: Access, gates: Sequence[int]) -> Violation:
    """R6: a gather overwrites what is still read; `gates` are the slot's gates for that read."""
    program = facts.program_of(write.step)
    before = " of the step before" if read.step < write.step else ""
    gate = f"slot {slot}'s gate is op {gates[-1]}" if gates else f"no gate of slot {slot} follows it"
    text = f"{_op(facts, write)} overwrites unit {read.unit}, still read by op {read.op}{before}; {gate}"
    text += f". Use num_slots >= {program.num_slots + 1} or launch later"
    return _violation(6, write.step, write.op, read.unit, slot, text)


def _gates_after(facts: Facts, read: Access, slot: int) -> list[int]:
    """The first gate of what `read` reads that follows it in issue order, wherever it belongs."""
    ops = facts.program_of(read.step).ops
    for index in range(max(read.op, 0), len(ops)):
        op = ops[index]
        if isinstance(op, RecordGate) and (op.unit, op.slot) == (read.unit, slot):
            return [index]
    return []


def _entry_gate(facts: Facts, read: Access) -> int | None:
    """A gate, before `read`, of the slot that holds the unit at entry."""
    program = facts.program_of(read.step)
    for index, op in enumerate(program.ops[: max(read.op, 0)]):
        if isinstance(op, RecordGate) and op.unit == read.unit and read.unit in program.entry:
            return index
    return None


def _violation(rule: int, step: int, op: int, unit: int, slot: int | None, text: str) -> Violation:
    return Violation(rule, op if op >= 0 else None, unit, slot, text, wrong_bytes=True, step=step)


def _op(facts: Facts, access: Access) -> str:
    """The op of `access` in words."""
    if access.op == ENTRY_OP:
        return "the gather from outside"
    return op_text(facts.program_of(access.step), access.op)


def _reads(facts: Facts, race: Race) -> str:
    """`op 17 gemm layer=3 segment=down_proj reads unit 3 in slot 1`."""
    place = "" if race.slot == NO_SLOT else f" in slot {race.slot}"
    return f"{_op(facts, race.read)} reads unit {race.read.unit}{place}"


def _source(facts: Facts, content: Content) -> str:
    """Where the bytes of `content` come from."""
    if content.op == ENTRY_OP:
        return "held at entry"
    ops = facts.program_of(content.step).ops
    stream = f" on stream {ops[content.op].stream}" if 0 <= content.op < len(ops) else ""
    return f"gathered by op {content.op}{stream}"
