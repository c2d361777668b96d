"""Faults of sequences, one by one: the rule that names each, and what the error says."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from sequence_cases import Sequences, chain, changed, sharing, usual, with_graphs, with_ops
from sequence_explore import harm_of

from graphshard.core.errors import ProgramError
from graphshard.core.layout import build_layout
from graphshard.core.ops import WaitOnce
from graphshard.core.sequence import (
    Fold,
    Held,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
)
from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.sequence import emit_sequences
from graphshard.verify import RULE_NAMES, SequenceReport, verify_sequences

LAUNCH = PrefetchLaunch("draft", 0, 0)
WAIT = PrefetchWait("draft", 0, 0)
DRAFT, TARGET = Replay("draft"), Replay("target")
FOLD = Fold("target", "commit_fold")


def judged(sequences: Sequences, follows: Iterable[tuple[str, str]] = (("step", "step"),)) -> SequenceReport:
    """The report over `follows` alone, whose verdict on bytes is the exact interpreter's."""
    pairs = list(follows)
    report = verify_sequences(sequences, follows=pairs)
    harms = [harm_of(sequences[first], sequences[second]) for first, second in pairs]
    assert any(violation.wrong_bytes for violation in report.violations) == any(harms), f"{harms}\n{report.text()}"
    return report


def only_step(*ops: object) -> Sequences:
    """The usual step with these ops, and nothing beside it."""
    return with_ops({"step": usual()["step"]}, "step", *ops)  # type: ignore[arg-type]


def assert_found(report: SequenceReport, rule: int, text: str, wrong_bytes: bool = False) -> None:
    """`report` has a violation of `rule` that says `text`, a pattern."""
    found = [v for v in report.violations if v.rule == rule and v.wrong_bytes == wrong_bytes]
    assert any(re.search(text, violation.text + violation.where) for violation in found), report.text()
    with pytest.raises(ProgramError, match=rf"R{rule} +{RULE_NAMES[rule]}"):
        report.raise_if_bad()


def test_a_good_report_says_who_may_follow_whom() -> None:
    report = verify_sequences(usual())
    report.raise_if_bad()
    assert report.text().splitlines()[:5] == [
        "no violations in 5 sequences of up to 6 ops",
        "  cold may follow discard",
        "    not cold, step, skip, cold_skip: unit 0 of draft in flight to slot 0 is left to it, which it does not "
        "expect; discard that between them",
        "  step may follow cold, step, skip, cold_skip",
        "    not discard: it expects unit 0 of draft in flight to slot 0, but what comes before leaves none",
    ]
    assert ("skip", "step") in report.pairs
    assert ("discard", "cold") in report.pairs
    assert {(first, second) for first, second, _ in report.apart} >= {("step", "cold"), ("discard", "step")}


def test_a_wait_that_is_gone() -> None:
    report = judged(only_step(DRAFT, TARGET, LAUNCH, FOLD))
    assert_found(report, 3, r"op 0 replay graph=draft .*reads unit 0 of draft in slot 0, but no prefetch_wait", True)
    assert_found(report, 3, r"op 0 replay graph=draft \(its op \d+ gemm layer=0 segment=proj\)", True)


def test_a_wait_after_the_replay() -> None:
    report = judged(only_step(DRAFT, WAIT, TARGET, LAUNCH, FOLD))
    assert_found(report, 3, "op 0 replay graph=draft", True)
    assert_found(report, 2, r"op 1 prefetch_wait .*: no gather of unit 0 into slot 0 is in flight there; op 3 launches")


def test_a_wait_on_another_stream() -> None:
    report = judged(only_step(PrefetchWait("draft", 0, 0, "prefetch"), DRAFT, TARGET, LAUNCH, FOLD))
    assert_found(report, 3, "op 1 replay graph=draft", True)


def test_two_waits() -> None:
    report = judged(only_step(WAIT, WAIT, DRAFT, TARGET, LAUNCH, FOLD))
    assert_found(report, 4, "op 1 prefetch_wait graph=draft unit=0 slot=0 waits on compute again; op 0 has waited")


def test_a_wait_for_what_is_held() -> None:
    tail = emit_sequences(chain(3), chain(3, "tail"))
    (held,) = tail["step"].entry
    wait = PrefetchWait("draft", held.unit, held.slot)
    report = judged(with_ops({"step": tail["step"]}, "step", wait, *tail["step"].ops))
    assert_found(report, 4, "op 0 prefetch_wait .* waits on compute again; it is held already. Drop it")


def test_a_gather_into_a_slot_that_a_replay_still_reads() -> None:
    report = judged(only_step(WAIT, LAUNCH, DRAFT, TARGET, FOLD))
    text = r"op 1 prefetch_launch graph=draft unit=0 slot=0 overwrites unit 0 of draft in slot 0, which op 2 replay "
    assert_found(report, 6, text + r"graph=draft .* is still to read; launch it after that replay", True)
    assert_found(report, 2, "op 1 prefetch_launch .* gathers unit 0 again, before a replay of draft has used")


def test_a_gather_into_the_targets_slots() -> None:
    report = judged(sharing({"step": usual()["step"]}))
    assert_found(report, 7, "graphs draft and target share the slots of shared: give each graph slots of its own")
    assert 6 in {violation.rule for violation in report.violations if violation.wrong_bytes}
    held = sharing(emit_sequences(chain(3, depth=2), chain(3, "tail")))
    report = judged({"step": held["step"]})
    assert_found(report, 6, r"op 1 replay graph=target \(its op \d+ ag_launch .*\) overwrites unit 0 of draft", True)


def test_a_gather_under_the_targets_replay_from_shared_slots() -> None:
    early = only_step(WAIT, DRAFT, LAUNCH, TARGET, FOLD)
    assert judged(early).is_good, "earlier than emitted, but after the draft has ended"
    report = judged(sharing(early))
    text = r"op \d .* (overwrites|may run before) .*graphs share the slots of shared"
    assert_found(report, 6, text, True)


def test_a_gather_that_is_gone() -> None:
    report = judged(only_step(WAIT, DRAFT, TARGET, FOLD))
    assert_found(report, 9, "exit states `prefetch_launch .*`, which the sequence does not leave")
    assert_found(
        report, 9, r"op 1 replay graph=draft .* reads unit 0 of draft in slot 0, expected at entry, but what", True
    )


def test_a_gather_of_a_unit_that_the_replay_does_not_read() -> None:
    report = judged(only_step(WAIT, DRAFT, TARGET, PrefetchLaunch("draft", 2, 0), FOLD))
    assert_found(report, 12, "op 3 prefetch_launch graph=draft unit=2 slot=0 gathers unit 2 .* nothing there reads")
    assert_found(report, 9, "expected at entry, but what comes before leaves unit 2 of draft there", True)


def test_a_gather_that_nobody_uses() -> None:
    sequences = {name: usual()[name] for name in ("cold", "skip")}
    report = verify_sequences(sequences)
    assert_found(report, 12, r"op 4 prefetch_launch .* which is never used \(sequence cold\)")


def test_a_draft_that_runs_twice_on_one_gather() -> None:
    report = judged(only_step(WAIT, DRAFT, DRAFT, TARGET, LAUNCH, FOLD))
    assert_found(report, 2, r"op 2 replay graph=draft .* reads unit 0 of draft in slot 0, but that holds unit", True)


def test_a_step_after_a_discard() -> None:
    report = judged(usual(), [("discard", "step")])
    assert_found(report, 9, "expected at entry, but what comes before leaves nothing, as it was discarded there", True)
    assert report.apart[0][:2] == ("discard", "step")
    assert judged(usual(), [("discard", "cold"), ("cold", "step")]).is_good


def test_a_cold_step_with_a_gather_in_flight() -> None:
    report = judged(usual(), [("step", "cold")])
    assert_found(report, 9, "unit 0 of draft in flight to slot 0 is left to it, which it does not expect; discard")


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_wait_inside_the_graph_for_a_gather_outside(is_dropped: bool) -> None:
    made = usual()
    draft, target = made["step"].graphs
    inside = replace(draft.program, ops=(WaitOnce(0, 0), *draft.program.ops))
    made = with_graphs(made, SequenceGraph("draft", inside), target)
    if is_dropped:
        made = {"step": replace(made["step"], ops=made["step"].ops[1:])}
    report = judged(made)
    text = r"op 0 wait_once unit=0 slot=0 waits for a gather outside .*; an event may not cross a capture's border"
    assert_found(report, 9, text + r" \(inside graph draft\)")
    assert any(v.rule == 3 and v.wrong_bytes for v in report.violations) == is_dropped


def test_a_fold_that_names_a_unit() -> None:
    report = judged(only_step(WAIT, DRAFT, TARGET, LAUNCH, Fold("target", "commit_fold", (1,))))
    assert_found(report, 2, "op 4 fold .* names unit 1, which lies in a slot for one layer alone; .* keep its weights")
    inner = emit_sequences(chain(3), chain(3, "outside"))["step"]
    lost = replace(inner, ops=(*inner.ops[:-1], Fold("target", "commit_fold", (0,))))
    assert_found(judged({"step": lost}), 2, "op 4 fold .* reads unit 0 of target, which lies in no slot", True)


def folding_model() -> ModelSpec:
    """Two layers of two weights; the fold reads one of each layer."""
    names = [f"layers.{layer}.{name}" for layer in range(2) for name in ("proj", "f_b")]
    segments = tuple(SegmentSpec(name.split(".")[-1], int(name.split(".")[1]), (name,)) for name in names)
    fold = SegmentSpec("commit_fold", None, ("layers.0.f_b", "layers.1.f_b"))
    weights = tuple(WeightSpec(name, (4096,), "uint8") for name in names)
    return ModelSpec("folding", weights, segments, folds=(fold,))


def test_a_fold_that_reads_a_sharded_weight() -> None:
    model = folding_model()
    plan = make_plan(model, 2, DeviceSpec("cuda", "any", 1 << 37), min_shard_bytes=0)
    bare = replace(model, folds=())
    all_sharded = make_plan(bare, 2, DeviceSpec("cuda", "any", 1 << 37), min_shard_bytes=0)
    for used, is_good in ((plan, True), (all_sharded, False)):
        made = emit_sequences(emit(bare, used), None)
        known = {"layouts": {"target": build_layout(bare, used)}, "models": {"target": model}}
        report = verify_sequences(made, **known)
        assert report.is_good == is_good, report.text()
    assert_found(report, 11, r"commit_fold reads weight layers.1.f_b, .* unit 1.* keep it resident \(inside graph")
    other = with_ops(made, "step", Replay("target"), Fold("target", "rewind"))
    assert_found(verify_sequences(other, **known), 1, "the model of target has no such fold; known are commit_fold")


def test_an_exit_that_is_not_true() -> None:
    unstated = changed({"step": usual()["step"]}, "step", exit=())
    assert_found(judged(unstated), 9, "`prefetch_launch graph=draft .*` is in flight at the end, but exit does not")
    held = changed({"step": usual()["step"]}, "step", exit=(Held("draft", 0, 0),))
    assert_found(judged(held), 9, "exit states `held .*`, which the sequence does not leave, but `prefetch_launch")


@pytest.mark.parametrize(
    ("op", "text"),
    [
        (Replay("draught"), "op 0 replay graph=draught stream=compute: there is no graph draught; known are draft, "),
        (PrefetchWait("draft", 3, 0), "draft has no unit 3; units are 0 to 2, slots 0 to 1"),
        (PrefetchLaunch("draft", -1, 2), "draft has no unit -1 and no slot 2"),
        (Fold("target", "commit_fold", (9,)), "target has no unit 9"),
        (Replay("draft", "copy"), "op 0 replay graph=draft is issued on copy: graphs and folds follow each other"),
    ],
)
def test_what_is_not_there(op: object, text: str) -> None:
    report = verify_sequences(only_step(op), follows=[])
    assert_found(report, 1, text)


def test_names_and_slots_are_stated_once() -> None:
    made = usual()
    draft, target = made["step"].graphs
    twins = with_graphs(made, draft, replace(target, name="draft"))
    assert_found(verify_sequences(twins), 1, "2 graphs are called draft: give each its own name")
    twice = changed({"step": made["step"]}, "step", entry=(LAUNCH, Held("draft", 2, 0)))
    assert_found(verify_sequences(twice), 1, "entry states two units of slot 0 of draft, the second by `held")


def test_sequences_of_other_graphs_are_not_compared() -> None:
    other = emit_sequences(chain(2), chain(2, "outside"))["step"]
    with pytest.raises(ProgramError, match="sequences step and other have different graphs"):
        verify_sequences({"step": usual()["step"], "other": other})
    with pytest.raises(ProgramError, match="there is no sequence warm; known are cold, step"):
        verify_sequences(usual(), follows=[("warm", "step")])
    assert verify_sequences({}).is_good
