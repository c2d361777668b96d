"""Speculations used badly: calls interrupted, made at once, after a failure, after the end; drafts of other lenders."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import speculative_programs as programs
import torch
from byte_steps import compile_bytes
from fault_tools import InThread, Latch, until
from fold_model import DraftModel, LendingModel
from lockstep_programs import outcome
from ranks import run_on_ranks
from speculative_rig import FoldModel, Pair, stalled

import graphshard
from graphshard._core import Calls, DriverError
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import DeviceError, ProgramError, SpecError
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.speculative.order import CallOrder

# --- interrupted ---


def hold_back(runtime: Runtime, index: int, gates: list[threading.Event]) -> list[int]:
    """The next runs of a segment each wait for their gate; in the list returned, those that have begun."""
    segment = runtime._compute.segments[index]
    run, begun = segment.run, []

    def wait_and_run(state: Any) -> None:
        begun.append(len(begun))
        if len(begun) <= len(gates):
            assert gates[len(begun) - 1].wait(30.0)
        run(state)

    object.__setattr__(segment, "run", wait_and_run)
    return begun


def interrupt_next_wait(runtime: Runtime) -> None:
    """The host's next wait ends as Ctrl-C ends it."""
    wait = runtime._alignment.wait

    def interrupted(*_: Any) -> bool:
        runtime._alignment.wait = wait  # type: ignore[method-assign]
        raise KeyboardInterrupt

    runtime._alignment.wait = interrupted  # type: ignore[method-assign]


def test_the_step_after_an_interrupted_one_is_not_done_when_that_one_ends(transport: str) -> None:
    gates = [threading.Event(), threading.Event()]
    with Pair(LocalGroup(1)[0], transport, run="eager") as pair:
        wrong = pair.step()
        begun = hold_back(pair.draft, 3, gates)
        interrupt_next_wait(pair.draft)
        with pytest.raises(KeyboardInterrupt):
            pair.spec.graph(1).propose()
        pair.spec.order = CallOrder(1)  # its server begins anew
        stepping = InThread(pair.step)
        until(lambda: len(begun) == 1, "the interrupted step computes")
        gates[0].set()
        until(lambda: len(begun) == 2, "the next one does")
        assert stepping.is_alive() and pair.spec.order.due == "verify()"
        gates[1].set()
        assert wrong + stepping.result() == []


def test_a_fold_after_an_interrupted_one_is_not_done_when_that_one_ends(transport: str) -> None:
    gates = [threading.Event(), threading.Event()]
    with Pair(LocalGroup(1)[0], transport, run="eager") as pair:
        begun = hold_back(pair.target, len(pair.target._compute.segments) - 1, gates)
        interrupt_next_wait(pair.target)
        with pytest.raises(KeyboardInterrupt):
            pair.target.fold(1, run="eager")
        folding = InThread(lambda: pair.target.fold(1, run="eager"))
        until(lambda: len(begun) == 1, "the interrupted fold computes")
        gates[0].set()
        until(lambda: len(begun) == 2, "the next one does")
        assert folding.is_alive() and pair.target.num_folds == 2
        gates[1].set()
        folding.result()
        assert pair.step() == []


def test_what_was_interrupted_and_does_not_end_is_refused_in_bounded_time() -> None:
    latch = Latch(is_open=True)
    with Pair(LocalGroup(1)[0], "pull", target_hooks=Hooks(poison=True, fold_stall=latch.word.address)) as pair:
        assert pair.step() == []
        latch.close()
        interrupt_next_wait(pair.target)
        with pytest.raises(KeyboardInterrupt):
            pair.target.fold(1)
        pair.target.timeout_s = 0.1
        with pytest.raises(DeviceError, match=r"rank 0: what was issued before did not end within 0\.1 s and is still"):
            pair.target.run(1)
        latch.open()
        pair.target.timeout_s = 20.0
        until(lambda: all(stream.is_idle() for stream in pair.target._streams.values()), "the fold has ended")
        assert pair.step() == []


# --- the driver refuses ---


@pytest.mark.parametrize(("when", "what"), [("cold", "gathers before step 3"), ("steady", "a prefetch")])
def test_a_refused_prefetch_is_every_ranks_error_at_once(when: str, what: str) -> None:
    for found in run_on_ranks(refuse_a_prefetch, 3, "nccl", when):
        told, seconds = found["told"]
        assert told.endswith(f"rank 1 could not issue {what}: out of luck") and seconds < 30.0
        assert found["wrong"] == []


def test_under_pull_a_refused_prefetch_is_one_ranks_own() -> None:
    told = run_on_ranks(refuse_a_prefetch, 2, "pull", "steady")
    assert [found["told"][0] for found in told] == ["", "DriverError: out of luck"]
    assert [found["wrong"] + found["after"] for found in told] == [[], []]


class Refused:
    """A gather that the driver refuses."""

    def issue(self, calls: Calls) -> None:
        raise DriverError("out of luck")


def refuse_a_prefetch(group: Group, transport: str, when: str) -> dict[str, Any]:
    """Rank 1's driver refuses what the draft gathers outside its third step."""
    after: list[str] = []
    with Pair(group, transport, timeout_s=60.0) as pair:
        wrong = pair.step() + pair.step()
        if when == "cold":
            pair.spec.discard()
        group.barrier("two steps")
        gathers = pair.draft._slots._gathers
        kept = dict(gathers)
        if group.rank == 1:
            gathers.update(dict.fromkeys(gathers, Refused()))  # type: ignore[arg-type]
        try:
            told = outcome(lambda: [pair.step() for _ in range(2)])
        except DriverError as error:
            told = [f"DriverError: {error}", 0.0]
        group.barrier("all were told")
        if transport == "pull":
            gathers.update(kept)
            pair.spec.graph(1).commit() if pair.spec.order.due == "commit()" else None
            after = pair.step() + pair.step()
    return {"wrong": wrong, "told": told, "after": after}


# --- calls at once, around each other, after a failure ---


def test_a_call_while_another_thread_makes_one_is_refused() -> None:
    latch = Latch()
    with Pair(LocalGroup(1)[0], "pull") as pair:
        step = pair.spec.graph(1)
        pair.spec.discard()
        with stalled(pair.draft, latch.word.address):
            proposing = InThread(step.propose)
            until(lambda: pair.draft._slots.is_in_flight or pair.draft._slots._used, "the draft begins")
        for call in (step.verify, step.propose, step.commit):
            with pytest.raises(ProgramError, match=r"was called while propose\(0\) \(thread .*\) is being made: "):
                call()
        latch.open()
        proposing.result()
        step.verify()
        step.commit()
        assert pair.step() == []


def test_many_threads_make_one_step_after_another() -> None:
    """Whoever is not due is refused; what is done is whole steps."""
    with Pair(LocalGroup(1)[0], "pull", run="eager") as pair:
        step, done = pair.spec.graph(1), []

        def hammer() -> None:
            for number in range(120):
                name = ("propose", "verify", "commit")[number % 3]
                try:
                    getattr(step, name)()
                    done.append(name)
                except ProgramError:
                    pass

        for thread in [InThread(hammer) for _ in range(4)]:
            thread.result()
        assert pair.target.num_steps == done.count("verify") and pair.draft.num_steps >= done.count("propose") > 0
        while pair.spec.order.due != "propose(0)":
            (step.verify if pair.spec.order.due == "verify()" else step.commit)()
        assert pair.step() == []


def test_a_segment_that_calls_the_step_around_it_leaves_the_order_as_it_is() -> None:
    with Pair(LocalGroup(1)[0], "pull", run="eager") as pair:
        step = pair.spec.graph(1)
        segment = pair.draft._compute.segments[1]
        run = segment.run
        object.__setattr__(segment, "run", lambda state: step.verify())
        with pytest.raises(ProgramError, match=r"verify\(\) of speculative step 1x1 was called while propose\(0\)"):
            step.propose()
        object.__setattr__(segment, "run", run)
        step.verify()
        step.commit()
        assert pair.step() == []


@pytest.mark.parametrize("what", ["close", "update"])
def test_a_segment_that_ends_its_speculation_is_refused_and_nothing_ends(what: str) -> None:
    assert run_on_ranks(end_inside_a_segment, 2, what) == [[]] * 2


def end_inside_a_segment(group: Group, what: str) -> list[str]:
    with Pair(group, "nccl", run="eager") as pair:
        call = pair.spec.close if what == "close" else lambda: pair.spec.update(target=pair.models["target"].tensors())
        segment = pair.target._compute.segments[1]
        run = segment.run
        object.__setattr__(segment, "run", lambda state: call())
        step = pair.spec.graph(1)
        step.propose()
        with pytest.raises(ProgramError, match=f"segment .* calls {what} while it runs"):
            step.verify()
        object.__setattr__(segment, "run", run)
        step.commit()
        assert pair.spec.agree(3).batch_size == 3
        return pair.step()


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_torchs_inference_mode_may_come_and_go(run: str) -> None:
    with torch.inference_mode():
        pair = Pair(LocalGroup(1)[0], "pull", run=run)
        wrong = pair.step()
    with pair:
        wrong += pair.step()
        with torch.inference_mode():
            assert wrong + pair.step() == []


def test_after_a_target_that_raised_nothing_is_folded(transport: str) -> None:
    run_on_ranks(fail_in_a_target, 2, transport)


def fail_in_a_target(group: Group, transport: str) -> None:
    is_broken = [False]
    with Pair(group, transport, run="eager") as pair:
        programs.break_segment(pair.target, 2, is_broken)
        assert pair.step() == []
        step = pair.spec.graph(1)
        step.target.inputs["accepted"].fill_(3)  # of the step before
        is_broken[0] = group.rank == 1
        step.propose()
        if group.rank == 1:
            with pytest.raises(ValueError, match="target: a segment's own fault"):
                step.verify()
        else:
            step.verify()
        is_broken[0] = False
        step.commit()
        committed = pair.target.buffers(StepShape(1), "activation")["committed"]
        assert committed.tolist() == [3 * (group.rank != 1)]
        assert pair.step() == [] and committed.tolist() == [3]


def test_a_larger_graph_does_not_stand_in_for_one_that_was_given_back() -> None:
    with Pair(LocalGroup(1)[0], "pull", sizes=[1, 4]) as pair:
        step = pair.spec.graph(1)
        for name, runtime in pair.runtimes().items():
            runtime.close_graphs()
            runtime.capture([StepShape(4)])
            piece = (lambda: step.target) if name == "target" else step.draft
            with pytest.raises(SpecError, match=f"{name}'s graph of step shape 1x1 was given back; call Runtime.capt"):
                piece()
            runtime.capture()
        assert pair.step(1) == [] and pair.step(4) == []


# --- the end ---


def test_closing_while_another_thread_proposes_waits_for_that_and_what_follows_is_refused() -> None:
    latch = Latch()
    pair = Pair(LocalGroup(1)[0], "pull")
    step = pair.spec.graph(1)
    pair.spec.discard()
    with stalled(pair.draft, latch.word.address):
        proposing = InThread(step.propose)
        until(lambda: pair.draft.num_steps == 1, "the draft was launched")
    closing = InThread(pair.close)
    assert closing.is_alive() and not pair.draft.is_closed
    latch.open()
    proposing.result()
    closing.result()
    assert pair.draft.is_closed and pair.target.is_closed
    for call in (step.verify, lambda: pair.spec.graph(1)):
        with pytest.raises(ProgramError, match="this runtime is closed"):
            call()


def test_what_a_closed_speculation_had_goes_without_a_collection() -> None:
    def windows() -> int:
        links = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
        return sum("memfd" in link for link in links)

    gc.collect()
    gc.disable()
    try:
        before = windows()
        with Pair(LocalGroup(1)[0], "pull") as pair:
            assert pair.step() == []
        del pair
        until(lambda: windows() == before, "all memory is given back")
    finally:
        gc.enable()


def test_a_closed_speculation_has_no_steps() -> None:
    pair = Pair(LocalGroup(1)[0], "pull")
    step, words = pair.spec.graph(1), pair.spec.sequences
    pair.close()
    for call in (lambda: pair.spec.graph(1), step.propose, step.verify, lambda: step.target, step.draft):
        with pytest.raises(ProgramError, match="this runtime is closed"):
            call()
    assert pair.spec.sequences is words


# --- settings ---


def test_a_draft_that_borrows_of_another_target_is_refused() -> None:
    group, lending = LocalGroup(1)[0], LendingModel()
    with (
        compile_bytes(group, lending, units="layer") as lender,
        compile_bytes(group, lending, units="layer") as other,
        compile_bytes(group, DraftModel(lending), borrow=lender) as draft,
    ):
        with pytest.raises(SpecError, match=r"the draft borrows .* of a runtime that is not the target"):
            graphshard.speculate(other, draft)
        graphshard.speculate(lender, draft).close()


def test_sizes_and_numbers_that_cannot_be_are_refused_under_pull_too() -> None:
    with Pair(LocalGroup(1)[0], "pull") as pair:
        for size in (-1, True, 1.5):
            with pytest.raises(SpecError, match="give a whole number, 0 for a rank without requests"):
                pair.spec.agree(size)  # type: ignore[arg-type]
        with pytest.raises(SpecError, match="no speculative step fits 2x1"):
            pair.spec.idle(2)
        pair.spec.graph(1).verify()
        with pytest.raises(ProgramError, match=r"idle\(\): speculative step 1x1 is open, and commit\(\) is due"):
            pair.spec.idle()
    model = FoldModel([[300]], name="alone")
    with (
        compile_bytes(LocalGroup(1)[0], model) as target,
        pytest.raises(SpecError, match="num_draft_replays=3 without a draft"),
    ):
        graphshard.speculate(target, num_draft_replays=3)
