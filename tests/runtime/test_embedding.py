"""Captured steps of a runtime, replayed through libgraphshard.so as a server does, in turn with the runtime's own."""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from embed_api import DRIVER, OK, STATE, TIMEOUT, EmbeddedStep
from fold_model import DraftModel, FoldModel, LendingModel
from ranks import run_on_ranks
from torch import Tensor

from graphshard._core import Memory, Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import CommError, DeviceError, ProgramError
from graphshard.runtime.runtime import Runtime

HEADS = ("inside", "outside", "tail")


def model_of() -> ByteModel:
    return ByteModel([[5000], [3001, 64], [7000], [900]])


def compiled(group: Group, model: ByteModel, head: str) -> Runtime:
    return compile_bytes(group, model, units="layer", prefetch_depth=1, head=head)


def by_c(step: EmbeddedStep) -> None:
    assert step.replay() == OK, step.error
    assert step.wait() == OK, step.error


def sides_in_turn(group: Group, head: str) -> list[str]:
    """C's replays, Python's replays and eager steps, so that every one follows every other."""
    model = model_of()
    with compiled(group, model, head) as runtime:
        graph = runtime.graph(batch_size=1)
        step = EmbeddedStep(graph.handle)
        assert graph.handle == graph.handle
        assert step.info.has_prefetch == (head != "inside")
        c, replay, eager = (lambda: by_c(step)), graph.replay, (lambda: runtime.run(1))
        acts = (c, c, replay, c, eager, c, c, eager, replay, replay, c)
        wrong = [f"act {i}: {line}" for i, act in enumerate(acts) for line in wrong_after(runtime, model, act)]
        step.release()
        return wrong


@pytest.mark.parametrize("head", HEADS)
def test_c_and_python_step_in_turn(head: str) -> None:
    assert run_on_ranks(sides_in_turn, 2, head) == [[], []]


def outlived(group: Group, head: str) -> list[str]:
    """The runtime is closed and dropped; then the server replays on."""
    model = model_of()
    runtime = compiled(group, model, head)
    graph = runtime.graph(batch_size=1)
    step = EmbeddedStep(graph.handle)
    names = list(graph.outputs)
    runtime.close()
    assert graph.is_closed
    with pytest.raises(DeviceError, match="is closed"):
        _ = graph.handle
    del runtime, graph
    gc.collect()
    group.barrier()
    for _ in range(3):
        for name in names:
            tensor = step.buffer("output", name)
            ctypes.memset(tensor.address, 0, tensor.num_bytes)
        by_c(step)
    wrong = model.wrong({name: view(step, name) for name in names})
    group.barrier()
    step.release()
    return wrong


def view(step: EmbeddedStep, name: str) -> Tensor:
    tensor = step.buffer("output", name)
    return torch.frombuffer(bytearray(ctypes.string_at(tensor.address, tensor.num_bytes)), dtype=torch.uint8)


@pytest.mark.parametrize("head", HEADS)
def test_a_server_replays_on_after_the_runtime_is_gone(head: str) -> None:
    assert run_on_ranks(outlived, 2, head) == [[], []]


def prefetched_and_left(group: Group, head: str) -> list[str]:
    """C's prefetch is held up: steps of the runtime wait for it, each of them, and rely on nothing in the slots."""
    model = model_of()
    with compiled(group, model, head) as runtime:
        graph = runtime.graph(batch_size=1)
        step = EmbeddedStep(graph.handle)
        wrong = wrong_after(runtime, model, graph.replay)
        latch, opener = Memory(runtime.driver, 4), Stream(runtime.driver)
        runtime._streams["prefetch"].wait_value(latch.address, 1)
        assert step.api.gs_step_prefetch(step.pointer) == OK, step.error
        patience, runtime.timeout_s = runtime.timeout_s, 0.05
        for act in (graph.replay, lambda: runtime.run(1)):
            with pytest.raises(CommError, match=r"waited 0\.1 s for replay 0, or a prefetch, of the server"):
                act()
        runtime.timeout_s = patience
        opener.write_value(latch.address, 1)
        wrong += wrong_after(runtime, model, graph.replay)
        step.release()
        return wrong


@pytest.mark.parametrize("head", ["outside", "tail"])
def test_a_prefetch_of_the_servers_counts_as_a_use_of_the_slots(head: str) -> None:
    assert run_on_ranks(prefetched_and_left, 2, head) == [[], []]


def between(group: Group, head: str, use: str) -> list[str]:
    """The runtime gathers between two of C's replays: what C's left in the slots is worth nothing."""
    model = model_of()
    with compiled(group, model, head) as runtime:
        step = EmbeddedStep(runtime.graph(batch_size=1).handle)
        wrong = wrong_after(runtime, model, lambda: by_c(step))
        for _ in range(2):
            runtime.check_gathers() if use == "check" else runtime.prefetch(1)
            wrong += wrong_after(runtime, model, lambda: by_c(step))
        step.release()
        return wrong


@pytest.mark.parametrize("use", ["check", "prefetch"])
@pytest.mark.parametrize("head", HEADS)
def test_gathers_of_the_runtime_between_replays_of_the_server(head: str, use: str) -> None:
    assert run_on_ranks(between, 2, head, use) == [[], []]


def behind_a_prefetch(group: Group) -> list[str]:
    """The runtime's prefetch is held up: C's next replay comes after it."""
    model = model_of()
    with compiled(group, model, "tail") as runtime:
        step = EmbeddedStep(runtime.graph(batch_size=1).handle)
        latch, opener = Memory(runtime.driver, 4), Stream(runtime.driver)
        runtime._streams["prefetch"].wait_value(latch.address, 1)
        runtime.prefetch(1)
        assert step.replay() == OK and step.wait(0.05) == TIMEOUT
        opener.write_value(latch.address, 1)
        assert step.wait() == OK
        wrong = wrong_after(runtime, model, lambda: by_c(step))
        step.release()
        return wrong


def test_a_server_replays_after_a_prefetch_of_the_runtimes() -> None:
    assert run_on_ranks(behind_a_prefetch, 2) == [[], []]


def refused(group: Group) -> list[int]:
    model = model_of()
    with compiled(group, model, "inside") as runtime:
        step = EmbeddedStep(runtime.graph(batch_size=1).handle)
        status = step.replay(2)
        by_c(step)
        assert runtime.num_steps == 0  # C's are not counted
        step.release()
        return [status]


def test_default_streams_are_refused() -> None:
    assert run_on_ranks(refused, 2) == [[DRIVER], [DRIVER]]


def alike_by_promise(group: Group) -> list[str]:
    """nccl: without a promise there is no handle; with it C and Python replay in turn, on both ranks alike."""
    model = model_of()
    with compile_bytes(group, model, units="layer", prefetch_depth=1, transport="nccl") as runtime:
        graph = runtime.graph(batch_size=1)
        with pytest.raises(ProgramError, match=r"step shape 1x1: its gathers need all ranks.*promise_alike\(\)"):
            _ = graph.handle
        graph.promise_alike()
        step = EmbeddedStep(graph.handle)
        c, replay, eager = (lambda: by_c(step)), graph.replay, (lambda: runtime.run(1))
        acts = (c, replay, c, eager, c, c, eager, replay, c)
        wrong = [f"act {i}: {line}" for i, act in enumerate(acts) for line in wrong_after(runtime, model, act)]
        step.release()
        return wrong


def test_under_nccl_a_server_replays_what_all_ranks_promised_to_replay() -> None:
    assert run_on_ranks(alike_by_promise, 2) == [[], []]


def unlike_by_c(group: Group) -> list[str | None]:
    """Rank 0 replays once more than rank 1, which closes; how rank 0's wait ended, and why it must exit."""
    runtime = compile_bytes(group, model_of(), units="layer", prefetch_depth=1, transport="nccl")
    graph = runtime.graph(batch_size=1)
    graph.promise_alike()
    step = EmbeddedStep(graph.handle)
    by_c(step)
    late = ""
    if group.rank == 0:
        assert step.replay() == OK, step.error
        assert step.wait(0.05) == TIMEOUT
        late = step.error
    group.barrier("one has waited")
    if group.rank == 1:
        step.release()
        runtime.close()
    group.barrier("rank 1 has closed")
    runtime.close()
    return [late, runtime.must_exit]


@pytest.mark.slow
def test_under_nccl_closing_after_unlike_replays_of_c_looks_at_the_peers(capfd: pytest.CaptureFixture[str]) -> None:
    """Long before the limit of 30 s, and saying why. In processes: the gather stays stuck until they end."""
    (late, must_exit), (_, other) = run_on_ranks(unlike_by_c, 2, mode="processes")
    assert late == (
        "the outputs of step shape 1x1 (transport nccl) did not come within 50 ms; "
        "its gathers need all ranks: a peer may not have replayed it"
    )
    said = capfd.readouterr().err
    assert "rank 0 closes before what it enqueued has ended: rank 1 (pid " in said, said
    assert "closed its runtime, and may not have come to it" in said
    assert other is None and f"rank 0: this process must exit: {must_exit} (rank 1 " in said, said


@pytest.mark.parametrize("head", ["outside", "tail"])
def test_under_nccl_a_server_issues_no_gathers_beside_the_graph(head: str) -> None:
    def refused(group: Group) -> str:
        model = model_of()
        with compile_bytes(group, model, units="layer", prefetch_depth=1, transport="nccl", head=head) as runtime:
            graph = runtime.graph(batch_size=1)
            graph.promise_alike()
            with pytest.raises(ProgramError) as caught:
                _ = graph.handle
            return str(caught.value)

    for text in run_on_ranks(refused, 2):
        assert "step shape 1x1 begins with units in its slots" in text and "head='inside'" in text


def folds_in_turn(group: Group, head: str) -> list[str]:
    """C's replays and prefetches, folds of both kinds, and Python's replays, in turn."""
    model, total = FoldModel(), 0
    with compile_bytes(group, model, units="layer", prefetch_depth=1, head=head) as runtime:
        graph, shape = runtime.graph(batch_size=1), min(runtime.programs)
        step = EmbeddedStep(graph.handle)
        accepted, state = runtime.buffers(shape, "input")["accepted"], runtime.buffers(shape, "cache")["state"]
        c, replay = (lambda: by_c(step)), graph.replay
        wrong = []
        for number, act in enumerate((c, replay, c, c, replay, c)):
            wrong += wrong_after(runtime, model, act)
            assert act is replay or head == "inside" or not runtime.has_prefetched(1)  # slots are C's
            if number % 2:
                assert step.api.gs_step_prefetch(step.pointer) == OK, step.error
            accepted.fill_(number)
            runtime.fold(1, run="eager" if number in (2, 3) else "graph")
            total += number
            if not torch.equal(state, model.folded([total])):
                wrong.append(f"fold {number} left something else")
        step.release()
        return wrong


@pytest.mark.parametrize("head", HEADS)
def test_folds_between_replays_of_c(head: str) -> None:
    assert run_on_ranks(folds_in_turn, 2, head) == [[], []]


def test_c_replays_no_draft_while_the_target_is_updated() -> None:
    target, group = LendingModel(), LocalGroup(1)[0]
    draft = DraftModel(target)
    with compiled(group, target, "inside") as lender, compile_bytes(group, draft, borrow=lender) as borrower:
        step = EmbeddedStep(borrower.graph(1).handle)
        by_c(step)
        codes: dict[str, int] = {}
        object.__setattr__(lender.hooks, "update", lambda stage: codes.setdefault(stage, step.replay()))
        lender.update(target.tensors(1))
        assert {codes[stage] for stage in ("stopped", "decided", "writing", "written", "checked")} == {STATE}
        assert codes["staging"] == OK and "are being written" in step.error
        by_c(step)
        seen = borrower.buffers(min(borrower.programs), "output")["embed:embed"]
        assert torch.equal(seen, target.tensors(1)["embed"])
        step.release()
