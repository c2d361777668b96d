"""Tensor-parallel steps on a CUDA device that the host driver plays: torch enqueues sums between flags and copies."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from block_model import BlockModel
from fake_torch_cuda import FakeTorchCuda
from joint_programs import compiled, tokens_of
from ranks import run_on_ranks
from torch import Tensor

from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.specs import SegmentSpec, StepShape
from graphshard.device import CudaDevice
from graphshard.device.host import library_path
from graphshard.runtime import activations
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Block, Segment, StepState

_SHARED = ("tokens", "hidden", "features", "result")
_OF_BLOCKS = ("tp.tokens", "tp.gathered", "tp.partial", "tp.summed")
_mine = threading.local()
"""`torch_cuda` of the rank that is this thread."""


class Frozen:
    """The tensors of a segment, found when its kernel is enqueued."""

    def __init__(self, state: StepState, spec: SegmentSpec) -> None:
        names = (*_SHARED, *(_OF_BLOCKS if "tp." in spec.name else ()))
        self._buffers = {name: state.buffer(name) for name in names}
        self._weights = {name: state.weight(name) for name in spec.reads}

    def buffer(self, name: str) -> Tensor:
        return self._buffers[name]

    def weight(self, name: str) -> Tensor:
        return self._weights[name]


class KernelBlocks(BlockModel):
    """Segments enqueue a kernel, as torch's do, instead of computing at once."""

    def __init__(self, torch_cuda: FakeTorchCuda) -> None:
        super().__init__()
        self._torch_cuda = torch_cuda
        self.segments = tuple(map(self._enqueued, self.segments))
        self.blocks = tuple(
            Block(one.spec, *map(self._enqueued, (one.prepare, one.compute, one.finish))) for one in self.blocks
        )

    def _enqueued(self, segment: Segment) -> Segment:
        def run(state: StepState) -> None:
            frozen: Any = Frozen(state, segment.spec)

            def kernel() -> None:
                with torch.inference_mode():
                    segment.run(frozen)

            self._torch_cuda.kernel(kernel)

        return Segment(segment.spec, run)


@pytest.fixture(autouse=True)
def _sums_are_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    add = activations.add_in_order

    def enqueue(received: Tensor, summed: Tensor) -> None:
        def kernel() -> None:
            with torch.inference_mode():
                add(received, summed)

        _mine.torch_cuda.kernel(kernel)

    monkeypatch.setattr(activations, "add_in_order", enqueue)


class Rank:
    """This rank's runtime, on a GPU as far as it can tell."""

    def __init__(self, group: Group, transport: str, **choices: Any) -> None:
        device = CudaDevice(0, library=str(library_path()), same_gpu=True)
        self.torch_cuda = _mine.torch_cuda = FakeTorchCuda(device.driver)
        self.model = KernelBlocks(self.torch_cuda)
        hooks = Hooks(poison=True, torch_cuda=self.torch_cuda)
        self.runtime = compiled(group, self.model, transport, device=device, hooks=hooks, **choices)

    def step(self, shape: StepShape, number: int, run: str) -> list[Tensor]:
        """Enqueue a step and the reading of its outputs: [what it will give, what it should]."""
        tokens = tokens_of(self.runtime.rank, number, shape)
        inputs = self.runtime.buffers(shape, "input")["tokens"]
        self.torch_cuda.kernel(lambda: inputs.copy_(tokens))
        if run == "graph":
            self.runtime.graph(shape.batch_size, shape.tokens_per_sequence).replay()
        else:
            self.runtime.run(shape.batch_size, shape.tokens_per_sequence)
        result, seen = self.runtime.buffers(shape, "output")["result"], torch.empty_like(tokens)
        self.torch_cuda.kernel(lambda: seen.copy_(result))
        return [seen, self.model.expected(tokens)]


def step_ahead(group: Group, transport: str) -> list[int]:
    """Steps of all shapes, eager and captured, enqueued while earlier ones run."""
    rank = Rank(group, transport)
    pairs = []
    with rank.runtime as runtime:
        for number in range(24):
            shape = list(runtime.programs)[number % 4]
            pairs.append(rank.step(shape, number, "graph" if number % 3 else "eager"))
        runtime.synchronize()
        rank.torch_cuda.synchronize(rank.torch_cuda.current_stream())
        group.barrier()
    return [number for number, (seen, expected) in enumerate(pairs) if not torch.equal(seen, expected)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_steps_in_flight_are_exact(world_size: int, transport: str) -> None:
    assert run_on_ranks(step_ahead, world_size, transport) == [[]] * world_size


def miss_a_rank(group: Group) -> str:
    """Rank 1 does not come: nobody waits for the step, and the watchdog or the next wait says so."""
    rank = Rank(group, "pull", timeout_s=1.0)
    said = ""
    with rank.runtime as runtime:
        rank.step(StepShape(1, 1), 1, "graph")
        runtime.synchronize()
        group.barrier()
        if group.rank != 1:
            rank.step(StepShape(1, 1), 2, "graph")
            with pytest.raises(CommError) as caught:
                runtime.synchronize()
            said = str(caught.value)
        group.barrier()
    return said


def test_a_rank_that_does_not_come() -> None:
    said = run_on_ranks(miss_a_rank, 3)
    assert said[1] == "" and said[0] == said[2]
    assert "waited 1.0 s for step 2 of shape 1x1 (graph)" in said[0] and "rank 1 did not" in said[0], said[0]
