"""What ranks of the block tests run: a dual model's steps, eagerly and as graphs, on tokens of their own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from executor import Executor
from kimi_k3_reference import SIZES
from kimi_k3_reference import SMALL as KIMI

import graphshard
from graphshard.bench.memory import read_pss, settle
from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.models.llama import random_llama
from graphshard.runtime.model import SegmentedModel, blocks_of
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.tuned import MODES, Tuned, TunedRow, kinds_of

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


PREFILL, DECODE = (2, 8), (2, 1)
"""Step shapes; the longer one's blocks are gathered."""


def in_turn(group: Group, family: str, num_steps: int, choices: dict[str, Any]) -> dict[str, Any]:
    """A prompt and a token after it, as graphs, over and over: `prefill` and `decode`, the logits of the first turn.

    Also `other`, the first step whose logits were not the same bits again, if any; `digests` of the rank's bytes, and
    `tables` of all that graphs see, before and after; `grown_bytes` of the heap after a tenth of the steps.
    """
    model, weights = make(family, "float32")
    options = {"min_shard_bytes": 0, "dual": "auto", "tune": _tuned(model.spec(), group.world_size, choices), **choices}
    first: dict[str, torch.Tensor] = {}
    other, begun_with = None, 0
    with graphshard.compile(model, group, checkpoint=weights, capture_sizes=[PREFILL, DECODE], **options) as runtime:
        modes = {name: runtime.plan.modes_of(StepShape(*shape)) for name, shape in _SHAPES.items()}
        before = _digest(runtime), runtime.buffer_table()
        for at in range(num_steps):
            name = "prefill" if at % 2 == 0 else "decode"
            step = runtime.graph(*_SHAPES[name])
            tokens, positions = _inputs(group.rank, name)
            step.inputs["tokens"].copy_(tokens)
            step.inputs["positions"].copy_(positions)
            step.replay()
            logits = step.outputs["logits"].clone()
            if not torch.equal(first.setdefault(name, logits), logits) and other is None:
                other = at
            if at == num_steps // 10:
                settle()
                begun_with = read_pss().anon_bytes
        settle()
        grown = read_pss().anon_bytes - begun_with
        after = _digest(runtime), runtime.buffer_table()
        group.barrier("all turns done")
    return {
        **{name: logits.flatten().tolist() for name, logits in first.items()},
        "modes": {name: sorted(set(found)) for name, found in modes.items()},
        "other": other,
        "digests": [before[0], after[0]],
        "tables": before[1] == after[1] and len(before[1]) > 0,
        "grown_bytes": grown,
    }


def turn_alone(family: str, rank: int) -> dict[str, list[float]]:
    """The logits of such a turn on whole weights."""
    executor = Executor(*make(family, "float32"))
    return {name: executor.step(*_inputs(rank, name)).flatten().tolist() for name in _SHAPES}


_SHAPES = {"prefill": PREFILL, "decode": DECODE}


def _inputs(rank: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, t), begin = _SHAPES[name], 0 if name == "prefill" else PREFILL[1]
    tokens = torch.randint(96, (batch, t), generator=torch.Generator().manual_seed(10 * rank + t))
    return tokens, torch.arange(begin, begin + t).expand(batch, t)


def _digest(runtime: Runtime) -> str:
    """Of the chunks of this rank."""
    chunks = [bytes(runtime.memory.chunk(unit)) for unit in runtime.layout.units]
    return hashlib.sha256(b"".join(chunks)).hexdigest()


def _tuned(model: ModelSpec, world_size: int, choices: dict[str, Any]) -> Tuned:
    """Measurements by which the decoding step is faster in slices, and the prompt's gathered."""
    kinds = tuple(kinds_of(model))
    faster = {16: "gather", 2: "tensor_parallel"}
    rows = tuple(
        TunedRow(kind, tokens, mode, 1.0 if mode == best else 2.0, 1.0, 2.0, 1)
        for kind in kinds
        for tokens, best in faster.items()
        for mode in MODES
    )
    transport = choices.get("transport", "pull")
    return Tuned(model.name, model.digest, world_size, transport, "host", "host", {}, kinds, (16, 2), rows)
