"""Weights that one runtime borrows of another: the same memory, loaded and updated once, refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from fault_tools import InThread, Latch, collect, is_mapped, until
from fold_model import DraftModel, LendingModel
from ranks import run_on_ranks, try_on_ranks

from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import CommError, DeviceError, LoadError, ProgramError, SpecError
from graphshard.device.base import Device
from graphshard.load.recipe import Read
from graphshard.runtime.bind import Hooks
from graphshard.runtime.borrowing import borrow_weights
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.update.updating import STAGES
from graphshard.runtime.weights.whole import whole_weight

TRANSPORTS = ("pull", "nccl")


def compiled(group: Group, model: ByteModel, **choices: Any) -> Runtime:
    return compile_bytes(group, model, **({"units": "layer", "prefetch_depth": 1} | choices))


def pair(**choices: Any) -> tuple[LendingModel, Runtime, DraftModel, Runtime]:
    """A target and a draft on one rank."""
    group = LocalGroup(1)[0]
    target = LendingModel()
    lender = compiled(group, target)
    draft = DraftModel(target)
    return target, lender, draft, compiled(group, draft, borrow=lender, **choices)


def wrong_bytes(runtime: Runtime, draft: DraftModel, act: Callable[[], object], *versions: int) -> list[str]:
    """One step of the draft: what its segments saw that was not theirs, of (its own version, the lender's)."""
    wrong_after(runtime, draft, act)
    outputs, truth = runtime.buffers(min(runtime.programs), "output"), draft.tensors(*versions)
    return [key for key, seen in outputs.items() if not torch.equal(seen, truth[key.split(":")[1]])]


def lend(group: Group, transport: str) -> list[str]:
    """A draft beside its target on each rank: steps of both in turn, an update of each, and of the other."""
    target = LendingModel()
    draft = DraftModel(target)
    with (
        compiled(group, target, transport=transport) as lender,
        compiled(group, draft, transport=transport, borrow=lender) as borrower,
    ):
        acts = (borrower.graph(1).replay, lambda: borrower.run(1))
        wrong = [line for act in acts for line in wrong_bytes(borrower, draft, act)]
        lender.update(target.tensors(1))
        wrong += [line for act in acts for line in wrong_bytes(borrower, draft, act, 0, 1)]
        borrower.update(draft.owned(2))
        wrong += [line for act in acts for line in wrong_bytes(borrower, draft, act, 2, 1)]
        wrong += target.wrong(lender.run(1), version=1)
        assert (lender.epoch, borrower.epoch) == (2, 4)
        return wrong


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_draft_reads_the_target_s_bytes_also_after_updates(world_size: int, transport: str) -> None:
    for wrong in run_on_ranks(lend, world_size, transport):
        assert wrong == []


def test_what_is_borrowed_takes_no_memory_and_no_load() -> None:
    _, lender, draft, borrower = pair()
    with lender, borrower:
        assert "embed" not in {view.weight for view in borrower.layout.resident}
        assert borrower.layout.resident_bytes == 0
        assert {row.name for row in borrower.memory.buffer_table() if row.role == "memory"} == {"shards", "slots"}
        shape = min(borrower.programs)
        mine, theirs = (runtime._compute.state(shape)._weights["embed"]["embed"] for runtime in (borrower, lender))
        assert mine.data_ptr() == theirs.data_ptr()
        assert "embed" not in {weight.name for weight in borrower.load_report.weights}
        assert torch.equal(whole_weight(borrower, "embed"), draft.tensors()["embed"])
        decisions = {decision.weight: decision.reason for decision in borrower.plan.decisions}
        assert decisions["embed"] == "borrowed from the target"


def test_a_checkpoint_need_not_hold_it_and_may(tmp_path: Path) -> None:
    target = LendingModel()
    draft = DraftModel(target)
    group = LocalGroup(1)[0]
    with compiled(group, target) as lender:
        without = draft.owned()
        odd = without | {"embed": torch.zeros(3)}  # of no weight's shape, and nobody looks
        renamed = without | {"tokens": torch.zeros(3)}
        for checkpoint, more in ((without, {}), (odd, {}), (renamed, {"recipes": {"embed": Read("tokens")}})):
            with compiled(group, draft, checkpoint=checkpoint, borrow=lender, **more) as borrower:
                assert wrong_bytes(borrower, draft, borrower.graph(1).replay) == []
        with pytest.raises(LoadError, match="not asked for  stranger"):
            compiled(group, draft, checkpoint=without | {"stranger": torch.zeros(1)}, borrow=lender)
        tied = without.pop("draft.1.w0")
        with compiled(
            group, draft, checkpoint=without | {"embed": tied}, borrow=lender, recipes={"draft.1.w0": Read("embed")}
        ) as borrower:  # a weight of the draft's own is made of the tensor
            assert wrong_bytes(borrower, draft, borrower.graph(1).replay) == []


def test_shard_files_leave_it_out(tmp_path: Path) -> None:
    target, lender, draft, borrower = pair()
    with lender, borrower:
        borrower.save_shards(tmp_path)
        with compiled(LocalGroup(1)[0], draft, checkpoint=tmp_path, borrow=lender) as again:
            assert wrong_bytes(again, draft, again.graph(1).replay) == []
        lender.update(target.tensors(1))
        with compiled(LocalGroup(1)[0], draft, checkpoint=tmp_path, borrow=lender) as again:
            assert wrong_bytes(again, draft, again.graph(1).replay, 0, 1) == []


def test_the_draft_s_own_update_leaves_it_out_by_name() -> None:
    _, lender, draft, borrower = pair()
    with lender, borrower:
        with pytest.raises(LoadError, match="borrowed  embed: leave it out, it comes with the update of who lends it"):
            borrower.update(draft.tensors(1))
        with pytest.raises(SpecError, match="only='embed' names embed, which is borrowed: update who lends it"):
            borrower.update({"embed": draft.tensors()["embed"]}, only="embed")
        with pytest.raises(SpecError, match="keep='emb\\*' names embed, which is borrowed"):
            borrower.update(draft.owned(1), keep="emb*")
        assert borrower.epoch == 0 and wrong_bytes(borrower, draft, borrower.graph(1).replay) == []
        borrower.ignore = "embed"
        borrower.update(draft.tensors(1, 5))
        assert wrong_bytes(borrower, draft, borrower.graph(1).replay, 1, 0) == []


def refused(model: DraftModel, lender: Runtime | None) -> str:
    with pytest.raises((SpecError, ProgramError)) as caught:
        compiled(LocalGroup(1)[0], model, borrow=lender)
    return str(caught.value)


def test_what_cannot_be_borrowed_is_refused_by_name() -> None:
    group = LocalGroup(1)[0]
    target = LendingModel()
    draft = DraftModel(target)
    assert "model draft borrows embed: give the runtime that has them" in refused(draft, None)
    model = cast("Runtime", target)
    assert "borrow= is of type LendingModel: give what graphshard.compile returned" in refused(draft, model)
    with compiled(group, target, outside_layers=True) as lender:
        text = refused(draft, lender)
        assert "borrows embed, which target shards (unit 0, embed): what is lent stays whole" in text
        assert "exclude=('embed',)" in text
    with compiled(group, ByteModel(((9,),), name="other")) as lender:
        assert "borrows embed, which other does not have; it has other.0.w0" in refused(draft, lender)
    with compiled(group, LendingModel(num_bytes=701)) as lender:
        assert "borrows embed as uint8[700], and target has it as uint8[701]" in refused(draft, lender)
    assert "this runtime is closed" in refused(draft, lender)


def test_weights_on_another_device_are_refused_by_name() -> None:
    gpu = cast("Device", SimpleNamespace(name="cuda:1", driver=SimpleNamespace(is_host=False)))
    target = LendingModel()
    with compiled(LocalGroup(1)[0], target) as lender, pytest.raises(SpecError) as caught:
        borrow_weights(DraftModel(target).spec(), lender, gpu)
    text = "computes on cuda:1 and borrows embed, which target has on cpu: compile both on one device"
    assert text in str(caught.value)


def borrow_unlike(group: Group) -> None:
    target = LendingModel(name="target" if group.rank == 0 else "another")
    with compiled(group, LendingModel()) as first:
        other = first
        if group.rank == 1:
            other = compiled(LocalGroup(1)[0], target)
        compiled(group, DraftModel(target), borrow=other).close()


def test_ranks_that_borrow_of_unlike_lenders_are_told() -> None:
    for outcome in try_on_ranks(borrow_unlike, 2):
        assert outcome.error_type == "CommError" and "lender" in outcome.error, outcome


def test_one_rank_without_a_lender_is_everybody_s_error() -> None:
    for outcome in try_on_ranks(borrow_on_one, 2):
        assert outcome.error_type == "SpecError" and "give the runtime that has them" in outcome.error, outcome


def borrow_on_one(group: Group) -> None:
    target = LendingModel()
    with compiled(group, target) as lender:
        compiled(group, DraftModel(target), borrow=lender if group.rank == 0 else None).close()


def test_a_borrower_of_a_borrower_has_the_first_one_s_memory() -> None:
    target, lender, draft, borrower = pair()
    with lender, borrower, compiled(LocalGroup(1)[0], draft, borrow=borrower) as second:
        lender.update(target.tensors(1))
        assert wrong_bytes(second, draft, second.graph(1).replay, 0, 1) == []
        assert (borrower.epoch, second.epoch) == (2, 2)
        step = second.begin_step(1)
        with pytest.raises(ProgramError, match=r"a step of this thread is open.*nothing was written"):
            lender.update(target.tensors(2))
        step.abort()
        assert (lender.epoch, borrower.epoch, second.epoch) == (2, 2, 2)


def test_the_lender_is_closed_last() -> None:
    _, lender, draft, borrower = pair()
    address = lender.memory._resident_bytes.data_ptr()
    lender.close()
    with pytest.raises(ProgramError, match=r"the runtime of target, which lends embed, is closed: close what borrows"):
        borrower.graph(1).replay()
    collect()
    assert is_mapped(address)  # graphs of the borrower hold it
    borrower.close()
    del lender, borrower, draft
    collect()
    assert not is_mapped(address)


def test_a_step_of_the_draft_ends_before_the_target_is_written() -> None:
    """The draft waits at a latch; the update of what it borrows waits for it, and its next step for the update."""
    latch = Latch(is_open=True)
    target, lender, draft, borrower = pair(hooks=Hooks(stalls=latch.stalls(0)))
    stages: list[str] = []
    object.__setattr__(lender.hooks, "update", stages.append)
    with lender, borrower:
        latch.close()
        replay = borrower.graph(1).replay
        stepping = InThread(replay)
        until(lambda: not borrower._streams["compute"].is_idle(), "the draft's step was launched")
        updating = InThread(lambda: lender.update(target.tensors(1)))
        until(lambda: "stopping" in stages, "the update stops the target")
        assert "stopped" not in stages and borrower.epoch == 0
        latch.open()
        stepping.result()
        assert updating.result().epoch == 2
        assert borrower.epoch == 2 and wrong_bytes(borrower, draft, replay, 0, 1) == []


def test_a_step_of_the_draft_that_does_not_end_keeps_the_old_weights() -> None:
    latch = Latch(is_open=True)
    target, lender, draft, borrower = pair(hooks=Hooks(stalls=latch.stalls(0)), timeout_s=0.3)
    with lender, borrower:
        latch.close()
        replay = borrower.graph(1).replay
        with pytest.raises(CommError, match=r"waited 0\.3 s for step 1"):
            replay()
        with pytest.raises(DeviceError, match=r"still running.*nothing was written: the weights of epoch 0 stay"):
            lender.update(target.tensors(1))
        latch.open()
        until(lambda: all(stream.is_idle() for stream in borrower._streams.values()), "the step has ended")
        assert (lender.epoch, borrower.epoch) == (0, 0) and wrong_bytes(borrower, draft, replay) == []
        lender.update(target.tensors(1))
        assert wrong_bytes(borrower, draft, replay, 0, 1) == []


def test_no_step_of_the_draft_begins_while_the_target_is_written() -> None:
    target, lender, _, borrower = pair()
    begun: list[InThread] = []
    seen: list[tuple[int, int]] = []

    def begin_a_step(stage: str) -> None:
        if stage == "decided":
            begun.append(InThread(borrower.graph(1).replay))
        if stage in ("decided", "writing", "written"):
            seen.append((borrower.num_steps, borrower.epoch % 2))

    object.__setattr__(lender.hooks, "update", begin_a_step)
    with lender, borrower:
        lender.update(target.tensors(1))
        begun[0].result()
        assert len(seen) > 3 and set(seen) == {(0, 1)}
        outputs = borrower.buffers(min(borrower.programs), "output")
        assert torch.equal(outputs["embed:embed"], target.tensors(1)["embed"])


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_of_the_target_that_fails_leaves_the_draft_with_a_version_or_none(stage: str) -> None:
    target, lender, draft, borrower = pair()

    def fail(now: str) -> None:
        if now == stage:
            raise CommError(f"at {stage}")

    with lender, borrower:
        object.__setattr__(lender.hooks, "update", fail)
        with pytest.raises(CommError, match=f"at {stage}"):
            lender.update(target.tensors(1))
        object.__setattr__(lender.hooks, "update", lambda stage: None)
        if STAGES.index(stage) < STAGES.index("decided"):
            assert borrower.epoch == 0 and wrong_bytes(borrower, draft, borrower.graph(1).replay) == []
            return
        assert borrower.epoch % 2 == 1
        for call in (borrower.graph(1).replay, lambda: borrower.run(1), lambda: borrower.update(draft.owned(1))):
            with pytest.raises(CommError, match="of no version"):
                call()
        lender.update(target.tensors(2))
        assert borrower.epoch == 2 and wrong_bytes(borrower, draft, borrower.graph(1).replay, 0, 2) == []


def test_a_step_of_the_draft_that_is_open_here_is_an_error() -> None:
    target, lender, _, borrower = pair()
    with lender, borrower:
        step = borrower.begin_step(1)
        with pytest.raises(ProgramError, match=r"a step of this thread is open.*nothing was written"):
            lender.update(target.tensors(1))
        step.abort()
        assert (lender.epoch, borrower.epoch) == (0, 0)


def update_beside_an_open_step(group: Group, transport: str) -> list[Any]:
    """Rank 1 has a step of its draft open: the target is updated nowhere; then everywhere, a prefetch on its way."""
    target = LendingModel()
    draft = DraftModel(target)
    with (
        compiled(group, target, transport=transport) as lender,
        compiled(group, draft, transport=transport, borrow=lender, head="outside") as borrower,
    ):
        steps = [borrower.begin_step(1)] if group.rank == 1 else []
        if group.rank == 0 and transport == "nccl":
            borrower.run(1)  # what rank 1 issues, all issue
        with pytest.raises(ProgramError, match=r"a step of this thread is open.*nothing was written") as caught:
            lender.update(target.tensors(1))
        del caught
        found: list[Any] = [lender.epoch, borrower.epoch]
        for step in steps:
            step.abort()
        wrong = wrong_bytes(borrower, draft, borrower.graph(1).replay)
        borrower.prefetch(1)
        lender.update(target.tensors(1))
        wrong += wrong_bytes(borrower, draft, borrower.graph(1).replay, 0, 1)
        return [*found, lender.epoch, borrower.epoch, wrong]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_draft_s_open_step_keeps_the_old_weights_on_all_ranks(transport: str) -> None:
    assert run_on_ranks(update_beside_an_open_step, 2, transport) == [[0, 0, 2, 2, []]] * 2


def test_a_draft_that_was_closed_holds_nobody_up() -> None:
    target, lender, _, borrower = pair()
    with lender:
        borrower.close()
        assert lender.update(target.tensors(1)).epoch == 2


def test_what_borrows_nothing_needs_no_lender_and_minds_none() -> None:
    target, lender, _, borrower = pair()
    with lender, borrower, compiled(LocalGroup(1)[0], target, borrow=lender) as other:
        assert other.memory.borrowed == {} and wrong_after(other, target, other.graph(1).replay) == []
