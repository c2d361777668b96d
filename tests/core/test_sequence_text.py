"""Sequence text: what is printed reads back, and what cannot be read says where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import ProgramError
from graphshard.core.ops import AgLaunch, WaitOnce
from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    Held,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    StepSequence,
)

numbers = st.integers(-3, 2**40)
streams = st.sampled_from(["compute", "copy", "prefetch"])
names = st.text(max_size=6) | st.sampled_from(["draft", "target", "-", "a b", 'x"y', "unit=1"])
launches = st.builds(PrefetchLaunch, names, numbers, numbers, streams)
states = st.lists(launches | st.builds(Held, names, numbers, numbers), max_size=3).map(tuple)
ops = st.one_of(
    launches,
    st.builds(PrefetchWait, names, numbers, numbers, streams),
    st.builds(PrefetchDiscard, names, streams),
    st.builds(Replay, names, streams),
    st.builds(Fold, names, names, st.lists(numbers, max_size=3).map(tuple), streams),
)
programs = st.builds(
    Program,
    st.lists(st.builds(AgLaunch, numbers, numbers, streams) | st.builds(WaitOnce, numbers, numbers), max_size=3).map(
        tuple
    ),
    st.just(1),
    st.integers(0, 9),
    st.integers(0, 9),
    st.tuples(st.none() | numbers),
    st.tuples(st.none() | numbers),
)
graphs = st.builds(SequenceGraph, names, programs, st.just("") | names)
sequences = st.builds(
    StepSequence, st.lists(graphs, max_size=2).map(tuple), st.lists(ops, max_size=6).map(tuple), states, states
)


@given(sequences, sequences)
def test_text_reads_back_and_tells_sequences_apart(first: StepSequence, second: StepSequence) -> None:
    assert StepSequence.parse(first.text()) == first
    assert StepSequence.parse(first.text()).digest == first.digest
    assert (first.digest == second.digest) == (first == second)


SMALL = """\
# a comment
sequence

graph name=draft
| program num_slots=1 num_units=1 num_segments=0
| entry 0=0
graph name=target space=draft
| program num_slots=0 num_units=0 num_segments=0
entry held unit=0 graph=draft slot=0
  replay graph=draft stream=compute
  99 fold graph=target segment=commit_fold units=- stream=compute
"""


def test_a_text_written_by_hand_is_read() -> None:
    sequence = StepSequence.parse(SMALL)
    assert sequence.ops == (Replay("draft"), Fold("target", "commit_fold"))
    assert sequence.entry == (Held("draft", 0, 0),)
    assert sequence.exit == ()
    assert [graph.slot_space for graph in sequence.graphs] == ["draft", "draft"]
    assert sequence.graph("draft").program.entry == (0,)


def test_a_graph_is_found_by_name_or_named() -> None:
    with pytest.raises(ProgramError, match=r"no graph 'draught'; known are draft, target"):
        StepSequence.parse(SMALL).graph("draught")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the text: there is no line that begins with `sequence`"),
        ("replay graph=draft stream=compute", r"line 1: expected `sequence` first"),
        ("sequence of=2", r"line 1: expected no fields"),
        ("sequence\ngraph space=draft", r"line 2: expected each of name once"),
        ("sequence\ngraph name=draft now", r"line 2: expected name=value pairs"),
        ('sequence\ngraph name="\\q"', r"line 2: \"\\q\" is not a word or a quoted text"),
        ("sequence\n| program num_slots=1 num_units=1 num_segments=1", r"line 2: a program's line follows its graph's"),
        ("sequence\ngraph name=draft\n| program", r"graph draft, whose program begins after line 2: .* line 1: exp"),
        ("sequence\nreply graph=draft stream=compute", r"line 2: expected an op \(prefetch_launch, .*found 'reply"),
        ("sequence\nreplay graph=draft", r"line 2: expected each of graph, stream once"),
        ("sequence\nreplay graph=draft stream=copy2", r"expected a stream \(compute, copy, prefetch\), not 'copy2'"),
        ("sequence\nprefetch_wait graph=d unit=x slot=0 stream=compute", r"unit is 'x', which is not a whole number"),
        ("sequence\nfold graph=d segment=f units=0;1 stream=compute", r"units is '0;1'"),
        ("sequence\nheld graph=d unit=0 slot=0", r"line 2: held is a state of entry or exit, not an op"),
        (
            "sequence num_ops=2\nreplay graph=d stream=compute",
            r"num_ops is 2, and there are 1 ops; correct it, or leave it out",
        ),
        ("sequence\nentry replay graph=d stream=compute", r"line 2: only prefetch_launch and held are states"),
    ],
)
def test_what_cannot_be_read_says_where(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        StepSequence.parse(text)
