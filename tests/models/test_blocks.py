"""MLPs as blocks: what ranks compute on slices, for tokens of all, is what each computes on whole weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from block_programs import KIMI_K3, LLAMA
from executor import Executor
from sliced_group import Exchange, SlicedGroup, SplicedActivations, SplicedOutputs
from torch import Tensor

from graphshard.core.specs import StepShape
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.models.llama import random_llama
from graphshard.runtime.model import Block, SegmentedModel, StepState, blocks_of

Made = tuple[SegmentedModel, dict[str, Tensor]]
Make = Callable[..., Made]


def _llama(dtype: str, dual: bool = True, **changes: Any) -> Made:
    return random_llama(replace(LLAMA, dtype=dtype, **changes), 5, cache_length=24, dual=dual)


def _kimi(dtype: str, dual: bool = True, fused: bool = True, **choices: Any) -> Made:
    return random_kimi_k3(replace(KIMI_K3, dtype=dtype), 5, cache_length=24, fused=fused, dual=dual, **choices)


MODELS: dict[str, Make] = {
    "llama": _llama,
    "llama with biases": partial(_llama, mlp_bias=True),
    "kimi_k3": _kimi,
    "kimi_k3 unfused": partial(_kimi, fused=False),
}
CLOSE = {"float32": 2**-18, "bfloat16": 2**-5}
"""Of a token's largest number: |sliced - whole| of its hidden state after a block, and of its logits after a step.

Both ways round every product and sum, 2^-24 of them in float32 and 2^-9 in bfloat16, but not the same ones: ranks add
up their shares of the features, and round them to the dtype, before these are added, and gemms of more rows may take
another path. That is a handful of roundings a block, and a step has several, each of which works on in what follows:
2^-20.6 and 2^-5.8 at worst in these models. What is spliced instead of summed is off by 2^-0.5 or more.
"""


def assert_close(got: Tensor, want: Tensor) -> None:
    """Each token by itself, the last dimension being its numbers."""
    assert bool(got.isfinite().all())
    scale = want.abs().amax(-1).clamp(min=1e-6)
    worst = ((got - want).abs().amax(-1) / scale).max().item()
    limit = CLOSE[str(want.dtype).removeprefix("torch.")]
    assert worst <= limit, f"differs by {worst:.2g} of the token's largest number, may by {limit:.2g}"


def _tokens(world_size: int, batch: int, t: int, at: int = 0) -> list[Tensor]:
    """Each rank's own."""
    return [
        torch.randint(96, (batch, t), generator=torch.Generator().manual_seed(100 * at + rank))
        for rank in range(world_size)
    ]


def _steps(made: Made, world_size: int, exchange: Exchange) -> None:
    """Steps of two shapes, sliced and whole, from one history; logits, and caches in the end, must agree."""
    group = SlicedGroup(*made, world_size, exchange)
    alone = [Executor(*made) for _ in range(world_size)]
    position = 0
    for batch, t in ((2, 3), (2, 1), (2, 1)):
        tokens = _tokens(world_size, batch, t, position)
        positions = [torch.arange(position, position + t).expand(batch, t)] * world_size
        found = group.step(tokens, positions)
        for rank in range(world_size):
            assert_close(found[rank], alone[rank].step(tokens[rank], positions[rank]))
        position += t


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_steps_on_slices_are_those_on_whole_weights(make: Make, dtype: str, world_size: int) -> None:
    _steps(make(dtype), world_size, Exchange())


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("exchange", [SplicedOutputs(), SplicedActivations()], ids=["outputs", "activations"])
@pytest.mark.parametrize("make", [_llama, _kimi], ids=["llama", "kimi_k3"])
def test_splicing_features_of_ranks_runs_and_is_found_wrong(make: Make, exchange: Exchange, world_size: int) -> None:
    for dtype in CLOSE:
        with pytest.raises(AssertionError, match="of the token's largest number, may by"):
            _steps(make(dtype), world_size, exchange)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_each_block_alone_adds_what_its_segments_add(make: Make, dtype: str, world_size: int) -> None:
    """Both from the same hidden state; what is added is small beside it, so it is compared without it."""
    model, weights = make(dtype)
    group, seen = SlicedGroup(model, weights, world_size, Exchange()), []

    def compare(block: Block, states: list[StepState], before: list[Tensor]) -> None:
        for state, hidden in zip(states, before, strict=True):
            sliced = state.buffer("hidden").clone()
            state.buffer("hidden").copy_(hidden)
            state.run(model.segments[block.spec.begin : block.spec.end])
            assert_close(sliced, state.buffer("hidden"))
            added = state.buffer("hidden") - hidden
            assert (sliced - state.buffer("hidden")).abs().max() <= CLOSE[dtype] * max(1.0, float(added.abs().max()))
            state.buffer("hidden").copy_(sliced)
        seen.append(block.spec.name)

    group.after_block = compare
    group.step(_tokens(world_size, 2, 3), [torch.arange(3).expand(2, 3)] * world_size)
    assert seen == [block.spec.name for block in blocks_of(model)] and len(seen) >= 2


@pytest.mark.parametrize("make", [_llama, _kimi], ids=["llama", "kimi_k3"])
def test_one_rank_sliced_is_whole(make: Make) -> None:
    """One rank's slices are the weights, and its partial results the sums."""
    _steps(make("float32"), 1, Exchange())


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_other_orientation_changes_last_bits_alone(make: Make, dtype: str) -> None:
    (model, weights), (plain_model, plain_weights) = make(dtype), make(dtype, dual=False)
    assert not blocks_of(plain_model) and not plain_model.spec().blocks
    for block in blocks_of(model):
        (down,) = block.spec.rows
        assert torch.equal(weights[down], plain_weights[down].t()) and weights[down].is_contiguous()
    plain, dual = Executor(plain_model, plain_weights), Executor(model, weights)
    for at in range(3):
        tokens, positions = _tokens(1, 2, 1, at)[0], torch.full((2, 1), at)
        assert_close(dual.step(tokens, positions), plain.step(tokens, positions))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_block_is_the_segments_that_read_its_weights(make: Make) -> None:
    model, _ = make("float32")
    spec, blocks = model.spec(), blocks_of(model)
    assert tuple(block.spec for block in blocks) == spec.blocks
    for block in spec.blocks:
        read = [name for segment in spec.segments[block.begin : block.end] for name in segment.reads]
        assert {*block.weights} <= {*read}
        assert {*read} - {*block.weights} == {*block.prepare.reads, *block.finish.reads} - {*block.weights}
        assert all(segment.layer == block.layer for segment in spec.segments[block.begin : block.end])
        features = {spec.weight(name).shape[0] for name in block.weights}
        assert len(features) == 1, "a rank's slice is as many rows of each"


@pytest.mark.parametrize("make", [_llama, _kimi], ids=["llama", "kimi_k3"])
def test_taps_are_taken_after_the_sum(make: Make) -> None:
    """Of every layer: behind a block they are as close as the residual stream is."""
    untapped, weights = make("float32")
    kind: Any = type(untapped)
    model = kind(untapped.config, 4, 24, taps=(2, 0, 1), dual=True)
    group, alone = SlicedGroup(model, weights, 2, Exchange()), [Executor(model, weights) for _ in range(2)]
    tokens, positions = _tokens(2, 2, 3), torch.arange(3).expand(2, 3)
    group.step(tokens, [positions] * 2)
    for rank, executor in enumerate(alone):
        executor.step(tokens[rank], positions)
        sliced, whole = (one.state(StepShape(2, 3)).buffer("taps") for one in (group.ranks[rank], executor))
        assert bool(whole.any(dim=-1).all())
        width = untapped.spec().blocks[0].width_out
        for begin in range(0, 3 * width, width):
            assert_close(sliced[..., begin : begin + width], whole[..., begin : begin + width])


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_ring_folds_what_sliced_steps_left(world_size: int) -> None:
    made = _kimi("float32", ring=3)
    group, alone = SlicedGroup(*made, world_size, Exchange()), [Executor(*made) for _ in range(world_size)]
    for at in (0, 2):  # of three tokens two count
        tokens, positions = _tokens(world_size, 2, 3, at), torch.arange(at, at + 3).expand(2, 3)
        found = group.step(tokens, [positions] * world_size)
        for rank, executor in enumerate(alone):
            assert_close(found[rank], executor.step(tokens[rank], positions))
            for one in (group.ranks[rank], executor):
                one.fold(StepShape(2, 3), torch.tensor([2, 2]))
