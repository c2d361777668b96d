"""Every change of one op of a good sequence that does harm is caught by the rule that names it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from sequence_cases import HEADS, Sequences, chain, op_mutants, usual
from sequence_explore import harm_of

from graphshard.schedule.sequence import emit_sequences
from graphshard.verify import verify_sequences


@pytest.mark.parametrize("target_head", HEADS)
@pytest.mark.parametrize("draft_head", HEADS)
def test_what_is_emitted_is_good(target_head: str, draft_head: str) -> None:
    for depth in (0, 1, 2):
        for num_draft_replays, num_units in ((1, 3), (2, 1), (3, 3)):
            target, draft = chain(3, target_head, 2 - depth), chain(num_units, draft_head, depth)
            stream = "copy" if depth == 1 else "prefetch"
            made = emit_sequences(target, draft, num_draft_replays=num_draft_replays, prefetch_stream=stream)
            report = verify_sequences(made, num_copies=2)
            assert report.is_good, report.text()
            followed = {first for first, _ in report.pairs}
            assert followed == set(made), "each of them may be followed by another"
            preceded = {second for _, second in report.pairs}
            assert preceded | {"cold", "cold_skip"} == set(made) | {"cold", "cold_skip"}, "and comes after another"
            assert ("step", "step") in report.pairs


@pytest.mark.parametrize("num_draft_replays", [1, 2])
def test_every_harmful_change_is_caught_by_the_rule_that_names_it(
    num_draft_replays: int, capsys: pytest.CaptureFixture[str]
) -> None:
    made = usual(num_draft_replays)
    pairs = verify_sequences(made).pairs
    counts: Counter[str] = Counter()
    for name in ("cold", "step"):
        # one pair with each, before and after: what the others do there is what these do
        partners = [pair for pair in pairs if name in pair and set(pair) <= {name, "cold", "step", "discard"}]
        for mutant in op_mutants(made[name]):
            changed: Sequences = {**made, name: replace(made[name], ops=mutant.ops)}
            report = verify_sequences(changed, follows=partners)
            harm = next((harm for a, b in partners if (harm := harm_of(changed[a], changed[b]))), None)
            shown = {violation.rule for violation in report.violations if violation.wrong_bytes}
            text = f"{name}: {mutant.kind}\n" + "\n".join(changed[name].op_lines()) + f"\n{harm}\n{report.text()}"
            if harm is not None:
                assert shown & mutant.rules, text
            elif mutant.by_definition:
                assert report.rules & mutant.rules, text
            if harm is None:
                assert not shown, text
            counts["harmful" if harm else "a rule alone" if report.violations else "harmless"] += 1
    with capsys.disabled():
        print(f"\nchanged sequences, {num_draft_replays} draft replays: {dict(counts)}")
    assert counts["harmful"] > 40
    assert counts["a rule alone"] > 10
