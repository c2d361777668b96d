"""The rules of the op list itself, R1 R2 R4 R5 R8 R9 R12: one small function each, on program or lowered list."""

from __future__ import annotations

from collections.abc import Iterator

from graphshard.core.lowering import Compute, CopyRun, Record, Wait
from graphshard.core.ops import (
    BLOCK_PARTS,
    ActGather,
    AgLaunch,
    Gemm,
    RecordGate,
    RecordOutputs,
    ReduceScatter,
    WaitOnce,
)
from graphshard.core.program import Program
from graphshard.verify.facts import Facts
from graphshard.verify.history import Stay
from graphshard.verify.report import Violation, op_text


def indices_exist(facts: Facts) -> Iterator[Violation]:
    """R1 on the program: units, slots and segments exist, and every segment runs once, in order."""
    program = facts.program
    for name, state in (("entry", program.entry), ("exit", program.exit)):
        if len(state) != program.num_slots:
            text = f"{name} states {len(state)} slots of {program.num_slots}"
            yield Violation(1, None, None, None, text)
        for held, unit in enumerate(state):
            if unit is not None and not 0 <= unit < program.num_units:
                yield Violation(1, None, unit, held, f"{name} of slot {held} is unit {unit} of {program.num_units}")
    for index, op in enumerate(program.ops + program.outside):
        if isinstance(op, RecordOutputs | ActGather | ReduceScatter):
            continue
        slot = None if isinstance(op, Gemm) else op.slot
        found = [f"unit {u}" for u in _units(op) if not 0 <= u < program.num_units]
        found += [] if slot is None or 0 <= slot < program.num_slots else [f"slot {slot}"]
        if found:
            is_inside = index < len(program.ops)
            where = op_text(program, index) if is_inside else f"outside {op}"
            text = f"{where}: there is no {' and no '.join(found)}; units are 0 to {program.num_units - 1}"
            yield Violation(1, index if is_inside else None, None, slot, f"{text}, slots 0 to {program.num_slots - 1}")


def _units(op: AgLaunch | WaitOnce | RecordGate | Gemm) -> tuple[int, ...]:
    return op.units if isinstance(op, Gemm) else (op.unit,)


def segments_run_once(facts: Facts) -> Iterator[Violation]:
    """R1 on the program: gemm ops run segments 0 to num_segments once each, in order.

    In the place of those that a tensor-parallel block covers they run the block's own.
    """
    program = facts.program
    due = _segments_due(program)
    at, last = 0, None  # in `due`
    for index, op in enumerate(program.ops):
        if isinstance(op, Gemm):
            number = due[at] if at < len(due) else program.num_segments
            runs = due[at : at + max(op.end - op.begin, 0)]
            if len(runs) != max(op.end - op.begin, 1) or runs != list(range(op.begin, op.end)):
                text = f"{op_text(program, index)} runs segments {op.begin} to {op.end}, but segment {number} of "
                yield Violation(1, index, None, None, text + f"{program.num_segments} is next")
            at, last = max(at, _place(due, op.end)), index
    if at < len(due):
        end = due[-1] + 1
        text = f"segments {due[at]} to {end} are never run"
        yield Violation(1, last, None, None, text)


def _segments_due(program: Program) -> list[int]:
    """Segment numbers in the order in which a step runs them."""
    due = list(range(program.num_segments))
    for block in reversed(program.blocks):
        due[block.begin : block.end] = range(block.first, block.first + len(BLOCK_PARTS))
    return due


def _place(due: list[int], end: int) -> int:
    """How many of `due` have run when a gemm ends before segment number `end`."""
    return due.index(end - 1) + 1 if end - 1 in due else 0


def list_matches(facts: Facts) -> Iterator[Violation]:
    """R1 on the lowered list: gemm ops are there once, in order, on the streams that it states."""
    program, lowered = facts.program, facts.lowered
    expected = {index: op for index, op in enumerate(program.ops) if isinstance(op, Gemm)}
    last = -1
    for op in lowered.ops:
        if op.stream not in lowered.streams:
            yield _in_list(program, 1, op.op, f"the lowered list has no stream {op.stream}")
        if isinstance(op, Compute):
            gemm = expected.pop(op.op, None)
            reads = tuple(unit for unit, _ in op.reads)
            if gemm is None or (gemm.begin, gemm.end, gemm.units, gemm.stream) != (op.begin, op.end, reads, op.stream):
                yield _in_list(program, 1, op.op, "the lowered list runs it twice, or as another op")
            elif op.op < last:
                yield _in_list(program, 1, op.op, f"the lowered list runs it after op {last}")
            last = max(last, op.op)
    for index in expected:
        yield _in_list(program, 1, index, "it is missing in the lowered list")


def events_exist(facts: Facts) -> Iterator[Violation]:
    """R1 on the lowered list: each event is recorded once, the outputs' event too."""
    program, lowered = facts.program, facts.lowered
    events: set[int] = set()
    for op in lowered.ops:
        if isinstance(op, Record):
            if op.event in events or not 0 <= op.event < lowered.num_events:
                yield _in_list(program, 1, op.op, f"event {op.event} is recorded twice or does not exist")
            events.add(op.event)
    if lowered.outputs_event not in events:
        text = f"the outputs' event {lowered.outputs_event} is never recorded in the lowered list"
        yield Violation(1, None, None, None, text)


def _in_list(program: Program, rule: int, op: int, text: str, wrong_bytes: bool = False) -> Violation:
    """A violation of a lowered op; `op` -1 is the list's own fork or join."""
    if not 0 <= op < len(program.ops):
        return Violation(rule, None, None, None, f"{op_text(program, op)}: {text}", wrong_bytes)
    owner = program.ops[op]
    unit, slot = (owner.unit, owner.slot) if isinstance(owner, AgLaunch | WaitOnce | RecordGate) else (None, None)
    return Violation(rule, op, unit, slot, f"{op_text(program, op)}: {text}", wrong_bytes)


def gathers_are_whole(facts: Facts) -> Iterator[Violation]:
    """R2 on the lowered list: each ag_launch has each of its copies once, in its own slot."""
    copies: dict[int, list[CopyRun]] = {}
    for op in facts.lowered.ops:
        if isinstance(op, CopyRun):
            copies.setdefault(op.op, []).append(op)
    for index, launch in enumerate(facts.program.ops):
        runs = copies.pop(index, [])
        if not isinstance(launch, AgLaunch):
            if runs:
                yield Violation(2, index, None, None, f"{op_text(facts.program, index)} is no gather, but copies")
            continue
        covered = sorted(number for run in runs for number in range(run.begin, run.end))
        places = {(run.unit, run.slot) for run in runs}
        if covered != list(range(facts.num_copies)) or places != {(launch.unit, launch.slot)}:
            text = f"{op_text(facts.program, index)}: the lowered list has copies {covered} of {facts.num_copies}"
            yield Violation(2, index, launch.unit, launch.slot, text)


def gathered_once(facts: Facts) -> Iterator[Violation]:
    """R2: a unit is gathered once for each stay, and waited for only where it lies."""
    program, history = facts.program, facts.history
    held: dict[int, Stay] = {}
    for stay in history.stays:
        before = held.get(stay.slot)
        if before is not None and before.unit == stay.unit and not before.reads and stay.launch is not None:
            text = f"{op_text(program, stay.launch)} gathers unit {stay.unit} again, before it was read"
            yield Violation(2, stay.launch, stay.unit, stay.slot, text)
        held[stay.slot] = stay
    for index in history.stray_waits:
        op = program.ops[index]
        assert isinstance(op, WaitOnce | RecordGate)
        later = [i for i in range(index, len(program.ops)) if _launches(program.ops[i]) == (op.unit, op.slot)]
        if not later:
            text = f"{op_text(program, index)}: no gather of unit {op.unit} into slot {op.slot} is issued before it"
            yield Violation(2, index, op.unit, op.slot, text)


def _launches(op: object) -> tuple[int, int] | None:
    return (op.unit, op.slot) if isinstance(op, AgLaunch) else None


def one_wait(facts: Facts) -> Iterator[Violation]:
    """R4 on the program: at most one wait_once for a gather on a stream."""
    program = facts.program
    for stay in facts.history.stays:
        first: dict[str, int] = {}
        for index in stay.waits:
            stream = program.ops[index].stream
            if stream in first:
                text = f"{op_text(program, index)} waits on {stream} again; op {first[stream]} has waited. Drop it"
                yield Violation(4, index, stay.unit, stay.slot, text)
            first.setdefault(stream, index)


def one_wait_in_list(facts: Facts) -> Iterator[Violation]:
    """R4 on the lowered list: a stream waits for an event once."""
    seen: set[tuple[int, str]] = set()
    for op in facts.lowered.ops:
        if isinstance(op, Wait):
            if (op.event, op.stream) in seen:
                yield _in_list(facts.program, 4, op.op, f"stream {op.stream} waits for event {op.event} twice")
            seen.add((op.event, op.stream))


def gate_follows_readers(facts: Facts) -> Iterator[Violation]:
    """R5 on the program: every stay that is read has one gate, after its last reader and on that reader's stream."""
    program, history = facts.program, facts.history
    for stay in history.stays:
        where = f"unit {stay.unit} in slot {stay.slot}"
        if not stay.reads:
            for gate in stay.gates:
                text = f"{op_text(program, gate)}: nothing has read {where} before; record it after the last reader"
                yield Violation(5, gate, stay.unit, stay.slot, text)
            continue
        last = stay.reads[-1]
        if not stay.gates:
            text = f"{op_text(program, last)} is the last reader of {where}, but no record_gate follows it"
            yield Violation(5, last, stay.unit, stay.slot, text)
            continue
        gate = stay.gates[0]
        streams = {program.ops[read].stream for read in stay.reads}
        if gate < last:
            text = f"{op_text(program, gate)} is not after op {last}, which reads {where}"
            yield Violation(5, gate, stay.unit, stay.slot, text + "; record it after the slot's last reader")
        elif streams != {program.ops[gate].stream}:
            text = f"{op_text(program, gate)} is recorded on {program.ops[gate].stream}, but {where} is read on "
            yield Violation(5, gate, stay.unit, stay.slot, text + ", ".join(sorted(streams)))
        for again in stay.gates[1:]:
            yield Violation(5, again, stay.unit, stay.slot, f"{op_text(program, again)}: op {gate} is {where}'s gate")
    for index, held in history.stray_gates:
        op = program.ops[index]
        assert isinstance(op, WaitOnce | RecordGate)
        found = "nothing" if held is None else f"unit {held.unit}"
        text = f"{op_text(program, index)}, but slot {op.slot} holds {found} there"
        yield Violation(5, index, op.unit, op.slot, text)


def outputs_are_ready(facts: Facts) -> Iterator[Violation]:
    """R3 for the step's outputs: their event is recorded after the last compute op."""
    order, lowered = facts.order, facts.lowered
    records = [i for i, op in enumerate(lowered.ops) if isinstance(op, Record) and op.event == lowered.outputs_event]
    for record in records:
        for index, op in enumerate(lowered.ops):
            if isinstance(op, Compute) and not order.before(order.node(0, index), order.node(0, record)):
                text = f"{op_text(facts.program, op.op)} may still run when the outputs' event is recorded"
                yield Violation(3, op.op, None, None, text + "; record_outputs goes after the last gemm")


def forks_are_joined(facts: Facts) -> Iterator[Violation]:
    """R8: every stream is forked from compute before its first op, and joined into it after its last."""
    order, lowered = facts.order, facts.lowered
    ends: dict[str, list[int]] = {}
    for index, op in enumerate(lowered.ops):
        ends.setdefault(op.stream, []).append(index)
    for stream, indices in ends.items():
        for index, is_ordered, what in (
            (indices[0], order.before(order.begin(0), order.node(0, indices[0])), "is not forked from compute before"),
            (indices[-1], order.before(order.node(0, indices[-1]), order.end(0)), "is not joined into compute after"),
        ):
            if not is_ordered:
                op = lowered.ops[index]
                yield _in_list(facts.program, 8, op.op, f"stream {stream} {what} it")


def events_stay_inside(facts: Facts) -> Iterator[Violation]:
    """R9: no wait for an event that this list has not recorded before; nothing on the other side of a capture."""
    program = facts.program
    for unbound in facts.order.unbound:
        if unbound.step == 0:
            wait = unbound.wait
            text = f"stream {wait.stream} waits for event {wait.event}, which this list has not recorded before"
            yield _in_list(program, 9, wait.op, f"{text}; an event may not cross a capture's border", True)
    waited = [(index, None) for index in facts.history.stray_waits]
    held = [(index, stay) for stay in facts.history.stays if stay.launch is None for index in stay.waits]
    for index, stay in [*waited, *held]:
        op = program.ops[index]
        assert isinstance(op, WaitOnce | RecordGate)
        later = [i for i in range(index, len(program.ops)) if _launches(program.ops[i]) == (op.unit, op.slot)]
        if stay is not None or later:
            where = f"op {later[0]} of the step before" if later else "a gather outside of this list"
            text = f"{op_text(program, index)} waits for {where}; an event may not cross a capture's border"
            yield Violation(9, index, op.unit, op.slot, text)


def exit_meets_entry(facts: Facts) -> Iterator[Violation]:
    """R9: the stated exit is true, and a program leaves what its own entry needs, unless that comes from outside."""
    program, last = facts.program, facts.history.last
    outside = {gather.slot: gather.unit for gather in program.outside}
    for slot, unit in enumerate(program.exit):
        found = last[slot].unit if slot in last else None
        if unit is not None and unit != found:
            left = "nothing" if found is None else f"unit {found}"
            yield Violation(9, None, unit, slot, f"exit states unit {unit} in slot {slot}, but the list leaves {left}")
    for slot, unit in enumerate(program.entry):
        if unit is not None and slot not in outside and program.exit[slot : slot + 1] != (unit,):
            found = program.exit[slot] if slot < len(program.exit) else None
            left = "nothing to rely on" if found is None else f"unit {found}"
            text = f"slot {slot} must hold unit {unit} at entry, but the program's own end leaves {left}"
            yield Violation(9, None, unit, slot, f"{text}; gather unit {unit} into slot {slot} at the tail")
    for slot, unit in outside.items():
        if slot >= len(program.entry) or program.entry[slot] != unit:
            text = f"unit {unit} is gathered into slot {slot} from outside, but entry does not state it"
            yield Violation(9, None, unit, slot, text)


def gathered_is_read(facts: Facts) -> Iterator[Violation]:
    """R12: what is gathered is read, in this step or as the entry of a next one."""
    program, history = facts.program, facts.history
    for stay in history.stays:
        is_last = history.last.get(stay.slot) is stay
        if stay.reads or (is_last and (stay.launch is None or (stay.slot, stay.unit) in facts.wanted)):
            continue
        what = "entry holds" if stay.launch is None else f"{op_text(program, stay.launch)} gathers"
        text = f"{what} unit {stay.unit} into slot {stay.slot}, but nothing reads it there"
        yield Violation(12, stay.launch, stay.unit, stay.slot, text)
