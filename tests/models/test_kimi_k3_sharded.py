"""Kimi K3 over ranks: logits and states equal bit for bit to those of one rank that holds everything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from kimi_k3_reference import SIZES, SMALL
from ranks import run_on_ranks

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.specs import StepShape
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.runtime.runtime import Runtime

CONFIG = replace(SMALL, sizes=replace(SIZES, num_layers=3))  # KDA and a dense MLP, KDA and experts, MLA and experts
SHAPES = [(2, 3), (2, 1)]
LENGTHS = (3, 2)
"""Of the two prompts."""


def both_ways(group: Group, dtype: str, fused: bool, choices: dict[str, Any]) -> list[str]:
    """Two prompts of unequal length in a step of three, then three steps: eagerly, and once more as graphs.

    Bits of logits, caches and states of each way; the second begins on what the first has left.
    """
    model, weights = random_kimi_k3(replace(CONFIG, dtype=dtype), 5, max_batch_size=2, fused=fused)
    with graphshard.compile(model, group, checkpoint=weights, capture_sizes=SHAPES, **choices) as runtime:
        if choices.get("plan") != "replicated" and group.world_size > 1:
            assert len(runtime.plan.units) >= 3
        return [_decode(runtime, run) for run in (lambda shape: runtime.run(*shape), _replay(runtime))]


def _replay(runtime: Runtime) -> Callable[[tuple[int, int]], None]:
    return lambda shape: runtime.graph(*shape).replay()


def _decode(runtime: Runtime, run: Callable[[tuple[int, int]], None]) -> str:
    prompts = torch.tensor([[7, 11, 13], [17, 19, 0]])
    positions = torch.arange(3).expand(2, 3).where(prompts > 0, -1)
    seen = [_step(runtime, run, prompts, positions)]
    for at in range(3):
        tokens, where = torch.tensor([[3 * at + 1], [5 * at + 2]]), torch.tensor(LENGTHS)[:, None] + at
        seen.append(_step(runtime, run, tokens, where))
    caches = runtime.buffers(StepShape(2), "cache")
    seen += [caches[name][:, :-1] if name.endswith("latent_cache") else caches[name] for name in sorted(caches)]
    assert all(bool(tensor.isfinite().all()) for tensor in seen)
    return "\n".join(str(tensor.float().flatten().view(torch.int32).tolist()) for tensor in seen)


def _step(
    runtime: Runtime, run: Callable[[tuple[int, int]], None], tokens: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    shape = StepShape(*tokens.shape)
    inputs = runtime.buffers(shape, "input")
    inputs["tokens"].copy_(tokens)
    inputs["positions"].copy_(positions)
    run((shape.batch_size, shape.tokens_per_sequence))
    logits = runtime.buffers(shape, "output")["logits"].clone()
    return logits.where(positions[..., None] >= 0, torch.zeros((), dtype=logits.dtype))


@cache
def _replicated(dtype: str, fused: bool) -> str:
    eager, captured = both_ways(LocalGroup(1)[0], dtype, fused, {"plan": "replicated"})
    assert eager == captured
    return eager


CASES = [
    (1, "float32", True, {"units": "layer", "prefetch_depth": 1}),
    (2, "float32", True, {"units": "weight", "prefetch_depth": 1, "transport": "nccl"}),
    (2, "bfloat16", False, {"units": "layer", "prefetch_depth": 1, "executor": "threaded"}),
    (4, "float32", True, {"units": "layer", "prefetch_depth": 1, "head": "tail"}),
]
MORE = [
    (4, "float32", True, {"units": "layer", "prefetch_depth": 0, "transport": "nccl"}),
    (2, "bfloat16", True, {"units": "weight", "prefetch_depth": 0}),
    (1, "bfloat16", False, {"units": "weight", "prefetch_depth": 0}),
    (2, "float32", True, {"units": "bytes:40KiB", "prefetch_depth": 2}),
    (2, "bfloat16", True, {"units": "layer", "prefetch_depth": 1, "transport": "nccl"}),
    (3, "float32", False, {"units": "layer", "prefetch_depth": 1, "head": "outside"}),
    (4, "bfloat16", False, {"units": "weight", "prefetch_depth": 1}),
]


@pytest.mark.parametrize(
    ("world_size", "dtype", "fused", "choices"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_sharded_equals_replicated_bit_for_bit(
    world_size: int, dtype: str, fused: bool, choices: dict[str, Any]
) -> None:
    want = _replicated(dtype, fused)
    for eager, captured in run_on_ranks(both_ways, world_size, dtype, fused, choices):
        assert eager == want
        assert captured == want


def test_both_variants_give_the_same_bits() -> None:
    assert _replicated("bfloat16", True) == _replicated("bfloat16", False)
    assert _replicated("float32", True) != _replicated("bfloat16", True)
