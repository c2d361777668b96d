"""Folds on a CUDA device that the host driver plays: captured by torch beside each step, ordered, bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from cuda_rig import TIMEOUT_S, KernelModel, Plot, nth, raiser
from fake_torch_cuda import FakeTorchCuda
from fault_tools import InThread, Latch, until
from ranks import run_on_ranks

import graphshard
from graphshard._core import Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import CommError, DeviceError, SpecError
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.device import CudaDevice
from graphshard.device.host import library_path
from graphshard.runtime.bind import Hooks
from graphshard.runtime.cuda.compute import NUM_WARM_UPS, CudaCompute
from graphshard.runtime.cuda.in_flight import MAX_STEPS
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

WIDTH = 8
FOLD = "commit_fold"


class KernelFolds(KernelModel):
    """Byte kernels, and a fold whose kernel adds `accepted[0] * f_b` to the cache `state`."""

    def __init__(self, torch_cuda: FakeTorchCuda, plot: Plot) -> None:
        super().__init__(torch_cuda, plot)
        self.f_b = WeightSpec("f_b", (WIDTH,), "uint8")
        self.weights.append(self.f_b)
        self._torch_cuda, self._plot = torch_cuda, plot
        self.folds = (Segment(SegmentSpec(FOLD, None, ("f_b",)), self._fold),)

    def spec(self) -> ModelSpec:
        return replace(super().spec(), folds=tuple(fold.spec for fold in self.folds))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        accepted = BufferSpec("accepted", (shape.batch_size,), "int64", "input")
        return (*super().buffers(shape), accepted, BufferSpec("state", (2, WIDTH), "int64", "cache"))

    def _fold(self, state: StepState) -> None:
        self._plot.runs.append(FOLD)
        self._plot.before.get(FOLD, lambda: None)()
        into, accepted = state.buffer("state")[0].numpy(), state.buffer("accepted").numpy()
        weight = state.weight("f_b").numpy()

        def kernel() -> None:
            into[:] += accepted[0] * weight

        self._torch_cuda.kernel(kernel)


class Rank:
    """This rank's runtime, with folds, on a GPU of its own as far as it can tell."""

    def __init__(self, group: Group, *, hooks: dict[str, Any] | None = None, **choices: Any) -> None:
        self.device = CudaDevice(0, library=str(library_path()), same_gpu=True)
        self.torch_cuda, self.plot = FakeTorchCuda(self.device.driver), choices.pop("plot", Plot())
        self.model = KernelFolds(self.torch_cuda, self.plot)
        made = {name: make(self.device) for name, make in (hooks or {}).items()}
        defaults = {"min_shard_bytes": 0, "capture_sizes": [1], "timeout_s": TIMEOUT_S, "head": "outside"}
        self.runtime: Runtime = graphshard.compile(
            self.model,
            group,
            checkpoint=self.model.tensors(),
            device=self.device,
            hooks=Hooks(poison=True, torch_cuda=self.torch_cuda, **made),
            **(defaults | choices),
        )

    @property
    def shape(self) -> StepShape:
        return min(self.runtime.programs)

    def accept(self, number: int) -> None:
        """By work on the current stream, as a server's sampling does it."""
        accepted = self.runtime.buffers(self.shape, "input")["accepted"].numpy()
        self.torch_cuda.kernel(lambda: accepted.fill(number))

    def state(self) -> torch.Tensor:
        """The cache, as work on the current stream finds it."""
        cache, seen = self.runtime.buffers(self.shape, "cache")["state"], torch.empty(WIDTH, dtype=torch.int64)
        self.torch_cuda.kernel(lambda: seen.copy_(cache[0]))
        self.torch_cuda.synchronize(self.torch_cuda.current_stream())
        return seen

    def folded(self, total: int) -> torch.Tensor:
        return total * self.model.tensors()["f_b"].to(torch.int64)

    def wrong(self) -> list[str]:
        """What the last step's segments saw that was not theirs."""
        outputs = self.runtime.buffers(self.shape, "output")
        seen: list[str] = []
        self.torch_cuda.kernel(lambda: seen.extend(self.model.wrong(outputs)))
        self.torch_cuda.synchronize(self.torch_cuda.current_stream())
        return seen

    def release(self, latch: Latch) -> None:
        latch.open()
        for stream in self.runtime._streams.values():
            assert stream.synchronize(TIMEOUT_S)


def fold_in_turns(group: Group, transport: str) -> list[str]:
    rank = Rank(group, transport=transport)
    with rank.runtime as runtime:
        wrong, total = [], 0
        for number in range(1, 7):
            if number % 3:
                runtime.graph(1).replay()
            else:
                runtime.run(1)
            wrong += rank.wrong()
            rank.accept(number)
            runtime.fold(1, run="graph" if number % 2 else "eager")
            total += number
            if not torch.equal(rank.state(), rank.folded(total)):
                wrong.append(f"fold {number} left something else")
        runtime.synchronize()
        assert runtime.num_folds == 6
    assert rank.torch_cuda.log.count("reset") == 2
    return wrong


@pytest.mark.parametrize("transport", ["pull", "nccl"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fold_is_ordered_between_the_caller_s_work(world_size: int, transport: str) -> None:
    assert run_on_ranks(fold_in_turns, world_size, transport) == [[]] * world_size


def fold_beside_a_gather(group: Group, transport: str, run: Any) -> list[Any]:
    latch = Latch(is_open=True)
    rank = Rank(group, transport=transport, hooks={"prefetch_stream": lambda device: Stream(device.driver)})
    with rank.runtime as runtime:
        stream = runtime.hooks.prefetch_stream
        assert stream is not None
        runtime.run(1)
        runtime.synchronize()
        latch.close()
        stream.wait_value(latch.word.address, 1)
        runtime.prefetch(1)
        held = runtime.held
        rank.accept(3)
        runtime.fold(1, run=run)
        folded = torch.equal(rank.state(), rank.folded(3))  # waits for the caller's stream, behind the fold
        is_in_flight = not stream.is_idle()
        runtime.synchronize()
        group.barrier("all folded")
        untouched = runtime.held == held and not stream.is_idle()
        latch.open()
        runtime.graph(1).replay()
        return [folded, is_in_flight, untouched, rank.wrong()]


@pytest.mark.parametrize("run", ["graph", "eager"])
@pytest.mark.parametrize("transport", ["pull", "nccl"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fold_ends_while_a_prefetch_is_on_its_way(world_size: int, transport: str, run: str) -> None:
    assert run_on_ranks(fold_beside_a_gather, world_size, transport, run) == [[True, True, True, []]] * world_size


def alone(**choices: Any) -> Rank:
    return Rank(LocalGroup(1)[0], **choices)


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_the_host_waits_only_for_a_third_fold(run: Any) -> None:
    latch = Latch(is_open=True)
    rank = alone(hooks={"fold_stall": lambda device: latch.word.address}, timeout_s=0.5)
    with rank.runtime as runtime:
        latch.close()
        for _ in range(MAX_STEPS):
            runtime.fold(1, run=run)
        with pytest.raises(CommError, match=rf"waited 0.5 s for fold 1 of shape 1x1 \({run}\), after step 0"):
            runtime.fold(1, run=run)
        with pytest.raises(DeviceError, match="still running"):
            runtime.run(1)
        rank.release(latch)
        runtime.run(1)
        assert rank.wrong() == [] and runtime.num_folds == MAX_STEPS


def test_to_synchronize_is_to_wait_for_folds_too() -> None:
    latch = Latch(is_open=True)
    rank = alone(hooks={"fold_stall": lambda device: latch.word.address}, timeout_s=0.3)
    with rank.runtime as runtime:
        runtime.graph(1).replay()
        runtime.synchronize()
        latch.close()
        runtime.fold(1)
        with pytest.raises(CommError, match=r"waited 0\.3 s for fold 1 of shape 1x1"):
            runtime.synchronize()
        rank.release(latch)
        runtime.synchronize()


def test_a_step_comes_after_the_fold_before_it() -> None:
    latch = Latch(is_open=True)
    rank = alone(hooks={"fold_stall": lambda device: latch.word.address})
    with rank.runtime as runtime:
        runtime.run(1)
        runtime.synchronize()
        outputs = runtime.buffers(rank.shape, "output")
        for tensor in outputs.values():
            tensor.zero_()
        latch.close()
        runtime.fold(1)
        runtime.graph(1).replay()  # enqueued, behind the fold
        assert not any(tensor.any() for tensor in outputs.values())
        rank.release(latch)
        assert rank.wrong() == []


def test_kernels_of_folds_are_loaded_before_the_first_gather() -> None:
    runs: list[int] = []
    plot, check = Plot(), Runtime.check_gathers

    def checked(self: Runtime, rank: int | None = None) -> None:
        runs.append(plot.runs.count(FOLD))
        check(self, rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "check_gathers", checked)
        alone(capture_sizes=(), plot=plot).runtime.close()
    assert runs == [NUM_WARM_UPS]


def test_captures_leave_caches_and_share_the_pool() -> None:
    rank = alone(capture_sizes=())
    with rank.runtime as runtime:
        cache = runtime.buffers(rank.shape, "cache")["state"]
        cache.fill_(3)
        with pytest.raises(SpecError, match="the fold of step shape 1x1 was not captured"):
            runtime.fold(1)
        runtime.capture()
        assert bool((cache == 3).all())
        assert len(set(map(id, rank.torch_cuda.pools))) == 1 and len(rank.torch_cuda.pools) == 2
        rank.accept(1)
        runtime.fold(1)
        runtime.close_graphs()
        assert rank.torch_cuda.log.count("reset") == 2
        runtime.capture()
        runtime.fold(1)
        runtime.synchronize()
        assert torch.equal(rank.state(), rank.folded(2) + 3)


def test_a_capture_leaves_what_a_fold_in_flight_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    latch = Latch(is_open=True)
    rank = alone(hooks={"fold_stall": lambda device: latch.word.address}, capture_sizes=())
    with rank.runtime as runtime:
        rank.accept(1)
        latch.close()
        runtime.fold(1, run="eager")
        drain = CudaCompute._drain

        def drained(self: CudaCompute, streams: Sequence[Stream], what: str) -> None:
            latch.open()  # what is looked at before this sees the fold stand still
            drain(self, streams, what)

        monkeypatch.setattr(CudaCompute, "_drain", drained)
        runtime.capture()
        assert torch.equal(rank.state(), rank.folded(1))


def test_a_fold_that_cannot_be_captured_leaves_nothing_captured() -> None:
    rank = alone(capture_sizes=())
    with rank.runtime as runtime:
        rank.plot.before[FOLD] = nth(NUM_WARM_UPS + 1, raiser(RuntimeError("no")))
        with pytest.raises(DeviceError, match="segment commit_fold cannot be captured: no"):
            runtime.capture()
        with pytest.raises(SpecError, match="no captured step fits"):
            runtime.graph(1)
        rank.plot.before.clear()
        runtime.capture()
        runtime.fold(1)
        runtime.graph(1).replay()
        assert rank.wrong() == []


def test_folds_in_flight_end_before_the_runtime_is_closed() -> None:
    latch = Latch(is_open=True)
    rank = alone(hooks={"fold_stall": lambda device: latch.word.address})
    rank.accept(2)
    cache = rank.runtime.buffers(rank.shape, "cache")["state"]
    latch.close()
    rank.runtime.fold(1)
    closing = InThread(rank.runtime.close)
    until(lambda: rank.runtime.is_closed, "the runtime is being closed")
    assert closing.is_alive() and not torch.equal(cache[0], rank.folded(2))
    latch.open()
    closing.result()
    assert torch.equal(cache[0], rank.folded(2))
