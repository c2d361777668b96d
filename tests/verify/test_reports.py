"""Golden texts: what an error of the verifier says, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from verify_cases import INSIDE, TAIL, model_of, plan_of, program_of

from graphshard.core.errors import ProgramError
from graphshard.core.layout import build_layout
from graphshard.core.lowering import Wait, lower
from graphshard.core.ops import WaitOnce
from graphshard.core.program import Program
from graphshard.core.specs import StepShape
from graphshard.verify import RULE_NAMES, RULES, compare_ranks, verify


def changed(text: str, *edits: tuple[str, str]) -> Program:
    """The program of `text` with lines replaced."""
    for line, other in edits:
        assert line in text, line
        text = text.replace(line, other)
    return Program.parse(text)


def error_of(program: Program) -> list[str]:
    """The lines of the ProgramError that `verify` raises."""
    with pytest.raises(ProgramError) as raised:
        verify(program).raise_if_bad()
    return str(raised.value).splitlines()


def test_no_violation() -> None:
    report = verify(Program.parse(INSIDE))
    assert report.text() == "no violations in a program of 12 ops"
    report.raise_if_bad()
    assert verify(Program.parse(TAIL)).is_good


def test_a_missing_wait_and_a_launch_before_the_gate() -> None:
    program = changed(
        INSIDE,
        ("   4  record_gate unit=0 slot=0 stream=compute\n   5  ag_launch unit=2 slot=0 stream=copy\n",
         "   4  ag_launch unit=2 slot=0 stream=copy\n   5  record_gate unit=0 slot=0 stream=compute\n"),
        ("   6  wait_once unit=1 slot=1 stream=compute\n", ""),
    )  # fmt: skip
    assert error_of(program) == [
        "4 violations in a program of 11 ops",
        "  R3 wait-before-read   op 6 gemm layer=1 segment=proj reads unit 1 in slot 1, but no wait_once for it is "
        "ordered before (gathered by op 1 on stream copy)",
        "  R5 gate-after-read    op 3 gemm layer=0 segment=proj is the last reader of unit 0 in slot 0, but no "
        "record_gate follows it",
        "  R5 gate-after-read    op 5 record_gate unit=0 slot=0, but slot 0 holds unit 2 there",
        "  R6 gate-before-write  op 4 ag_launch unit=2 slot=0 overwrites unit 0, still read by op 3; slot 0's gate is "
        "op 5. Use num_slots >= 3 or launch later",
    ]


def test_a_gate_before_its_gemm() -> None:
    program = changed(
        INSIDE,
        ("   3  gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1\n", ""),
        ("   5  ag_launch", "   4  gemm layer=0 segment=proj units=0 stream=compute begin=0 end=1\n   5  ag_launch"),
    )
    assert error_of(program) == [
        "1 violation in a program of 12 ops",
        "  R5 gate-after-read  op 3 record_gate unit=0 slot=0 is not after op 4, which reads unit 0 in slot 0; record "
        "it after the slot's last reader",
    ]


def test_indices_that_do_not_exist() -> None:
    program = changed(
        INSIDE, ("ag_launch unit=2 slot=0", "ag_launch unit=2 slot=7"), ("begin=2 end=3", "begin=2 end=4")
    )
    lines = error_of(program)
    assert (
        "  R1 indices-exist     op 5 ag_launch unit=2 slot=7: there is no slot 7; units are 0 to 2, slots 0 to 1"
        in lines
    )
    assert (
        "  R1 indices-exist     op 10 gemm layer=2 segment=proj runs segments 2 to 4, but segment 2 of 3 is next"
        in lines
    )


def test_a_slot_far_below_zero_is_none() -> None:
    ops = tuple(replace(op, slot=-256) if isinstance(op, WaitOnce) else op for op in Program.parse(INSIDE).ops)
    lines = error_of(replace(Program.parse(INSIDE), ops=ops))
    assert any(line.startswith("  R1") and "there is no slot -256; units are 0 to 2" in line for line in lines)


def test_a_unit_that_is_nowhere() -> None:
    program = changed(INSIDE, ("   5  ag_launch unit=2 slot=0 stream=copy\n", ""), ("exit   0=2", "exit   0=0"))
    assert error_of(program) == [
        "3 violations in a program of 11 ops",
        "  R2 held-before-use  op 8 wait_once unit=2 slot=0: no gather of unit 2 into slot 0 is issued before it",
        "  R2 held-before-use  op 9 gemm layer=2 segment=proj reads unit 2 in slot 0, which holds unit 0 (gathered by "
        "op 0 on stream copy); gather unit 2 before",
        "  R5 gate-after-read  op 10 record_gate unit=2 slot=0, but slot 0 holds unit 0 there",
    ]


def test_two_waits() -> None:
    line = "   6  wait_once unit=1 slot=1 stream=compute\n"
    assert error_of(changed(INSIDE, (line, line + line))) == [
        "1 violation in a program of 13 ops",
        "  R4 one-wait  op 7 wait_once unit=1 slot=1 waits on compute again; op 6 has waited. Drop it",
    ]


def test_a_tail_that_does_not_bring_what_the_head_needs() -> None:
    program = changed(
        TAIL, ("   7  ag_launch unit=0 slot=0", "   7  ag_launch unit=0 slot=1"), ("exit   0=0 1=1", "exit   0=- 1=0")
    )
    assert error_of(program) == [
        "2 violations in a program of 12 ops",
        "  R9  exit-meets-entry  slot 0 must hold unit 0 at entry, but the program's own end leaves nothing to rely "
        "on; gather unit 0 into slot 0 at the tail",
        "  R12 gathered-is-read  op 7 ag_launch unit=0 slot=1 gathers unit 0 into slot 1, but nothing reads it there",
    ]


def test_an_unjoined_stream() -> None:
    program = Program.parse(TAIL)
    lowered = lower(program, 2)
    assert isinstance(lowered.ops[-1], Wait)
    report = verify(program, lowered={program: replace(lowered, ops=lowered.ops[:-1])})
    assert report.text().splitlines() == [
        "2 violations in a program of 12 ops",
        "  R3 wait-before-read  op 1 gemm layer=0 segment=proj reads unit 0 in slot 0, but no wait_once for it is "
        "ordered before (gathered by op 7 on stream copy)",
        "  R8 forks-joined      the list's own fork or join: stream copy is not joined into compute after it",
    ]


def test_a_unit_larger_than_its_slot() -> None:
    reads, sizes = [(0,), (1,), (2,)], [4096, 4096, 8192]
    layout = build_layout(model_of(reads, sizes), plan_of(reads, sizes, prefetch_depth=1))
    report = verify(
        program_of(reads, prefetch_depth=1),
        replace(layout, slots=(replace(layout.slots[0], num_bytes=4096), *layout.slots[1:])),
    )
    assert report.text().splitlines() == [
        "1 violation in a program of 12 ops",
        "  R7 unit-fits-slot  op 5 ag_launch unit=2 slot=0: unit 2 has 8192 B, slot 0 has 4096 B; give slot 0 8192 B "
        "or use another slot",
    ]


def test_ranks_that_differ() -> None:
    program = Program.parse(INSIDE)
    other = changed(INSIDE, ("ag_launch unit=2 slot=0", "ag_launch unit=2 slot=1"))
    assert compare_ranks([program, program, other, program]).text().splitlines() == [
        "1 violation in a program of 12 ops",
        "  R10 same-sequence  collective 2: op 5 ag_launch unit=2 slot=0 stream=copy on ranks 0 1 3; op 5 ag_launch "
        "unit=2 slot=1 stream=copy on rank 2. All ranks must compile the same model, plan and step shapes",
    ]


def test_step_shapes_are_named_where_their_programs_differ() -> None:
    good, bad = Program.parse(INSIDE), changed(INSIDE, ("   9  wait_once unit=2 slot=0 stream=compute\n", ""))
    shapes = [StepShape(size) for size in (1, 2, 4)]
    report = verify(dict(zip(shapes, (good, bad, good), strict=True)))
    assert report.num_programs == 2
    assert report.text().splitlines() == [
        "1 violation in 2 programs of up to 12 ops",
        "  R3 wait-before-read  op 9 gemm layer=2 segment=proj reads unit 2 in slot 0, but no wait_once for it is "
        "ordered before (gathered by op 5 on stream copy) (step shape 2x1)",
    ]


def test_programs_in_turn_are_judged_as_pairs() -> None:
    # alone, the exit state of `liar` harms nobody; `reader` believes it and is not primed
    liar = changed(INSIDE, ("exit   0=2 1=1", "exit   0=0 1=1"))
    reader = Program.parse(TAIL)
    liar = replace(liar, num_slots=3, entry=(*liar.entry, None), exit=(*liar.exit, None))
    report = verify({StepShape(1): liar, StepShape(2): reader})
    assert report.text().splitlines() == [
        "2 violations in 2 programs of up to 12 ops",
        "  R9 exit-meets-entry  exit states unit 0 in slot 0, but the list leaves unit 2 (step shape 1x1)",
        "  R9 exit-meets-entry  op 1 gemm layer=0 segment=proj reads unit 0 in slot 0, held at entry, but the step "
        "before leaves unit 2 (gathered by op 5 on stream copy) there (step shape 2x1 after 1x1)",
    ]


def test_every_rule_has_a_name_and_a_function() -> None:
    assert {rule.number for rule in RULES} | {10} == set(RULE_NAMES) == set(range(1, 15))
