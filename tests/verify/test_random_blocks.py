"""Random programs of ranks with blocks, changed several times: whatever does harm is flagged, and nothing good is."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from block_cases import DECODE, block_model, block_plan, judged
from block_mutants import block_list_mutants, block_program_mutants

from graphshard.core.lowering import Lowered, lower
from graphshard.core.plan import Mode
from graphshard.core.program import Program
from graphshard.schedule.emit import emit_all
from graphshard.verify import compare_ranks, explore_ranks, verify

NUM_PROGRAMS = 300


def scheduled(rng: random.Random) -> list[Program]:
    """The scheduler's programs of a model with one to three blocks, at two step shapes of any modes."""
    num_layers = rng.randint(1, 3)
    model = block_model(num_layers, attention=rng.random() < 0.5, norms=rng.random() < 0.5)
    modes: list[tuple[Mode, ...]] = [
        tuple(rng.choice(("gather", "tensor_parallel", "tensor_parallel")) for _ in range(num_layers)) for _ in range(2)
    ]
    head, depth = rng.choice(("inside", "tail", "outside")), rng.randint(0, 2)
    plan = block_plan(model, {DECODE: modes[0]}, head=head, prefetch_depth=depth)
    other = block_plan(model, {DECODE: modes[1]}, head=head, prefetch_depth=depth)
    return [next(iter(emit_all(model, one).values())) for one in (plan, other)]


def changed(rng: random.Random, program: Program, times: int) -> Program:
    for _ in range(times):
        mutants = list(block_program_mutants(program))
        program = rng.choice(mutants).program if mutants else program
    return program


def changed_list(rng: random.Random, program: Program, lowered: Lowered) -> Lowered:
    mutants = [mutant.lowered for mutant in block_list_mutants(program, lowered) if mutant.lowered is not None]
    return rng.choice(mutants) if mutants else lowered


def agree(seed: int, counts: Counter[str]) -> None:
    """All ranks alike, or rank 1 alone changed; flags or collectives."""
    rng = random.Random(seed)
    num_copies = rng.choice((2, 2, 1))
    first, second = scheduled(rng)
    if rng.random() < 0.3:
        second = first
    others = [changed(rng, program, rng.choice((0, 0, 1, 2))) for program in (first, second)]
    is_alone = rng.random() < 0.3
    lists = {program: lower(program, num_copies) for program in (first, second, *others)}
    if not is_alone and rng.random() < 0.3:
        lists[others[0]] = changed_list(rng, others[0], lists[others[0]])
    report = verify(others, num_copies=num_copies, lowered=lists)
    flagged = not report.is_good
    ranks = [[(program, lists[program]) for program in others]] * 2
    if is_alone:
        ranks[0] = [(program, lists[program]) for program in (first, second)]
        flagged |= any(not compare_ranks(pair).is_good for pair in zip((first, second), others, strict=True))
    outcome = explore_ranks(ranks, is_collective=num_copies == 1)
    text = f"seed {seed}\n{report.text()}\n{outcome}\n" + "".join(program.text() for program in others)
    if outcome.is_harmful and not flagged:
        pytest.fail(f"harm that nothing names: {text}")
    if others == [first, second] and lists == {program: lower(program, num_copies) for program in lists} and flagged:
        pytest.fail(f"a good program is flagged: {text}")
    counts["harmful" if outcome.is_harmful else "flagged alone" if flagged else "accepted"] += 1


def test_harm_is_flagged_and_good_programs_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_PROGRAMS):
        agree(seed, counts)
    with capsys.disabled():
        print(f"\nrandom programs of two ranks: {NUM_PROGRAMS}, " + ", ".join(f"{n} {w}" for w, n in counts.items()))
    assert counts["harmful"] > NUM_PROGRAMS // 5 and counts["accepted"] > NUM_PROGRAMS // 5


@pytest.mark.slow
def test_harm_is_flagged_in_many_more(capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    for seed in range(100_000, 103_000):
        agree(seed, counts)
    with capsys.disabled():
        print(f"\nrandom programs of two ranks: {dict(counts)}")


def test_equal_ranks_are_needed() -> None:
    """What the judge finds where ranks are alike it finds where they are given one by one."""
    first, second = scheduled(random.Random(7))
    assert judged([first, second]) == judged([first, second], rank_1=[first, second])
