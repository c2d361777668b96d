"""Speculation on one or two ranks: what calls issue is what the sequences say; the order of calls; latches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import speculative_programs as programs
from byte_model import ByteModel
from byte_steps import compile_bytes
from fault_tools import InThread, Latch, until
from ranks import run_on_ranks
from speculative_rig import DRAFT_LAYERS, FoldModel, Pair, Recorder, stalled

import graphshard
from graphshard.comm.group import LocalGroup
from graphshard.core.errors import ProgramError, SpecError
from graphshard.core.lowering import Record, Wait
from graphshard.core.sequence import PrefetchLaunch, PrefetchWait
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks


@pytest.mark.parametrize("run", ["graph", "eager"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_runtimes_over_one_group(transport: str, run: str, num_ranks: int) -> None:
    for found in run_on_ranks(programs.two_runtimes, num_ranks, transport, run):
        assert found == {"wrong": [], "epochs": [2, 2]}


@pytest.mark.parametrize(
    ("head", "replays", "run"),
    [("outside", 1, "graph"), ("outside", 3, "eager"), ("inside", 2, "graph"), ("tail", 1, "eager")],
)
def test_calls_issue_what_the_sequences_say(transport: str, head: str, replays: int, run: str) -> None:
    for found in run_on_ranks(programs.issue_what_sequences_say, 2, transport, run, head, replays):
        assert [kind for kind, *_ in found] == ["cold", "step", "step", "skip", "skip", "step", "cold"]
        for kind, issued, said, wrong in found:
            assert issued == said, kind
            assert wrong == []
        if head == "outside":  # nothing was in flight; then one is, under the fold; a skip leaves it
            cold, step, _, skip, *_ = (issued for _, issued, *_ in found)
            assert cold[0] == "prefetch_launch draft 0" and step[0] == "prefetch_wait draft"
            assert step[-2:] == ["prefetch_launch draft 0", "fold target"]
            assert skip == ["replay target", "fold target"]
            assert sum(line.startswith("prefetch_wait") for line in step) == replays


def test_sequences_are_verified_and_say_what_is_prefetched() -> None:
    with Pair(LocalGroup(1)[0], "pull") as pair:
        steady = pair.spec.sequences["step"]
        assert {"cold", "step", "skip"} <= set(pair.spec.sequences)
        launched = [op.unit for op in steady.ops if isinstance(op, PrefetchLaunch)]
        waited = [op.unit for op in steady.ops if isinstance(op, PrefetchWait)]
        assert launched == waited == [0]
        assert pair.spec.sequences is pair.spec.graph(1).sequences and not pair.spec.needs_agreement


def test_the_captured_draft_waits_for_nothing_outside_itself() -> None:
    with Pair(LocalGroup(1)[0], "pull") as pair:
        lowered = pair.draft._bound[StepShape(1)].lowered
        recorded = {op.event for op in lowered.ops if isinstance(op, Record)}
        waited = {op.event for op in lowered.ops if isinstance(op, Wait)}
        assert waited and waited <= recorded


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_a_capture_beside_a_prefetch_changes_no_program(transport: str, run: str) -> None:
    """What was captured while a gather was in flight gathers as much as what was captured without."""
    for found in run_on_ranks(capture_beside_a_prefetch, 2, transport, run):
        assert found["wrong"] == [] and found["before"] == found["after"]


def capture_beside_a_prefetch(group: Any, transport: str, run: str) -> dict[str, Any]:
    with Pair(group, transport, run=run) as pair:
        recorder = Recorder(pair)
        wrong = pair.step()
        nodes = pair.draft.graph(1).num_nodes()
        recorder.take()
        wrong += pair.step()
        before = [recorder.take(), nodes]
        pair.draft.graph(1).close()  # the next step's gather is in flight, and stays or is made again
        pair.draft.capture()
        wrong += pair.step()
        recorder.take()
        wrong += pair.step()
        return {"wrong": wrong, "before": before, "after": [recorder.take(), pair.draft.graph(1).num_nodes()]}


def test_a_capture_waits_for_a_prefetch_that_stands_still(transport: str) -> None:
    """And a hundred replays with a prefetch before each show no poison."""
    assert run_on_ranks(capture_beside_a_stalled_one, 2, transport) == [[]] * 2


def capture_beside_a_stalled_one(group: Any, transport: str) -> list[str]:
    latch = Latch()
    with Pair(group, transport) as pair:
        wrong = pair.step()
        pair.spec.discard()
        with stalled(pair.draft, latch.word.address):
            pair.draft.prefetch(1)
        pair.draft.graph(1).close()
        capturing = InThread(pair.draft.capture)
        assert not pair.draft._streams["prefetch"].is_idle() and capturing.is_alive()
        latch.open()
        capturing.result()
        graph = pair.draft.graph(1)
        for number in range(100):
            for tensor in graph.outputs.values():
                tensor.zero_()
            if number % 10:  # else it is gathered when it is due
                pair.draft.prefetch(1)
            graph.replay()
            wrong += pair.models["draft"].wrong(graph.outputs)
        return wrong


# --- latches ---


def test_a_stalled_prefetch_delays_no_target() -> None:
    """Under pull: the fold, and the target's next step, run past a draft's gather that does not end."""
    latch = Latch()
    with Pair(LocalGroup(1)[0], "pull") as pair:
        wrong = pair.step() + pair.step()
        step = pair.spec.graph(1)
        step.propose()
        with stalled(pair.draft, latch.word.address):
            step.verify()
        step.commit()
        assert not pair.draft._streams["prefetch"].is_idle()
        before = pair.draft.num_primes
        wrong += [line for _ in range(3) for line in pair.step(skip=True)]
        for _ in range(3):  # one is in flight: no second gather into its slot
            pair.draft.prefetch(1)
        assert pair.draft.num_primes == before and not pair.draft._streams["prefetch"].is_idle()
        drafting = InThread(pair.step)
        until(lambda: pair.spec.order.num_proposed == 1, "the draft was launched")
        assert drafting.is_alive()
        latch.open()
        assert drafting.result() == [] and wrong == []


def test_a_fold_that_stands_still_delays_no_prefetch() -> None:
    latch = Latch(is_open=True)
    hooks = Hooks(poison=True, fold_stall=latch.word.address)
    with Pair(LocalGroup(1)[0], "pull", target_hooks=hooks) as pair:
        wrong = pair.step()
        latch.close()
        step = pair.spec.graph(1)
        step.propose()
        step.verify()
        folding = InThread(step.commit)
        until(lambda: pair.draft._streams["prefetch"].is_idle(), "the draft's unit has come, under the fold")
        assert folding.is_alive()
        latch.open()
        folding.result()
        assert wrong + pair.step() == []


def test_discarded_a_hundred_times_then_updated_and_closed(transport: str) -> None:
    assert run_on_ranks(discard_often, 2, transport) == [[]] * 2


def discard_often(group: Any, transport: str) -> list[str]:
    with Pair(group, transport) as pair:
        wrong = pair.step()
        for number in range(100):
            if number % 3:
                pair.draft.prefetch(1)
            pair.spec.discard()
        wrong += pair.step()
        pair.spec.discard()
        pair.spec.update(draft=pair.models["draft"].tensors(1))
        pair.versions["draft"] = 1
        wrong += pair.step()
    return wrong


# --- the order of calls ---


def test_calls_that_are_not_due_are_refused_by_name() -> None:
    with Pair(LocalGroup(1)[0], "pull", num_draft_replays=2, sizes=[1, 4]) as pair:
        step, other = pair.spec.graph(1), pair.spec.graph(4)
        refused = {
            step.commit: r"commit\(\) of speculative step 1x1 is out of order: due is propose\(0\)",
            lambda: step.propose(1): r"propose\(1\) .* due is propose\(0\) of speculative step 1x1; a step is propose",
        }
        for call, text in refused.items():
            with pytest.raises(ProgramError, match=text):
                call()
        step.propose(0)
        for call in (step.verify, step.commit, lambda: step.propose(0), lambda: other.propose(1)):
            with pytest.raises(ProgramError, match=r"due is propose\(1\) of speculative step 1x1"):
                call()
        step.propose(1)
        with pytest.raises(ProgramError, match=r"due is verify\(\)"):
            step.propose(1)
        step.verify()
        with pytest.raises(ProgramError, match=r"due is commit\(\)"):
            step.verify()
        step.commit()
        assert pair.step(4) == []
        with pytest.raises(ProgramError, match="has 2 draft replays, from 0 on, and no 2"):
            step.propose(2)


def test_a_segments_own_error_leaves_the_next_call_due(transport: str) -> None:
    assert run_on_ranks(fail_in_a_draft, 2, transport) == [["", []], ["draft: a segment's own fault", []]]


def fail_in_a_draft(group: Any, transport: str) -> list[Any]:
    """Rank 1's draft raises in one step; its peers do not notice."""
    is_broken, told = [False], ""
    with Pair(group, transport, run="eager") as pair:
        programs.break_segment(pair.draft, 1, is_broken)
        wrong = pair.step()
        step = pair.spec.graph(1)
        is_broken[0] = group.rank == 1
        try:
            step.propose()
        except ValueError as error:
            told = str(error)
        is_broken[0] = False
        step.verify()
        step.commit()
        return [told, wrong + pair.step() + pair.step()]


def test_without_a_draft() -> None:
    model = FoldModel([[300], [400]], name="alone")
    with graphshard.speculate(compile_bytes(LocalGroup(1)[0], model, units="layer")) as spec:
        step = spec.graph(1)
        assert set(spec.sequences) == {"step"} and step.num_draft_replays == 0
        for _ in range(2):
            step.verify()
            step.commit()
        assert model.wrong(step.target.outputs) == []
        for call in (step.draft, step.propose):
            with pytest.raises(ProgramError, match="speculative step 1x1 has no draft"):
                call()
        with pytest.raises(SpecError, match="there is no draft to update"):
            spec.update(draft={})


def test_the_smallest_step_that_fits_is_chosen() -> None:
    with Pair(
        LocalGroup(1)[0], "pull", sizes=[(1, 4), (8, 4), (16, 4)], draft_sizes=[(1, 2), (8, 2)], draft_tokens=[2]
    ) as pair:
        spec = pair.spec
        assert [spec.graph(size, 4).batch_size for size in (1, 2, 8)] == [1, 8, 8]
        assert spec.graph(3, 4) is spec.graph(8, 4)
        assert spec.graph(8, 4).shapes.drafts == (StepShape(8, 2),)
        with pytest.raises(SpecError, match=r"no speculative step fits 16x4; there are: 1x4, 8x4"):
            spec.graph(16, 4)
        with pytest.raises(SpecError, match="no speculative step fits 1x1"):
            spec.graph(1)
        assert pair.step(7, 4) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"run": "fast"}, "unknown run 'fast'; known: graph, eager"),
        ({"num_draft_replays": 0}, "num_draft_replays=0: a draft runs at least once a step"),
        ({"draft_tokens": [2, 0]}, r"draft_tokens=\[2, 0\]: one number above 0"),
        ({"draft_tokens": [1, 1], "num_draft_replays": 3}, r"draft_tokens=\[1, 1\] are not for num_draft_replays=3"),
        ({"draft_tokens": 2}, r"draft_tokens=2: give a number for each draft replay, as in \(2, 1, 1\)"),
        ({"draft_tokens": [3]}, "not captured is draft 1x3; add them to capture_sizes where the models are compiled$"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], text: str) -> None:
    with Pair(LocalGroup(1)[0], "pull") as pair, pytest.raises(SpecError, match=text):
        graphshard.speculate(pair.target, pair.draft, **settings)


def test_drafts_of_fewer_tokens_a_replay_are_hinted_at() -> None:
    with (
        Pair(LocalGroup(1)[0], "pull", sizes=[(1, 4)], draft_sizes=[(1, 2)], draft_tokens=[2]) as pair,
        pytest.raises(SpecError, match=r"not captured is draft 1x4; .*; or give draft_tokens="),
    ):
        graphshard.speculate(pair.target, pair.draft)


def test_runtimes_that_do_not_belong_together() -> None:
    with Pair(LocalGroup(1)[0], "pull") as pair:
        for given in ((None, pair.draft), (pair.target, pair.draft.model)):
            with pytest.raises(SpecError, match=r"is of type .*: give what graphshard\.compile returned"):
                graphshard.speculate(*given)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="target and draft are one runtime"):
            graphshard.speculate(pair.target, pair.target)
        with pytest.raises(SpecError, match=r"draft_tokens=.* without a draft"):
            graphshard.speculate(pair.target, None, draft_tokens=[1])
        elsewhere = compile_bytes(LocalGroup(1)[0], ByteModel(DRAFT_LAYERS))
        with elsewhere, pytest.raises(SpecError, match="different groups"):
            graphshard.speculate(pair.target, elsewhere)
        with pytest.raises(ProgramError, match="closed"):
            graphshard.speculate(pair.target, elsewhere)


def test_closing_twice_closes_both() -> None:
    pair = Pair(LocalGroup(1)[0], "pull")
    assert pair.step() == []
    pair.spec.close()
    pair.spec.close()
    assert pair.spec.must_exit is None
    for call in (lambda: pair.target.run(1), lambda: pair.draft.run(1), lambda: pair.spec.agree(1)):
        with pytest.raises(ProgramError, match=re.escape("this runtime is closed")):
            call()
