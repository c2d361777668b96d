"""Sequences lowered: streams by graph, waits on the right events, units and slots numbered through."""

from __future__ import annotations

from collections import Counter

import pytest

from graphshard.core.errors import ProgramError
from graphshard.core.lowering import Compute, CopyRun, LoweredOp, Record, Wait, lower
from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    Held,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SequenceOp,
    SlotState,
    StepSequence,
)
from graphshard.core.sequence_lowering import HOST, LoweredSequence, lower_sequences

DRAFT = Program.parse("""
program num_slots=2 num_units=2 num_segments=2
entry 0=0 1=-
exit 0=- 1=1
ag_launch unit=1 slot=1 stream=copy
gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1
record_gate unit=0 slot=0 stream=compute
wait_once unit=1 slot=1 stream=compute
gemm layer=1 segment=proj units=1 stream=compute begin=1 end=2
record_gate unit=1 slot=1 stream=compute
""")
TARGET = Program.parse("""
program num_slots=1 num_units=1 num_segments=1
entry 0=-
exit 0=0
ag_launch unit=0 slot=0 stream=copy
wait_once unit=0 slot=0 stream=compute
gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1
record_gate unit=0 slot=0 stream=compute
""")
GRAPHS = (SequenceGraph("draft", DRAFT), SequenceGraph("target", TARGET))
LAUNCH = PrefetchLaunch("draft", 0, 0)
WAIT = PrefetchWait("draft", 0, 0)


def lowered(*ops: SequenceOp, entry: tuple[SlotState, ...] = (), num_copies: int = 2) -> LoweredSequence:
    return lower_sequences([StepSequence(GRAPHS, ops, entry)], num_copies)


def of_step(made: LoweredSequence, op: int) -> list[LoweredOp]:
    """The list's ops that come from op `op` of the sequence."""
    return [found for found in made.lowered.ops if made.source(found).op == op]


def test_a_graphs_list_is_there_as_it_is_on_streams_of_its_own() -> None:
    made = lowered(Replay("target"), num_copies=1)
    ops = of_step(made, 0)
    kinds = [(type(op), op.stream.removeprefix("target.")) for op in ops]
    assert kinds == [(type(op), op.stream) for op in lower(TARGET, 1).ops] + [(Record, "compute")]
    assert made.lowered.streams == ("compute", "target.copy")
    inner = [made.source(op).program_op for op in ops]
    assert inner == [op.op for op in lower(TARGET, 1).ops] + [-1]


def test_streams_of_two_graphs_are_not_the_same() -> None:
    made = lowered(LAUNCH, WAIT, Replay("draft"), Replay("target"), PrefetchLaunch("draft", 0, 0, "copy"))
    assert set(made.lowered.streams) == {"compute", "draft.prefetch", "draft.copy", "target.copy"}
    assert [op.stream for op in of_step(made, 4)] == ["target.copy"] * 3, "the target's stream, whoever gathers"


def test_units_and_slots_are_numbered_through() -> None:
    made = lowered(Replay("draft"), Replay("target"))
    assert (made.units, made.slots) == ({"draft": 0, "target": 2}, {"draft": 0, "target": 2})
    places = {(op.unit, op.slot) for op in made.lowered.ops if isinstance(op, CopyRun)}
    reads = {pair for op in made.lowered.ops if isinstance(op, Compute) for pair in op.reads}
    assert places == {(1, 1), (2, 2)}
    assert reads == {(0, 0), (1, 1), (2, 2)}


def test_graphs_of_one_space_share_its_slots() -> None:
    graphs = (SequenceGraph("draft", DRAFT, "both"), SequenceGraph("target", TARGET, "both"))
    made = lower_sequences([StepSequence(graphs, (Replay("draft"), Replay("target")))], 2)
    assert made.slots == {"both": 0}
    assert len(made.entry) == 2
    assert {op.slot for op in made.lowered.ops if isinstance(op, CopyRun)} == {0, 1}


def test_a_gather_waits_for_its_graphs_latest_replay_and_is_waited_for() -> None:
    made = lowered(Replay("draft"), Replay("target"), LAUNCH, Fold("target", "commit_fold"), WAIT)
    end = of_step(made, 0)[-1]
    assert isinstance(end, Record)
    wait, copy, record = of_step(made, 2)
    assert isinstance(wait, Wait) and wait.event == end.event, "the draft's end, not the target's"
    assert isinstance(copy, CopyRun) and (copy.unit, copy.slot, copy.begin, copy.end) == (0, 0, 0, 2)
    assert isinstance(record, Record)
    assert {op.stream for op in (wait, copy, record)} == {"draft.prefetch"}
    (fold,) = of_step(made, 3)
    assert isinstance(fold, Compute) and (fold.stream, fold.reads) == ("compute", ())
    (waited,) = of_step(made, 4)
    assert isinstance(waited, Wait) and (waited.event, waited.stream) == (record.event, "compute")


def test_a_wait_without_a_gather_is_no_call() -> None:
    assert of_step(lowered(WAIT), 0) == []


def test_what_is_in_flight_at_entry_is_issued_before_and_what_is_held_lies_there() -> None:
    made = lowered(WAIT, entry=(LAUNCH,))
    before = [op for op in made.lowered.ops if made.source(op).step == -1][:2]
    assert [type(op) for op in before] == [CopyRun, Record]
    (wait,) = of_step(made, 0)[-1:]
    assert isinstance(wait, Wait) and wait.event == before[1].event  # type: ignore[union-attr]
    assert made.entry == (None, None, None)
    assert lowered(entry=(Held("draft", 0, 0),)).entry == (0, None, None)


def test_a_discard_waits_on_the_host_and_leaves_nothing() -> None:
    made = lowered(Replay("draft"), LAUNCH, PrefetchDiscard("draft"), LAUNCH)
    ops = of_step(made, 2)
    arrived = of_step(made, 1)[-1]
    assert isinstance(arrived, Record)
    assert arrived.event in [op.event for op in ops if isinstance(op, Wait) and op.stream == HOST]
    written = {op.slot: op.unit for op in ops if isinstance(op, CopyRun)}
    assert written == {0: made.nothing, 1: made.nothing}
    (stopped,) = [op.event for op in ops if isinstance(op, Record)]
    assert stopped in [op.event for op in of_step(made, 3) if isinstance(op, Wait)], "the host issues it later"


def test_sequences_follow_each_other_in_one_list_and_events_are_recorded_once() -> None:
    step = StepSequence(GRAPHS, (WAIT, Replay("draft"), Replay("target"), LAUNCH), (LAUNCH,), (LAUNCH,))
    made = lower_sequences([step, step], 2)
    events = Counter(op.event for op in made.lowered.ops if isinstance(op, Record))
    assert set(events.values()) == {1}
    assert set(events) == set(range(made.lowered.num_events))
    recorded: set[int] = set()
    for op in made.lowered.ops:
        if isinstance(op, Record):
            recorded.add(op.event)
        elif isinstance(op, Wait):
            assert op.event in recorded
    assert {made.source(op).step for op in made.lowered.ops} == {-1, 0, 1}


def test_other_lists_may_be_given_and_copies_by_graph() -> None:
    lists = {"draft": lower(DRAFT, 3, num_copy_streams=2)}
    sequence = StepSequence(GRAPHS, (LAUNCH, WAIT, Replay("draft"), Replay("target")))
    made = lower_sequences([sequence], {"draft": 3, "target": 1}, lists)
    assert "draft.copy1" in made.lowered.streams
    assert [op.end for op in made.lowered.ops if isinstance(op, CopyRun)] == [3, 1, 3, 1]


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ProgramError, match=r"no graph 'other'; known are draft, target"):
        lowered(Replay("other"))
    with pytest.raises(ProgramError, match="different graphs"):
        lower_sequences([StepSequence(GRAPHS, ()), StepSequence(GRAPHS[:1], ())], 2)
