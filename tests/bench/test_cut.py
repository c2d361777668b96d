"""A few layers of a model: what is kept, and that it computes what they compute in the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from graphshard.bench.cut import CutModel
from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.models.module import new_buffers
from graphshard.runtime.model import SegmentedModel, StepState

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
)  # fmt: skip
SHAPE = StepShape(2)
MODEL, WEIGHTS = random_llama(CONFIG, max_batch_size=2, dual=True)
BLOCKS = MODEL.spec().blocks


def hidden_after(model: SegmentedModel, num_segments: int) -> Tensor:
    buffers = new_buffers(model, [SHAPE])[SHAPE]
    weights = {one.path: {name: WEIGHTS[name] for name in one.reads} for one in model.spec().segments}
    state = StepState(SHAPE, weights, buffers)
    state.buffer("tokens").copy_(torch.tensor([[3], [5]]))
    with torch.inference_mode():
        state.run(model.segments[:num_segments])
    return state.buffer("hidden").clone()


def test_the_first_layers_compute_what_they_do_in_the_whole() -> None:
    cut = CutModel(MODEL, BLOCKS[:2])
    assert len(cut.segments) == 1 + 2 * 7
    assert torch.equal(hidden_after(cut, len(cut.segments)), hidden_after(MODEL, len(cut.segments)))


def test_weights_segments_and_blocks_are_those_of_the_layers_alone() -> None:
    cut = CutModel(MODEL, BLOCKS[2:])
    spec = cut.spec()
    assert {one.layer for one in spec.segments} == {None, 2} and spec.segments[0].name == "embed"
    assert {name.split(".")[2] for name in (one.name for one in spec.weights) if ".layers." in name} == {"2"}
    assert "lm_head.weight" not in {one.name for one in spec.weights}
    (block,) = cut.blocks
    assert block.spec == spec.blocks[0]
    assert [one.name for one in spec.segments[block.spec.begin : block.spec.end]] == [
        one.name for one in MODEL.spec().segments[BLOCKS[2].begin : BLOCKS[2].end]
    ]
    assert cut.buffers(SHAPE) == MODEL.buffers(SHAPE)


def test_nothing_and_what_is_borrowed_are_refused() -> None:
    with pytest.raises(SpecError, match="no block to keep"):
        CutModel(MODEL, ())

    class Borrower:
        segments, blocks, buffers = MODEL.segments, MODEL.blocks, MODEL.buffers

        def spec(self):  # type: ignore[no-untyped-def]
            return replace(MODEL.spec(), borrowed=("model.embed_tokens.weight",))

    with pytest.raises(SpecError, match=r"borrows model\.embed_tokens\.weight"):
        CutModel(Borrower(), BLOCKS[:1])
