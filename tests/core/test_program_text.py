"""Program text: what is printed reads back, and what cannot be read says where."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import ProgramError
from graphshard.core.ops import AgLaunch, Gemm, RecordGate, RecordOutputs, WaitOnce
from graphshard.core.program import Program

numbers = st.integers(-3, 2**40)
streams = st.sampled_from(["compute", "copy", "prefetch"])
segment_names = st.text(max_size=6) | st.sampled_from(["q_proj", "q_proj..down_proj", "-", "a b", 'x"y', "end=1"])
launches = st.builds(AgLaunch, numbers, numbers, streams)
ops = st.one_of(
    launches,
    st.builds(WaitOnce, numbers, numbers, streams),
    st.builds(RecordGate, numbers, numbers, streams),
    st.builds(RecordOutputs, streams),
    st.builds(
        Gemm, numbers, numbers, st.none() | numbers, segment_names, st.lists(numbers, max_size=3).map(tuple), streams
    ),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    num_slots = draw(st.integers(0, 4))
    state = st.lists(st.none() | numbers, min_size=num_slots, max_size=num_slots).map(tuple)
    return Program(
        ops=tuple(draw(st.lists(ops, max_size=12))),
        num_slots=num_slots,
        num_units=draw(st.integers(0, 9)),
        num_segments=draw(st.integers(0, 9)),
        entry=draw(state),
        exit=draw(state),
        outside=tuple(draw(st.lists(launches, max_size=2))),
    )


@given(programs(), programs())
def test_text_reads_back_and_tells_programs_apart(first: Program, second: Program) -> None:
    assert Program.parse(first.text()) == first
    assert Program.parse(first.text()).digest == first.digest
    assert (first.digest == second.digest) == (first == second)


SMALL = """\
# a comment
program num_slots=1 num_units=1 num_segments=1

  ag_launch slot=0 stream=copy unit=0
  99 wait_once unit=0 slot=0 stream=compute
gemm layer=- segment=q units=0 stream=compute begin=0 end=1
"""


def test_a_text_written_by_hand_is_read() -> None:
    program = Program.parse(SMALL)
    assert program.ops == (AgLaunch(0, 0), WaitOnce(0, 0), Gemm(0, 1, None, "q", (0,)))
    assert program.entry == program.exit == (None,)


HEADER = "program num_slots=1 num_units=1 num_segments=1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"the text: there is no line that begins with `program`"),
        ("ag_launch unit=0 slot=0 stream=copy", r"line 1: expected `program"),
        ("program num_slots=1", r"line 1: expected each of num_slots, num_units, num_segments once"),
        ("program num_slots=x num_units=1 num_segments=1", r"line 1: num_slots is 'x', which is not a whole number"),
        ("program num_slots=-1 num_units=1 num_segments=1", r"line 1: sizes start at 0"),
        (HEADER + "entry 0=- 1=-", r"line 2: expected each of 0 once"),
        (HEADER + "entry 0=a", r"line 2: 0 is 'a'"),
        (HEADER + "ag_lunch unit=0 slot=0 stream=copy", r"line 2: expected an op \(ag_launch, .*found 'ag_lunch"),
        (HEADER + "ag_launch unit=0 stream=copy", r"line 2: expected each of unit, slot, stream once"),
        (HEADER + "ag_launch unit=0 unit=0 slot=0 stream=copy", r"once"),
        (HEADER + "ag_launch unit=0 slot=0 stream=copy now", r"line 2: expected name=value pairs"),
        (
            HEADER + "ag_launch unit=0 slot=0 stream=copy2",
            r"expected a stream \(compute, copy, prefetch\), not 'copy2'",
        ),
        (HEADER + "gemm layer=- segment=q units=0;1 stream=compute begin=0 end=1", r"units is '0;1'"),
        (HEADER + 'gemm layer=- segment="\\q" units=0 stream=compute begin=0 end=1', r"segment is not a word"),
        (
            HEADER.replace("\n", " num_ops=1\n"),
            r"the text: num_ops is 1, and there are 0 ops; correct it, or leave it out",
        ),
        (HEADER + "outside wait_once unit=0 slot=0 stream=compute", r"line 2: only ag_launch can be outside"),
    ],
)
def test_what_cannot_be_read_says_where(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Program.parse(text)


def test_prime_fills_the_entry_slots() -> None:
    program = Program((), 3, 5, 0, (None, 4, 2), (None, None, None))
    assert program.prime == (AgLaunch(4, 1, "prefetch"), AgLaunch(2, 2, "prefetch"))
