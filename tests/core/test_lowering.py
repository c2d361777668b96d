"""Lowering: any op list becomes calls that a capture accepts, and right lists become ordered ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.core.lowering import NO_SLOT, Compute, CopyRun, Lowered, Record, Wait, lower, lower_gathers
from graphshard.core.ops import AgLaunch, Gemm, Op, RecordGate, RecordOutputs, WaitOnce
from graphshard.core.program import Program


def program_of(ops: list[Op], num_slots: int = 2, entry: tuple[int | None, ...] | None = None) -> Program:
    anything: tuple[int | None, ...] = (None,) * num_slots
    return Program(tuple(ops), num_slots, 8, 8, entry or anything, anything)


def random_ops(seed: int) -> list[Op]:
    """Ops in no order that makes sense: mutants look like this."""
    generator = random.Random(seed)
    found: list[Op] = []
    for _ in range(generator.randrange(12)):
        unit, slot = generator.randrange(3), generator.randrange(2)
        gather_stream = generator.choice(["copy", "prefetch", "compute"])
        found.append(
            generator.choice(
                [
                    AgLaunch(unit, slot, gather_stream),
                    WaitOnce(unit, slot, generator.choice(["compute", "copy"])),
                    Gemm(0, 1, None, "s", (unit,)),
                    RecordGate(unit, slot),
                    RecordOutputs(),
                ]
            )
        )
    return found


def ancestors(lowered: Lowered) -> list[set[int]]:
    """For each call, the calls that are done before it begins: found by graph search, not by clocks."""
    last: dict[str, int] = {}
    recorded: dict[int, int] = {}
    found: list[set[int]] = []
    for index, op in enumerate(lowered.ops):
        before: set[int] = set()
        parents = [last[op.stream]] if op.stream in last else []
        if isinstance(op, Wait):
            parents.append(recorded[op.event])
        for parent in parents:
            before |= found[parent] | {parent}
        if isinstance(op, Record):
            assert op.event not in recorded, "an event is recorded once"
            recorded[op.event] = index
        found.append(before)
        last[op.stream] = index
    assert len(recorded) == lowered.num_events
    return found


@given(
    seed=st.integers(0, 2**32),
    num_copies=st.integers(1, 5),
    num_copy_streams=st.integers(1, 3),
    own_branch=st.booleans(),
)
def test_any_list_is_forked_joined_and_complete(
    seed: int, num_copies: int, num_copy_streams: int, own_branch: bool
) -> None:
    ops = random_ops(seed)
    lowered = lower(program_of(ops, entry=(0, None)), num_copies, num_copy_streams, own_branch)
    before = ancestors(lowered)
    assert lowered.streams[0] == "compute" and len(set(lowered.streams)) == len(lowered.streams)
    assert {op.stream for op in lowered.ops} == set(lowered.streams)
    last_compute = max(i for i, op in enumerate(lowered.ops) if op.stream == "compute")
    for index, op in enumerate(lowered.ops):
        assert index == last_compute or index in before[last_compute], "every call is joined into compute"
        assert op.stream == "compute" or 0 in before[index], "every call is after the fork"
        assert -1 <= op.op < len(ops)
    for number, op in enumerate(ops):
        calls = [call for call in lowered.ops if call.op == number]
        if isinstance(op, AgLaunch):
            runs = [call for call in calls if isinstance(call, CopyRun)]
            assert [i for run in runs for i in range(run.begin, run.end)] == list(range(num_copies))
            assert all((run.unit, run.slot) == (op.unit, op.slot) and run.begin < run.end for run in runs)
        if isinstance(op, Gemm):
            assert [type(call) for call in calls] == [Compute]
    assert lower(program_of(ops, entry=(0, None)), num_copies, num_copy_streams, own_branch).digest == lowered.digest


def test_a_gather_is_after_its_gate_and_before_its_reader_on_every_branch() -> None:
    ops: list[Op] = [
        AgLaunch(0, 0),
        WaitOnce(0, 0),
        Gemm(0, 1, None, "a", (0,)),
        RecordGate(0, 0),
        AgLaunch(1, 0),
        WaitOnce(1, 0),
        Gemm(1, 2, None, "b", (1,)),
    ]
    for num_copy_streams, own_branch in ((1, False), (1, True), (3, False), (3, True)):
        lowered = lower(program_of(ops), 4, num_copy_streams, own_branch)
        before = ancestors(lowered)
        at = {number: [i for i, c in enumerate(lowered.ops) if c.op == number] for number in range(len(ops))}
        first_gemm, second_gemm = at[2][0], at[6][0]
        for index in at[4]:
            if isinstance(lowered.ops[index], CopyRun):
                assert first_gemm in before[index]
                assert index in before[second_gemm]
        waits = [(lowered.ops[i].stream) for i in at[4] if isinstance(lowered.ops[i], Wait)]
        assert waits.count("copy") == len(lowered.streams) - 1  # the gate, and a join for each branch


def test_the_list_of_two_units_over_two_streams() -> None:
    ops: list[Op] = [AgLaunch(3, 1), WaitOnce(3, 1), Gemm(0, 2, 0, "q..k", (3,)), RecordGate(3, 1), RecordOutputs()]
    lowered = lower(program_of(ops), 3, 2, True)
    assert lowered.ops == (
        Record(0, "compute", -1),
        Wait(0, "copy", -1),
        Wait(0, "copy1", -1),
        Wait(0, "copy_own", -1),
        Record(1, "copy", 0),
        Wait(1, "copy1", 0),
        Wait(1, "copy_own", 0),
        CopyRun(3, 1, 0, 1, "copy", 0),
        CopyRun(3, 1, 1, 2, "copy1", 0),
        CopyRun(3, 1, 2, 3, "copy_own", 0),
        Record(2, "copy1", 0),
        Wait(2, "copy", 0),
        Record(3, "copy_own", 0),
        Wait(3, "copy", 0),
        Record(4, "copy", 0),
        Wait(4, "compute", 1),
        Compute(0, 2, ((3, 1),), "compute", 2),
        Record(5, "compute", 3),
        Record(6, "compute", 4),
    )
    assert lowered.outputs_event == 6 and lowered.num_events == 7


def test_outputs_are_ready_before_the_tail_joins() -> None:
    ops: list[Op] = [Gemm(0, 1, None, "a", (0,)), RecordGate(0, 0), AgLaunch(0, 0), RecordOutputs()]
    lowered = lower(program_of(ops, num_slots=1, entry=(0,)), 2)
    before = ancestors(lowered)
    outputs = next(
        i for i, op in enumerate(lowered.ops) if isinstance(op, Record) and op.event == lowered.outputs_event
    )
    copy = next(i for i, op in enumerate(lowered.ops) if isinstance(op, CopyRun))
    assert copy not in before[outputs] and copy in before[len(lowered.ops) - 1]


def test_without_record_outputs_the_last_compute_is_waited_for_not_the_gathers() -> None:
    lowered = lower(program_of([AgLaunch(0, 0), Gemm(0, 1, None, "a", ())]), 2)
    before = ancestors(lowered)
    outputs = next(
        i for i, op in enumerate(lowered.ops) if isinstance(op, Record) and op.event == lowered.outputs_event
    )
    kinds = {type(lowered.ops[i]) for i in before[outputs]}
    assert Compute in kinds and CopyRun not in kinds


def read_slots(ops: list[Op], entry: tuple[int | None, ...] = (None, None, None)) -> list[int]:
    lowered = lower(program_of(ops, num_slots=3, entry=entry), 1)
    return [slot for op in lowered.ops if isinstance(op, Compute) for _, slot in op.reads]


def test_a_read_looks_where_the_unit_was_waited_for() -> None:
    gemm = Gemm(0, 1, None, "a", (0,))
    assert read_slots([AgLaunch(0, 1), WaitOnce(0, 1), gemm]) == [1]
    assert read_slots([gemm], entry=(None, None, 0)) == [2]
    # the next stay of the same unit is already on its way into another slot
    assert read_slots(
        [AgLaunch(0, 1), WaitOnce(0, 1), AgLaunch(0, 2), gemm, RecordGate(0, 1), WaitOnce(0, 2), gemm]
    ) == [
        1,
        2,
    ]
    assert read_slots([AgLaunch(0, 1), gemm]) == [1]  # the wait is missing: a race, to be reported
    assert read_slots([gemm]) == [NO_SLOT]


def test_a_wait_for_nothing_is_no_call() -> None:
    lowered = lower(program_of([WaitOnce(5, 0)]), 2)
    assert [op for op in lowered.ops if op.op == 0] == []


def test_gathers_of_the_host_are_a_list_of_their_own() -> None:
    lowered = lower_gathers((AgLaunch(2, 0, "prefetch"), AgLaunch(4, 1, "prefetch")), 3)
    assert lowered.streams == ("prefetch",)
    assert [op for op in lowered.ops if isinstance(op, CopyRun)] == [
        CopyRun(2, 0, 0, 3, "prefetch", 0),
        CopyRun(4, 1, 0, 3, "prefetch", 1),
    ]
    assert lowered.ops[-1] == Record(lowered.outputs_event, "prefetch", -1)
    assert lower_gathers((), 3).ops == (Record(0, "prefetch", -1),)


def test_no_copies_are_refused() -> None:
    with pytest.raises(SpecError, match="0 copies over 1 streams: both start at 1"):
        lower(program_of([]), 0)
    with pytest.raises(SpecError, match="2 copies over 0 streams"):
        lower(program_of([]), 2, 0)
