"""Folds and borrowed weights on a real card: what `tests/runtime/test_cuda_folds.py` plays, and `test_borrow.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fold_model import DraftModel, FoldModel, LendingModel
from ranks import run_on_ranks

import graphshard
from graphshard._core import Memory, Stream, Word
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.device import CudaDevice
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime

pytestmark = pytest.mark.gpu
TIMEOUT_S = 60.0
CHOICES: dict[str, Any] = {"min_shard_bytes": 0, "units": "layer", "prefetch_depth": 1, "timeout_s": TIMEOUT_S}


def wrong(runtime: Runtime, truth: dict[str, torch.Tensor]) -> list[str]:
    """What the last step's segments saw that was not theirs; read behind it on the current stream."""
    outputs = runtime.buffers(min(runtime.programs), "output")
    return [key for key, seen in outputs.items() if not torch.equal(seen.cpu(), truth[key.split(":")[1]])]


@pytest.mark.parametrize("run", ["graph", "eager"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_fold_ends_while_a_prefetch_is_on_its_way(cuda_device: CudaDevice, world_size: int, run: Any) -> None:
    def fold(group: Group) -> list[Any]:
        model, word = FoldModel(), Word(Memory.allocate_host(cuda_device.driver, 4))
        stream = Stream(cuda_device.driver)
        hooks = Hooks(poison=True, prefetch_stream=stream)
        options = CHOICES | {"device": cuda_device, "hooks": hooks, "head": "outside"}
        with graphshard.compile(model, group, checkpoint=model.tensors(), **options) as runtime:
            shape = StepShape(1)
            state = runtime.buffers(shape, "cache")["state"]
            runtime.graph(1).replay()
            found = wrong(runtime, model.tensors())
            stream.wait_value(word.address, 1)
            runtime.prefetch(1)
            runtime.buffers(shape, "input")["accepted"].fill_(3)
            runtime.fold(1, run=run)
            is_folded = torch.equal(state.cpu(), model.folded([3]))
            is_in_flight = not stream.is_idle()
            word.store(1)
            runtime.graph(1).replay()
            found += wrong(runtime, model.tensors())
            runtime.prefetch(1)
            runtime.discard_prefetch()
            runtime.run(1)
            return [found + wrong(runtime, model.tensors()), is_folded, is_in_flight]

    assert run_on_ranks(fold, world_size) == [[[], True, True]] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_draft_reads_the_target_s_bytes(cuda_device: CudaDevice, world_size: int) -> None:
    def lend(group: Group) -> list[str]:
        target = LendingModel()
        draft, options = DraftModel(target), CHOICES | {"device": cuda_device}
        with (
            graphshard.compile(target, group, checkpoint=target.tensors(), **options) as lender,
            graphshard.compile(draft, group, checkpoint=draft.tensors(), borrow=lender, **options) as borrower,
        ):
            borrower.graph(1).replay()
            found = wrong(borrower, draft.tensors())
            lender.update(target.tensors(1))
            borrower.run(1)
            return found + wrong(borrower, draft.tensors(0, 1))

    assert run_on_ranks(lend, world_size) == [[]] * world_size
