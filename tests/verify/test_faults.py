"""Faults that others met, as op lists: each is rejected by the rule that names it, and its right form is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mutate import program_mutants
from verify_cases import INSIDE, TAIL, good_programs, harm, program_of

from graphshard.core.lowering import CopyRun, Lowered, Record, Wait, lower
from graphshard.core.ops import AgLaunch, Gemm, RecordGate, WaitOnce
from graphshard.core.program import Program
from graphshard.core.specs import StepShape
from graphshard.verify import verify


def without(program: Program, *indices: int) -> Program:
    return replace(program, ops=tuple(op for index, op in enumerate(program.ops) if index not in indices))


def test_c2_an_outside_gather_is_not_waited_for_inside() -> None:
    program = program_of([(0,), (1,), (2,)], head="outside", prefetch_depth=1)
    assert verify(program).is_good
    inside = replace(program, ops=(WaitOnce(0, program.entry.index(0)), *program.ops))
    report = verify(inside)
    assert report.rules == {9}
    assert "an event may not cross a capture's border" in report.text()


def test_c4_c5_events_that_cross_a_border() -> None:
    # the same program twice, but the second list waits for an event of the first instead of recording its own
    program = Program.parse(INSIDE)
    lowered = lower(program, 2)
    for index, op in enumerate(lowered.ops):
        waits = any(isinstance(other, Wait) and other.event == getattr(op, "event", None) for other in lowered.ops)
        if isinstance(op, Record) and waits:
            late = replace(lowered, ops=lowered.ops[:index] + lowered.ops[index + 1 :] + (op,))
            for listed in (late, replace(lowered, ops=late.ops[:-1])):
                report = verify(program, lowered={program: listed})
                assert 9 in report.rules, report.text()
                assert "has not recorded before; an event may not cross a capture's border" in report.text()
                assert harm(program, listed) is not None


def test_c6_a_tail_that_is_not_joined() -> None:
    for name, program in good_programs(max_units=4):
        lowered = lower(program, 2)
        if not isinstance(lowered.ops[-1], Wait):
            assert "tail" not in name or program.entry == (None,) * program.num_slots or "chain 1" in name, name
            continue
        unjoined = replace(lowered, ops=lowered.ops[:-1])
        report = verify(program, lowered={program: unjoined})
        assert 8 in report.rules, f"{name}: {report.text()}"
        assert "stream copy is not joined into compute" in report.text()


def test_c6_a_launch_as_the_last_op_is_joined_by_lowering() -> None:
    program = Program.parse(TAIL)
    last = replace(program, ops=(*program.ops[:7], *program.ops[8:11], program.ops[7], program.ops[11]))
    assert isinstance(last.ops[-2], AgLaunch)
    assert verify(last).is_good
    assert harm(last) is None


def test_d2_neighbours_may_not_share_one_slot() -> None:
    program = program_of([(0,), (1,)], prefetch_depth=1)
    shared = tuple(
        replace(op, slot=0) if not isinstance(op, Gemm) and hasattr(op, "slot") else op for op in program.ops
    )
    report = verify(replace(program, ops=shared, exit=(1, None)))
    assert 6 in report.rules
    assert harm(replace(program, ops=shared, exit=(1, None))) is not None


@pytest.mark.parametrize("head", ["inside", "tail", "outside"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_d6_every_moved_or_dropped_gate_is_detected(head: str, depth: int) -> None:
    program = program_of([(0,), (1,), (0,), (2,), (3,)], head=head, prefetch_depth=depth)
    number = 0
    for mutant in program_mutants(program):
        if mutant.kind in ("drop gate", "gate earlier") and mutant.by_definition:
            assert 5 in verify(mutant.program).rules, mutant.program.text()
            number += 1
    gates = sum(isinstance(op, RecordGate) for op in program.ops)
    assert number >= 2 * gates, "each gate dropped, and moved before its gemm"


def test_d7_both_directions_of_a_slots_reuse() -> None:
    program = Program.parse(INSIDE)
    # gather after gemm: without the gate's wait the gather overwrites what is read
    lowered = lower(program, 2)
    gate = next(op for op in lowered.ops if isinstance(op, Record) and op.op == 4)
    ungated = Lowered(
        tuple(op for op in lowered.ops if not (isinstance(op, Wait) and op.event == gate.event)),
        lowered.streams,
        lowered.num_events,
        lowered.outputs_event,
    )
    assert verify(program, lowered={program: ungated}).rules == {6}
    assert harm(program, ungated) is not None
    # gemm after gather: without the wait_once it reads before the bytes are there
    unwaited = without(program, 9)
    assert verify(unwaited).rules == {3}
    assert harm(unwaited) is not None


def test_d7_across_two_replays() -> None:
    # the second step's first gather runs before the first step's last reader, once nothing forks it from compute
    program = Program.parse(INSIDE)
    lowered = lower(program, 2)
    unforked = replace(lowered, ops=tuple(op for op in lowered.ops if not (isinstance(op, Wait) and op.op < 0)))
    report = verify(program, lowered={program: unforked})
    assert report.rules == {6, 8}
    assert "op 0 ag_launch unit=0 slot=0 overwrites unit 2, still read by op 10 of the step before" in report.text()
    assert harm(program, unforked) is not None


def test_d7_across_two_programs() -> None:
    # each list alone is only not joined; after one another the first one's gather meets the second one's reader
    tail, head = Program.parse(TAIL), program_of([(0,), (1,), (2,)], head="tail", prefetch_depth=2)
    assert verify({StepShape(1): tail, StepShape(2): head}).is_good
    lowered = lower(tail, 2)
    unjoined = {tail: replace(lowered, ops=lowered.ops[:-1]), head: lower(head, 2)}
    report = verify({StepShape(1): tail, StepShape(2): head}, lowered=unjoined)
    assert 8 in report.rules
    assert any(v.wrong_bytes and "(step shape 2x1 after 1x1)" in v.where for v in report.violations), report.text()


def test_copies_of_a_gather_on_several_streams_are_all_waited_for() -> None:
    program = Program.parse(INSIDE)
    lowered = lower(program, 3, 2, True)
    assert {op.stream for op in lowered.ops if isinstance(op, CopyRun)} == {"copy", "copy1", "copy_own"}
    assert verify(program, num_copies=3, num_copy_streams=2, own_branch=True).is_good
    joins = [i for i, op in enumerate(lowered.ops) if isinstance(op, Wait) and op.op == 5 and op.stream == "copy"][1:]
    assert len(joins) == 2
    for index in joins:
        listed = replace(lowered, ops=lowered.ops[:index] + lowered.ops[index + 1 :])
        report = verify(program, num_copies=3, lowered={program: listed})
        assert 3 in report.rules, report.text()
        assert harm(program, listed, 3) is not None
