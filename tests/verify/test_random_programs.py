"""The verifier's verdict on random programs is the exact interpreter's: wrong bytes or deadlock, or neither."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from mutate import list_mutants, program_mutants
from verify_cases import program_of, random_reads, wrong_step

from graphshard.core.lowering import Lowered, lower
from graphshard.core.ops import AgLaunch, Gemm, Op, RecordGate, StreamName, WaitOnce
from graphshard.core.program import Program
from graphshard.verify import verify

NUM_PROGRAMS = 10_000
NUM_PROGRAMS_SLOW = 100_000


def scheduled(rng: random.Random) -> Program:
    """A good program."""
    reads = random_reads(rng)
    depth, head = rng.randint(0, 2), rng.choice(("inside", "tail", "outside"))
    program = program_of(reads, head=head, prefetch_depth=depth)
    if rng.random() < 0.3:
        program = program_of(reads, head=head, prefetch_depth=depth, num_slots=program.num_slots + 1)
    return program


def soup(rng: random.Random) -> Program:
    """Ops at random over few units and slots: mostly wrong, in ways that no single mutation is."""
    num_units, num_slots = rng.randint(1, 2), rng.randint(1, 2)
    streams: list[StreamName] = ["compute", "copy", "prefetch"]
    ops: list[Op] = []
    for _ in range(rng.randint(2, 9)):
        unit, slot = rng.randrange(num_units), rng.randrange(num_slots)
        odd = rng.choice(streams) if rng.random() < 0.2 else None
        kind = rng.randrange(4)
        if kind == 0:
            ops.append(AgLaunch(unit, slot, odd or "copy"))
        elif kind == 1:
            ops.append(WaitOnce(unit, slot, odd or "compute"))
        elif kind == 2:
            ops.append(RecordGate(unit, slot, odd or "compute"))
        else:
            begin = sum(isinstance(op, Gemm) for op in ops)
            ops.append(Gemm(begin, begin + 1, None, "proj", (unit,), odd or "compute"))
    entry = tuple(rng.choice((None, *range(num_units))) for _ in range(num_slots))
    held = list(entry)
    for op in ops:
        if isinstance(op, AgLaunch):
            held[op.slot] = op.unit
    num_segments = sum(isinstance(op, Gemm) for op in ops)
    return Program(tuple(ops), num_slots, num_units, num_segments, entry, tuple(held))


def tidy(rng: random.Random) -> Program:
    """Gather, wait, read, gate for random units and slots, then neighbours exchanged a few times."""
    num_units, num_slots = rng.randint(1, 3), rng.randint(1, 3)
    ops: list[Op] = []
    held: list[int | None] = [None] * num_slots
    num = rng.randint(1, 4)
    for segment in range(num):
        unit, slot = rng.randrange(num_units), rng.randrange(num_slots)
        gemm = Gemm(segment, segment + 1, None, "proj", (unit,))
        ops += [AgLaunch(unit, slot), WaitOnce(unit, slot), gemm, RecordGate(unit, slot)]
    for _ in range(rng.randint(0, 6)):
        at = rng.randrange(len(ops) - 1)
        if not (isinstance(ops[at], Gemm) and isinstance(ops[at + 1], Gemm)):
            ops[at], ops[at + 1] = ops[at + 1], ops[at]
    for op in ops:
        if isinstance(op, AgLaunch):
            held[op.slot] = op.unit
    return Program(tuple(ops), num_slots, num_units, num, (None,) * num_slots, tuple(held))


def random_case(rng: random.Random) -> tuple[list[Program], dict[Program, Lowered], int]:
    """One or two programs, their lists, and the copies of a gather."""
    num_copies, num_streams, own = rng.choice(((1, 1, False), (2, 1, False), (2, 2, False), (2, 1, True)))
    source = rng.choice((scheduled, scheduled, soup, tidy))
    program = source(rng)
    programs = [program]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        mutants = list(program_mutants(programs[0], any_place(rng, programs[0].ops)))
        if mutants:
            programs = [rng.choice(mutants).program]
    if rng.random() < 0.15:
        other = rng.choice((scheduled, soup))(rng)
        sizes = {"num_slots": max(program.num_slots, other.num_slots), "num_units": 3}
        programs = [widened(one, **sizes) for one in (*programs, other)]
    lists = {one: lower(one, num_copies, num_streams, own) for one in programs}
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        chosen = rng.choice(programs)
        mutants = list(list_mutants(chosen, lists[chosen], any_place(rng, lists[chosen].ops)))
        if mutants:
            lists[chosen] = rng.choice(mutants).lowered or lists[chosen]
    return programs, lists, num_copies


def any_place(rng: random.Random, ops: Sequence[object]) -> list[int]:
    """One index into `ops`, or none."""
    return rng.sample(range(len(ops)), min(1, len(ops)))


def widened(program: Program, num_slots: int, num_units: int) -> Program:
    """The same program with more slots and units than it uses."""
    more = (None,) * (num_slots - program.num_slots)
    return replace(
        program, num_slots=num_slots, num_units=num_units, entry=program.entry + more, exit=program.exit + more
    )


def agree(seed: int, counts: Counter[str]) -> None:
    programs, lists, num_copies = random_case(random.Random(seed))
    report = verify(programs, num_copies=num_copies, lowered=lists)
    steps = [
        wrong_step(first, lists[first], second, lists[second], num_copies) for first in programs for second in programs
    ]
    harm = next((step for step in steps if step), None)
    shown = any(violation.wrong_bytes for violation in report.violations)
    if shown != (harm is not None):
        text = "\n".join([f"seed {seed}", *(p.text() for p in programs), *(lists[p].text() for p in programs)])
        pytest.fail(f"{text}\nverifier: {report.text()}\ninterpreter: {harm}")
    counts["accepted" if report.is_good else "rejected: wrong bytes" if shown else "rejected: rule alone"] += 1
    counts["pairs"] += len(programs) > 1


def run(first_seed: int, number: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + number):
        agree(seed, counts)
    return counts


def test_verdict_is_the_exact_interpreters(capsys: pytest.CaptureFixture[str]) -> None:
    counts = run(0, NUM_PROGRAMS)
    with capsys.disabled():
        print(f"\nrandom programs: {NUM_PROGRAMS}, " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    assert counts["accepted"] > NUM_PROGRAMS // 10
    assert counts["rejected: wrong bytes"] > NUM_PROGRAMS // 10
    assert counts["rejected: rule alone"] > NUM_PROGRAMS // 50


@pytest.mark.slow
def test_verdict_is_the_exact_interpreters_on_many_more(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("GRAPHSHARD_TEST_SEED", "1000000"))
    counts = run(seed, NUM_PROGRAMS_SLOW)
    with capsys.disabled():
        print(f"\nrandom programs from seed {seed}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
