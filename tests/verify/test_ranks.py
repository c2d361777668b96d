"""R10: the first collective in which ranks differ, on which ranks, in whose words."""

from __future__ import annotations

from dataclasses import replace

from verify_cases import INSIDE, program_of

from graphshard.core.ops import AgLaunch
from graphshard.core.program import Program
from graphshard.verify import collectives_of, compare_ranks, first_difference


def test_equal_programs_have_no_difference() -> None:
    program = Program.parse(INSIDE)
    assert [collective.op for collective in collectives_of(program)] == [0, 1, 5]
    assert first_difference({rank: collectives_of(program) for rank in range(4)}) is None
    assert first_difference({}) is None
    assert compare_ranks([program]).is_good


def test_what_is_no_collective_may_differ() -> None:
    program = Program.parse(INSIDE)
    other = replace(program, ops=(*program.ops, program.ops[-1]))
    assert compare_ranks([program, other]).is_good


def test_a_list_that_ends_early() -> None:
    program = Program.parse(INSIDE)
    shorter = replace(program, ops=program.ops[:5] + program.ops[6:])
    report = compare_ranks({4: program, 5: shorter})
    (violation,) = report.violations
    assert violation.rule == 10 and violation.op == 5
    assert "op 5 ag_launch unit=2 slot=0 stream=copy on rank 4; nothing on rank 5" in violation.text


def test_each_side_has_its_own_op_index() -> None:
    program = Program.parse(INSIDE)
    ops = list(program.ops)
    ops[5], ops[6] = ops[6], AgLaunch(2, 1)
    report = compare_ranks([program, replace(program, ops=tuple(ops)), program])
    text = report.violations[0].text
    assert text.startswith(
        "collective 2: op 5 ag_launch unit=2 slot=0 stream=copy on ranks 0 2; op 6 ag_launch unit=2 slot=1"
    )


def test_three_sides() -> None:
    program = Program.parse(INSIDE)
    programs = [replace(program, ops=(AgLaunch(unit, 0), *program.ops[1:])) for unit in (0, 0, 1, 2)]
    difference = first_difference({rank: collectives_of(program) for rank, program in enumerate(programs)})
    assert difference is not None and difference.number == 0
    assert [ranks for ranks, _ in difference.sides] == [(0, 1), (2,), (3,)]


def test_gathers_from_outside_count() -> None:
    outside = program_of([(0,), (1,), (2,)], head="outside", prefetch_depth=1)
    inside = program_of([(0,), (1,), (2,)], head="inside", prefetch_depth=1)
    report = compare_ranks([outside, inside])
    assert "outside ag_launch unit=0 slot=0 stream=prefetch on rank 0" in report.text()
