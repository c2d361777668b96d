"""One all-reduce between two blocks: which models have such pairs, and what one would save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphshard.core.specs import ModelSpec
from graphshard.cost.merged import merge_pairs, merge_times, rates_between, rates_of, why_no_pair
from graphshard.cost.published import hardware
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import Llama

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    tied_embeddings=True,
)  # fmt: skip


def llama(num_layers: int) -> ModelSpec:
    spec = Llama(CONFIG, 1, dual=True).spec()
    return ModelSpec(spec.name, spec.weights, spec.segments, spec.kept, blocks=spec.blocks[:num_layers])


def test_attention_stands_between_the_blocks_of_a_llama() -> None:
    spec = llama(2)
    assert merge_pairs(spec) == ()
    why = why_no_pair(spec)
    assert why.startswith("no such pair in this model: even between layers.0.mlp and layers.1.mlp run layers.1.")
    assert why_no_pair(llama(1)) == "no such pair in this model: it has 1 block"


def test_blocks_that_touch_are_a_pair() -> None:
    spec = llama(2)
    first, second = spec.blocks
    kept = (*spec.segments[: first.end], *spec.segments[second.begin :])
    second = replace(second, begin=first.end, end=first.end + second.end - second.begin)
    touching = ModelSpec(spec.name, spec.weights, kept, blocks=(first, second))
    assert merge_pairs(touching) == ((first, second),) and why_no_pair(touching) == ""


def test_an_all_reduce_saves_a_start_and_costs_everybodys_tokens_between() -> None:
    rates, block = rates_of(hardware("h100")), llama(1).blocks[0]
    few = merge_times(block, 1, 8, rates)
    assert few.separate_us - few.merged_us == pytest.approx(rates.t0_us, abs=0.01)
    many = merge_times(block, 2**20, 8, rates)
    assert many.merged_us > many.separate_us
    size = 2**20 * block.width_out * 4
    norm_us = 2 * size / rates.memory_bytes_per_s * 1e6
    assert many.merged_us - many.separate_us == pytest.approx(7 * norm_us - rates.t0_us)


def test_rates_come_from_two_copies() -> None:
    rates = rates_between((1000, 3.0), (5000, 5.0))
    assert (rates.t0_us, rates.bytes_per_s, rates.memory_bytes_per_s) == pytest.approx((2.5, 2e9, 2e9))
    assert rates_between((1000, 1.0), (2000, 3.0)).t0_us == 0.0
