"""What a speculative step issues, by the heads of its two programs."""

from __future__ import annotations

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.ops import AgLaunch
from graphshard.core.plan import HeadPolicy
from graphshard.core.program import Program
from graphshard.core.sequence import Fold, Held, PrefetchDiscard, PrefetchLaunch, PrefetchWait, Replay
from graphshard.core.specs import DeviceSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.sequence import emit_sequences
from graphshard.schedule.synthetic import synthetic_model

DEVICE = DeviceSpec("cuda", "any", 1 << 37)
LAUNCH = PrefetchLaunch("draft", 0, 0)
WAIT = PrefetchWait("draft", 0, 0)
DRAFT, TARGET = Replay("draft"), Replay("target")
FOLD = Fold("target", "commit_fold")


def program(num_layers: int, head: HeadPolicy = "inside", depth: int = 1) -> Program:
    model = synthetic_model(num_layers)
    return emit(model, make_plan(model, 2, DEVICE, head=head, prefetch_depth=depth))


def test_the_steady_step() -> None:
    found = emit_sequences(program(4), program(3, "outside"))
    assert found["step"].ops == (WAIT, DRAFT, TARGET, LAUNCH, FOLD)
    assert found["step"].entry == found["step"].exit == (LAUNCH,)
    assert [graph.name for graph in found["step"].graphs] == ["draft", "target"]


def test_the_others() -> None:
    found = emit_sequences(program(4), program(3, "outside"))
    assert list(found) == ["cold", "step", "skip", "cold_skip", "discard"]
    assert found["cold"].ops == (LAUNCH, WAIT, DRAFT, TARGET, LAUNCH, FOLD)
    assert (found["cold"].entry, found["cold"].exit) == ((), (LAUNCH,))
    assert found["skip"].ops == (TARGET, FOLD)
    assert found["skip"].entry == found["skip"].exit == (LAUNCH,)
    assert found["cold_skip"].ops == (TARGET, LAUNCH, FOLD)
    assert (found["cold_skip"].entry, found["cold_skip"].exit) == ((), (LAUNCH,))
    assert found["discard"].ops == (PrefetchDiscard("draft"),)
    assert (found["discard"].entry, found["discard"].exit) == ((LAUNCH,), ())


def test_a_draft_that_runs_several_times() -> None:
    found = emit_sequences(program(4), program(3, "outside"), num_draft_replays=3)
    again = (LAUNCH, WAIT, DRAFT)
    assert found["step"].ops == (WAIT, DRAFT, *again, *again, TARGET, LAUNCH, FOLD)
    assert found["cold"].ops == (LAUNCH, *found["step"].ops)


def test_a_first_gather_of_two_units() -> None:
    step = emit_sequences(program(4), program(5, "outside", 2))["step"]
    assert step.entry == (LAUNCH, PrefetchLaunch("draft", 1, 1))
    assert step.ops[:3] == (WAIT, PrefetchWait("draft", 1, 1), DRAFT)


def test_the_shared_stream_is_the_drafts_gathers_alone() -> None:
    found = emit_sequences(program(4, "outside"), program(3, "outside"), prefetch_stream="copy")
    launches = {op for sequence in found.values() for op in sequence.ops if isinstance(op, PrefetchLaunch)}
    assert launches == {PrefetchLaunch("draft", 0, 0, "copy"), PrefetchLaunch("target", 0, 0)}


@pytest.mark.parametrize("num_layers", [0, 3])
def test_a_draft_that_expects_nothing_has_no_gathers_outside(num_layers: int) -> None:
    draft = program(num_layers)
    found = emit_sequences(program(4), draft, num_draft_replays=2)
    assert list(found) == ["cold", "step", "skip"]
    assert found["cold"] == found["step"]
    assert found["step"].ops == (DRAFT, DRAFT, TARGET, FOLD)
    assert found["step"].entry == found["step"].exit == ()


def test_what_a_draft_leaves_itself_is_gathered_when_cold_alone() -> None:
    tail = program(3, "tail")
    (first,) = tail.prime
    found = emit_sequences(program(4), tail, num_draft_replays=2)
    assert found["step"].ops == (DRAFT, DRAFT, TARGET, FOLD)
    assert found["step"].entry == found["step"].exit == (Held("draft", first.unit, first.slot),)
    launch = PrefetchLaunch("draft", first.unit, first.slot)
    assert found["cold"].ops[:2] == (launch, PrefetchWait("draft", first.unit, first.slot))
    # after a cold step without the draft its first gather is in flight, not held
    assert found["cold_skip"].exit == found["primed"].entry == found["primed_skip"].entry == (launch,)
    assert found["primed"].ops == (PrefetchWait("draft", first.unit, first.slot), *found["step"].ops)


def test_either_graph_may_have_to_begin_anew() -> None:
    target, draft = program(4, "tail"), program(3, "outside")
    (first,) = target.prime
    held = Held("target", first.unit, first.slot)
    own = (PrefetchLaunch("target", first.unit, first.slot), PrefetchWait("target", first.unit, first.slot))
    found = emit_sequences(target, draft)
    assert found["step"].entry == (LAUNCH, held)
    assert found["cold"].ops == (LAUNCH, WAIT, DRAFT, *own, TARGET, LAUNCH, FOLD)
    assert (found["draft_cold"].entry, found["draft_cold"].ops) == (
        (held,),
        (LAUNCH, WAIT, DRAFT, TARGET, LAUNCH, FOLD),
    )
    assert (found["target_cold"].entry, found["target_cold"].ops) == (
        (LAUNCH,),
        (WAIT, DRAFT, *own, TARGET, LAUNCH, FOLD),
    )
    assert (found["discard"].entry, found["discard"].exit) == ((LAUNCH, held), (held,))
    assert (found["discard_target"].entry, found["discard_target"].exit) == ((LAUNCH, held), (LAUNCH,))
    assert len({sequence.digest for sequence in found.values()}) == len(found)


def test_a_draft_of_one_unit_keeps_it() -> None:
    found = emit_sequences(program(4), program(1, "outside"))
    assert found["step"].ops == (DRAFT, TARGET, FOLD)
    assert found["step"].entry == (Held("draft", 0, 0),)


def test_a_targets_own_first_gathers_come_right_before_it() -> None:
    found = emit_sequences(program(4, "outside"), program(3, "outside"))
    own = (PrefetchLaunch("target", 0, 0), PrefetchWait("target", 0, 0))
    assert found["step"].ops == (WAIT, DRAFT, *own, TARGET, LAUNCH, FOLD)


def test_without_a_draft_there_is_the_target_and_its_fold() -> None:
    found = emit_sequences(program(4), None)
    assert list(found) == ["step"]
    assert found["step"].ops == (TARGET, FOLD)
    tail = emit_sequences(program(4, "tail"), None)
    assert list(tail) == ["cold", "step", "discard_target"]
    assert emit_sequences(program(4), None, fold=None)["step"].ops == (TARGET,)


def test_programs_are_what_they_were() -> None:
    draft = program(3, "outside")
    assert draft.outside == (AgLaunch(0, 0, "prefetch"),)
    assert emit_sequences(program(4), draft)["step"].graph("draft").program is draft


@pytest.mark.parametrize("number", [0, -1, 1.5])
def test_a_draft_runs_at_least_once(number: int) -> None:
    with pytest.raises(SpecError, match=f"num_draft_replays is {number}: a step runs the draft at least once"):
        emit_sequences(program(1), program(1), num_draft_replays=number)


def test_an_unknown_stream_is_named() -> None:
    with pytest.raises(SpecError, match="prefetch_stream 'compute' is unknown; known are prefetch, copy"):
        emit_sequences(program(1), program(1), prefetch_stream="compute")  # type: ignore[arg-type]
