"""Folds: what runs between steps, beside gathers that are on their way; eager and captured, under both transports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from byte_steps import compile_bytes, wrong_after
from fault_tools import InThread, Latch, until
from fold_model import FoldModel
from ranks import run_on_ranks

import graphshard
from graphshard._core import Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import CommError, DeviceError, LoadError, ProgramError, SpecError
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.device import open_device
from graphshard.runtime.bind import Hooks
from graphshard.runtime.folding import fold_program
from graphshard.runtime.model import Segment, StepState, folds_of
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.whole import whole_weight

TRANSPORTS = ("pull", "nccl")
RUNS = ("graph", "eager")


def compiled(group: Group, model: FoldModel, **choices: Any) -> Runtime:
    defaults: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "head": "outside", "capture_sizes": [1, 2]}
    return compile_bytes(group, model, **(defaults | choices))


def alone(model: FoldModel, **choices: Any) -> Runtime:
    return compiled(LocalGroup(1)[0], model, **choices)


def state_of(runtime: Runtime) -> torch.Tensor:
    """The cache, all rows that the largest step shape sees."""
    return runtime.buffers(max(runtime.programs), "cache")["state"]


def fold(runtime: Runtime, accepted: list[int], run: Any = "graph") -> None:
    """Fold at the step shape of as many rows."""
    shape = StepShape(len(accepted))
    runtime.buffers(shape, "input")["accepted"].copy_(torch.tensor(accepted))
    runtime.fold(len(accepted), run=run)


def fold_in_turns(group: Group, transport: str, run: str, executor: str) -> list[str]:
    """Steps and folds of both kinds and shapes in turn; what is wrong afterwards."""
    model = FoldModel()
    with compiled(group, model, transport=transport, executor=executor) as runtime:
        expected = torch.zeros_like(state_of(runtime))
        table = runtime.buffer_table()
        wrong: list[str] = []
        for number in range(4):
            for accepted in ([number], [2, number + 1]):
                shape = len(accepted)
                act = runtime.graph(shape).replay if number % 2 else (lambda shape=shape: runtime.run(shape))
                wrong += wrong_after(runtime, model, act)
                fold(runtime, accepted, run if number else "eager" if run == "graph" else "graph")
                expected[:shape] += model.folded(accepted)
                if not torch.equal(state_of(runtime), expected):
                    wrong.append(f"fold {runtime.num_folds} left {state_of(runtime).tolist()}")
        assert runtime.num_folds == runtime.num_steps == 8
        assert runtime.buffer_table() == table
        return wrong


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_fold_does_what_its_segment_says(world_size: int, transport: str, run: str) -> None:
    for executor in ("cooperative", "threaded"):
        for wrong in run_on_ranks(fold_in_turns, world_size, transport, run, executor):
            assert wrong == []


def test_ranks_that_are_processes_fold_alike() -> None:
    for wrong in run_on_ranks(fold_in_turns, 2, "nccl", "graph", "cooperative", mode="processes"):
        assert wrong == []


def fold_beside_a_gather(group: Group, transport: str, run: str, discards: bool) -> list[Any]:
    """Prefetch with the prefetch stream stalled, fold, let go, step."""
    model, device, latch = FoldModel(), open_device(), Latch(is_open=True)
    stream = Stream(device.driver)
    hooks = Hooks(poison=True, prefetch_stream=stream)
    with compiled(group, model, transport=transport, device=device, hooks=hooks, timeout_s=20.0) as runtime:
        graph = runtime.graph(1)
        wrong = wrong_after(runtime, model, lambda: runtime.run(1))  # eager, as the prefetch: it need not end before
        latch.close()
        stream.wait_value(latch.word.address, 1)
        runtime.prefetch(1)
        was = (runtime.held, runtime.num_primes, runtime.has_prefetched(1))
        for number in range(3):
            fold(runtime, [number], run)
        is_in_flight = not stream.is_idle()
        untouched = was == (runtime.held, runtime.num_primes, runtime.has_prefetched(1))
        group.barrier("all folded")
        latch.open()
        if discards:
            runtime.discard_prefetch()
            assert not runtime.has_prefetched(1) and runtime.held == (None,) * len(runtime.held)
        wrong += wrong_after(runtime, model, graph.replay)
        gathered_again = runtime.num_primes > was[1]
        wrong += [] if torch.equal(state_of(runtime)[:1], model.folded([3])) else ["the folds are not in the cache"]
        return [wrong, is_in_flight, untouched, was[2], gathered_again]


@pytest.mark.parametrize("discards", [False, True], ids=["kept", "discarded"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fold_runs_while_a_prefetch_is_on_its_way(world_size: int, transport: str, run: str, discards: bool) -> None:
    found = run_on_ranks(fold_beside_a_gather, world_size, transport, run, discards)
    assert found == [[[], True, True, True, discards]] * world_size


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_fold_posts_nothing_to_peers(transport: str) -> None:
    with alone(FoldModel(), transport=transport) as runtime:
        runtime.graph(1).replay()
        before = runtime._alignment.number
        fold(runtime, [1])
        fold(runtime, [1], "eager")
        assert runtime._alignment.number == before


def discard_on_one(group: Group, transport: str) -> list[Any]:
    """Rank 0 discards its prefetch, the others go on with theirs: what the next step says, and how it ends."""
    model = FoldModel()
    with compiled(group, model, transport=transport, timeout_s=10.0) as runtime:
        runtime.prefetch(1)
        if group.rank == 0:
            runtime.discard_prefetch()
        group.barrier("one has discarded")
        try:
            wrong = wrong_after(runtime, model, runtime.graph(1).replay)
            return [wrong, ""]
        except CommError as error:
            return [[], str(error)]
        finally:
            group.barrier("all were told")


def test_under_nccl_a_prefetch_that_one_rank_alone_discards_is_everybody_s_error() -> None:
    for wrong, error in run_on_ranks(discard_on_one, 2, "nccl"):
        assert wrong == [] and "ranks issue different gathers" in error
    assert run_on_ranks(discard_on_one, 2, "pull") == [[[], ""]] * 2


def test_a_prefetch_that_does_not_end_is_discarded_in_bounded_time() -> None:
    model, device, latch = FoldModel(), open_device(), Latch(is_open=True)
    stream = Stream(device.driver)
    with alone(model, device=device, hooks=Hooks(prefetch_stream=stream), timeout_s=0.3) as runtime:
        latch.close()
        stream.wait_value(latch.word.address, 1)
        runtime.prefetch(1)
        with pytest.raises(CommError, match=r"waited 0.3 s for a prefetch after step 0, to discard it"):
            runtime.discard_prefetch()
        with pytest.raises(DeviceError, match="still running"):
            runtime.run(1)
        latch.open()
        until(stream.is_idle, "the prefetch has ended")
        assert wrong_after(runtime, model, lambda: runtime.run(1)) == []


def test_a_discarded_prefetch_is_gathered_again_by_a_prefetch() -> None:
    with alone(FoldModel()) as runtime:
        runtime.prefetch(1)
        assert runtime.has_prefetched(1) and runtime.has_prefetched(2)
        runtime.discard_prefetch()
        runtime.discard_prefetch()  # nothing is on its way: at once
        assert not runtime.has_prefetched(1)
        before = runtime.num_primes
        runtime.prefetch(1)
        assert runtime.has_prefetched(1) and runtime.num_primes > before


def test_a_step_that_expects_nothing_has_what_it_expects() -> None:
    with alone(FoldModel(), head="inside") as runtime:
        assert runtime.has_prefetched(1)


@pytest.mark.parametrize("run", RUNS)
def test_a_late_fold_is_an_error_in_bounded_time(run: Any) -> None:
    model, latch = FoldModel(), Latch(is_open=True)
    with alone(model, hooks=Hooks(fold_stall=latch.word.address), timeout_s=0.3) as runtime:
        runtime.graph(1).replay()
        latch.close()
        with pytest.raises(CommError, match=rf"waited 0.3 s for fold 1 of shape 1x1 \({run}\), after step 1; peers:"):
            runtime.fold(1, run=run)
        with pytest.raises(DeviceError, match="still running"):
            runtime.fold(1, run=run)
        latch.open()
        until(runtime._streams["compute"].is_idle, "the fold has ended")
        fold(runtime, [1], run)
        assert wrong_after(runtime, model, runtime.graph(1).replay) == []


def test_a_step_comes_after_the_fold_before_it() -> None:
    """A fold that stalls on another thread holds up the step, which would overwrite what the fold reads."""
    model, latch = FoldModel(), Latch(is_open=True)
    with alone(model, hooks=Hooks(fold_stall=latch.word.address)) as runtime:
        graph = runtime.graph(1)
        graph.replay()
        latch.close()
        folding = InThread(lambda: fold(runtime, [5]))
        until(lambda: not runtime._streams["compute"].is_idle(), "the fold was launched")
        stepping = InThread(graph.replay)
        assert runtime.num_steps == 1
        latch.open()
        folding.result()
        stepping.result()
        assert runtime.num_steps == 2 and torch.equal(state_of(runtime)[:1], model.folded([5]))


def test_capture_leaves_caches_as_they_are_and_captures_folds_again() -> None:
    model = FoldModel()
    with alone(model, capture_sizes=()) as runtime:
        with pytest.raises(SpecError, match=r"the fold of step shape 1x1 was not captured; captured: none\. Call"):
            runtime.fold(1)
        fold(runtime, [7], "eager")
        runtime.capture()
        assert torch.equal(state_of(runtime)[:1], model.folded([7]))
        fold(runtime, [1])
        runtime.close_graphs()
        with pytest.raises(SpecError, match="was not captured; captured: none"):
            runtime.fold(1)
        runtime.capture()
        fold(runtime, [2])
        assert torch.equal(state_of(runtime)[:1], model.folded([10]))


def test_what_cannot_fold_says_so() -> None:
    model = FoldModel()
    model.folds, plain = (), FoldModel(name="plain")
    with alone(model) as runtime, pytest.raises(SpecError, match=r"model folds has no fold: nothing runs between"):
        runtime.fold(1)
    with alone(plain) as runtime:
        with pytest.raises(SpecError, match="step shape 3x1 is not among the plan's"):
            runtime.fold(3)
        with pytest.raises(SpecError, match="run is 'fast'; known are graph, eager"):
            runtime.fold(1, run="fast")  # type: ignore[arg-type]
        step = runtime.begin_step(1)
        for call in (lambda: runtime.fold(1), runtime.discard_prefetch):
            with pytest.raises(ProgramError, match="a step of this thread is open"):
                call()
        step.abort()
    for call in (lambda: runtime.fold(1), runtime.discard_prefetch, lambda: runtime.has_prefetched(1)):
        with pytest.raises(ProgramError, match="this runtime is closed"):
            call()


def test_a_segment_cannot_fold_and_a_fold_cannot_step() -> None:
    model = FoldModel()
    spec = model.folds[0].spec
    runtimes: list[Runtime] = []

    def step(state: StepState) -> None:
        del state
        if runtimes:
            runtimes[0].run(1)

    model.folds = (Segment(spec, step),)
    with alone(model, capture_sizes=()) as runtime:
        runtimes.append(runtime)
        with pytest.raises(ProgramError, match="segment commit_fold calls run while it runs"):
            runtime.fold(1, run="eager")


def test_an_error_in_a_fold_leaves_the_slots() -> None:
    model = FoldModel()

    def fail(state: StepState) -> None:
        raise ValueError(f"no fold at {state.shape}")

    model.folds = (Segment(model.folds[0].spec, fail),)
    with alone(model, capture_sizes=()) as runtime:
        runtime.prefetch(1)
        held = runtime.held
        with pytest.raises(ValueError, match="no fold at 1x1"):
            runtime.fold(1, run="eager")
        assert runtime.held == held
        assert wrong_after(runtime, model, lambda: runtime.run(1)) == []
        with pytest.raises(ValueError, match="no fold at"):
            runtime.capture()


def test_what_a_fold_reads_is_what_it_declared() -> None:
    model = FoldModel()
    other = model.weights[0].name

    def peek(state: StepState) -> None:
        state.weight(other)

    model.folds = (Segment(model.folds[0].spec, peek),)
    with (
        alone(model, capture_sizes=()) as runtime,
        pytest.raises(ProgramError, match=f"segment commit_fold reads weight {other}, which it did not declare"),
    ):
        runtime.fold(1, run="eager")


def test_a_model_has_the_folds_of_its_spec() -> None:
    model = FoldModel()
    spec = model.spec()
    model.folds = ()
    model.spec = lambda: spec  # type: ignore[method-assign]
    with pytest.raises(SpecError, match="its segments, or folds, differ from those of its spec"):
        alone(model)
    assert folds_of(FoldModel())[0].spec == spec.folds[0]


def test_the_fold_s_list_is_a_program_that_gathers_nothing() -> None:
    spec: ModelSpec = FoldModel().spec()
    lines = fold_program(spec, 2, 3).text().splitlines()
    assert lines[3:] == [
        "   0  gemm layer=- segment=commit_fold units=- stream=compute begin=4 end=5",
        "   1  record_outputs stream=compute",
    ]


def test_shard_files_of_a_plan_that_sharded_it_are_refused_by_name(tmp_path: Path) -> None:
    plain, model = FoldModel(), FoldModel()
    plain.folds = ()
    with alone(plain) as runtime:
        runtime.save_shards(tmp_path)
    group = LocalGroup(1)[0]
    with pytest.raises(LoadError, match=r"have the weight folds\.0\.f_b in chunks, and it stays whole here: it is"):
        graphshard.compile(model, group, checkpoint=tmp_path)
    with pytest.raises(SpecError, match=r"shards the weight folds\.0\.f_b, which stays whole"):
        graphshard.compile(model, group, checkpoint=tmp_path, plan=runtime.plan)


def test_an_update_reaches_what_the_fold_reads() -> None:
    model = FoldModel()
    with alone(model) as runtime:
        fold(runtime, [1])
        runtime.update(model.tensors(1))
        fold(runtime, [1])
        assert torch.equal(state_of(runtime)[:1], model.folded([1]) + model.folded([1], version=1))
        assert torch.equal(whole_weight(runtime, model.f_b.name), model.tensors(1)[model.f_b.name])
