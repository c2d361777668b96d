"""What ranks of the block tests run: a dual model's steps, eagerly and as graphs, on tokens of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from executor import Executor
from kimi_k3_reference import SIZES
from kimi_k3_reference import SMALL as KIMI

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.models.llama import random_llama
from graphshard.runtime.model import SegmentedModel, blocks_of

LLAMA = LlamaConfig(
    vocab_size=101, hidden_size=48, intermediate_size=96, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8
)
KIMI_K3 = replace(KIMI, sizes=replace(SIZES, num_layers=3, hidden=96, shared=96))
"""KDA and a dense MLP, KDA and experts, MLA and experts; all divide by 2, 3 and 4."""
SHAPES = [(2, 3), (2, 1)]
STEPS = ((2, 3), (2, 1), (2, 1))


def make(family: str, dtype: str) -> tuple[SegmentedModel, dict[str, torch.Tensor]]:
    """The dual model and its weights: the same on every rank."""
    if family == "llama":
        return random_llama(replace(LLAMA, dtype=dtype), 5, 2, 24, dual=True)
    return random_kimi_k3(replace(KIMI_K3, dtype=dtype), 5, 2, 24, dual=True)


def steps_of(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and positions of a rank's steps, disjoint from other ranks'."""
    found, at = [], 0
    for batch, t in STEPS:
        generator = torch.Generator().manual_seed(100 * at + rank)
        found.append((torch.randint(96, (batch, t), generator=generator), torch.arange(at, at + t).expand(batch, t)))
        at += t
    return found


def alone(family: str, dtype: str, rank: int) -> list[list[float]]:
    """The logits of a rank's steps where it holds whole weights and computes by itself."""
    executor = Executor(*make(family, dtype))
    return [executor.step(tokens, positions).float().flatten().tolist() for tokens, positions in steps_of(rank)]


def both_ways(group: Group, family: str, dtype: str, choices: dict[str, Any]) -> dict[str, Any]:
    """`logits` of the steps, run eagerly and as graphs; `modes` of blocks by step shape."""
    model, weights = make(family, dtype)
    options = {"min_shard_bytes": 0, **choices}
    with graphshard.compile(model, group, checkpoint=weights, capture_sizes=SHAPES, **options) as runtime:
        assert sum(unit.is_sliced for unit in runtime.plan.units) == len(blocks_of(model)) >= 2
        told: dict[str, Any] = {"eager": [], "graph": []}
        for run, logits in told.items():
            for tokens, positions in steps_of(group.rank):
                shape = StepShape(*tokens.shape)
                inputs = runtime.buffers(shape, "input")
                inputs["tokens"].copy_(tokens)
                inputs["positions"].copy_(positions)
                if run == "eager":
                    runtime.run(*tokens.shape)
                else:
                    runtime.graph(*tokens.shape).replay()
                logits.append(runtime.buffers(shape, "output")["logits"].float().flatten().tolist())
        told["modes"] = {f"{b}x{t}": list(runtime.plan.modes_of(StepShape(b, t))) for b, t in SHAPES}
        group.barrier("steps done")
        return told
