"""The verifier's verdict on random sequences is the exact interpreter's: wrong bytes, or none."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from sequence_cases import HEADS, Sequences, chain, op_mutants, sharing
from sequence_explore import harm_of

from graphshard.core.sequence import Held, PrefetchDiscard, PrefetchLaunch, StepSequence
from graphshard.schedule.sequence import emit_sequences
from graphshard.verify import verify_sequences
from graphshard.verify.sequence_races import sequence_races

NUM_CASES = 700
NUM_CASES_SLOW = 20_000


def scheduled(rng: random.Random) -> Sequences:
    """Good sequences, whose graphs may be made to share their slots."""
    target = chain(rng.randint(1, 2), rng.choice(HEADS), rng.randint(0, 2))
    draft = chain(rng.randint(1, 2), rng.choice(("outside", *HEADS)), rng.randint(0, 2))
    stream = rng.choice(("prefetch", "copy"))
    made = emit_sequences(target, draft, num_draft_replays=rng.randint(1, 2), prefetch_stream=stream)
    return sharing(made) if rng.random() < 0.25 else made


def mutated(rng: random.Random, sequence: StepSequence) -> StepSequence:
    """`sequence` with up to three ops changed, or with another entry."""
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        mutants = list(op_mutants(sequence))
        if mutants:
            sequence = replace(sequence, ops=rng.choice(mutants).ops)
    if sequence.entry and rng.random() < 0.2:
        state = rng.choice(sequence.entry)
        other = (Held if isinstance(state, PrefetchLaunch) else PrefetchLaunch)(state.graph, state.unit, state.slot)
        entry = tuple(item for item in sequence.entry if item != state)
        sequence = replace(sequence, entry=entry if rng.random() < 0.5 else (*entry, other))
    return sequence


def agree(seed: int, counts: Counter[str]) -> None:
    rng = random.Random(seed)
    made = scheduled(rng)
    names = [rng.choice(list(made)) for _ in range(2)]
    first = mutated(rng, made[names[0]])
    second = mutated(rng, made[names[1]]) if rng.random() < 0.5 else made[names[1]]
    pair = {"first": first, "second": second}
    report = verify_sequences(pair, num_copies=rng.choice((1, 1, 2)), follows=[("first", "second")])
    if 1 in report.rules:
        counts["rejected: R1"] += 1
        return  # what is named twice, or not there, has no meaning
    harm = harm_of(first) or harm_of(second) or harm_of(first, second)
    shown = any(violation.wrong_bytes for violation in report.violations)
    if shown != (harm is not None):
        text = "\n".join([f"seed {seed} {names}", first.text(), *second.op_lines()])
        pytest.fail(f"{text}\nverifier: {report.text()}\ninterpreter: {harm}")
    if seed % 4 == 0:
        lists = ((first,), (second,), (first, second))
        full = any(violation for listed in lists for violation in sequence_races(listed, 1))
        assert full == shown, f"seed {seed}: short lists show what full ones do"
    counts["accepted" if report.is_good else "rejected: wrong bytes" if shown else "rejected: rule alone"] += 1
    counts["with a discard"] += any(isinstance(op, PrefetchDiscard) for op in first.ops + second.ops)


def run(first_seed: int, number: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + number):
        agree(seed, counts)
    return counts


def test_verdict_is_the_exact_interpreters(capsys: pytest.CaptureFixture[str]) -> None:
    counts = run(0, NUM_CASES)
    with capsys.disabled():
        print(f"\nrandom sequences: {NUM_CASES}, " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
    assert counts["accepted"] > NUM_CASES // 20
    assert counts["rejected: wrong bytes"] > NUM_CASES // 10
    assert counts["rejected: rule alone"] > NUM_CASES // 10
    assert counts["with a discard"] > NUM_CASES // 10


@pytest.mark.slow
def test_verdict_is_the_exact_interpreters_on_many_more(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("GRAPHSHARD_TEST_SEED", "1000000"))
    counts = run(seed, NUM_CASES_SLOW)
    with capsys.disabled():
        print(f"\nrandom sequences from seed {seed}: " + ", ".join(f"{n} {what}" for what, n in sorted(counts.items())))
