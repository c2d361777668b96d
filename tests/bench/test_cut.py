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
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.models.llama import random_llama
from graphshard.models.module import new_buffers
from graphshard.models.specs.kimi_k3 import KimiK3Config
from graphshard.runtime.model import SegmentedModel, StepState
from graphshard.schedule.tuned import kind_of

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


def test_a_layer_of_a_kimi_k3_keeps_its_shared_expert_and_what_runs_before_it() -> None:
    sizes = KimiK3Config(
        hidden=64, vocab=96, num_layers=3, mla_layers=frozenset({2}), dense_layers=1, intermediate=96, heads=2,
        q_lora=32, kv_lora=32, qk_nope=16, qk_rope=16, v_head=16, kda_heads=2, kda_head=32, conv_taps=4, experts=6,
        top_k=2, expert_size=32, latent=32, shared=64,
    )  # fmt: skip
    model = KimiK3(KimiK3ModelConfig(sizes, dtype="float32"), 1, dual=True)
    whole = model.spec()
    cut = CutModel(model, whole.blocks[-1:])
    (block,) = cut.spec().blocks
    last = whole.blocks[-1]
    kept = [one for one in whole.segments if one.layer == last.layer]
    assert [one for one in cut.spec().segments if one.layer is not None] == kept
    assert cut.spec().segments[block.begin : block.end] == whole.segments[last.begin : last.end]
    assert kind_of(cut.spec(), block) == kind_of(whole, last) == kind_of(whole, whole.blocks[0])


def test_nothing_and_what_is_borrowed_are_refused() -> None:
    with pytest.raises(SpecError, match="no block to keep"):
        CutModel(MODEL, ())

    class Borrower:
        segments, blocks, buffers = MODEL.segments, MODEL.blocks, MODEL.buffers

        def spec(self):  # type: ignore[no-untyped-def]
            return replace(MODEL.spec(), borrowed=("model.embed_tokens.weight",))

    with pytest.raises(SpecError, match=r"borrows model\.embed_tokens\.weight"):
        CutModel(Borrower(), BLOCKS[:1])
