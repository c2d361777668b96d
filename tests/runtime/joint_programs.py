"""What ranks of the tests of tensor-parallel steps do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

from typing import Any

import torch
from block_model import MODULUS, WIDTH, BlockModel, UpTo
from torch import Tensor

import graphshard
from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime

SHAPES = ((1, 1), (2, 1), (2, 3), (4, 3))
"""Step shapes; with `UpTo(4)` the last two gather every block."""


def compiled(group: Group, model: BlockModel, transport: str, **choices: Any) -> Runtime:
    """The model on this rank: blocks tensor-parallel at small step shapes, gathered at large ones."""
    defaults: dict[str, Any] = {
        "checkpoint": model.tensors(),
        "transport": transport,
        "capture_sizes": SHAPES,
        "dual": "auto",
        "chooser": UpTo(4),
        "min_shard_bytes": 0,
        "units": "layer",
        "prefetch_depth": 1,
        "hooks": Hooks(poison=True),
        "timeout_s": 30.0,
    }
    return graphshard.compile(model, group, **(defaults | choices))


def tokens_of(rank: int, step: int, shape: StepShape) -> Tensor:
    """A rank's own tokens."""
    generator = torch.Generator().manual_seed(step * 100 + rank)
    count = shape.batch_size * shape.tokens_per_sequence
    return torch.randint(0, MODULUS, (count, WIDTH), generator=generator).to(torch.float32)


def step_wrong(runtime: Runtime, model: BlockModel, shape: StepShape, number: int, run: str, version: int = 0) -> str:
    """Run a step; what is wrong with its outputs, if anything."""
    tokens = tokens_of(runtime.rank, number, shape)
    runtime.buffers(shape, "input")["tokens"].copy_(tokens)
    if run == "graph":
        runtime.graph(shape.batch_size, shape.tokens_per_sequence).replay()
    else:
        runtime.run(shape.batch_size, shape.tokens_per_sequence)
    result = runtime.buffers(shape, "output")["result"]
    expected = model.expected(tokens, version)
    return "" if torch.equal(result, expected) else f"step {number} of {shape} ({run}): {result} is not {expected}"


def all_steps(group: Group, transport: str, dual: str, own_ways: bool = False) -> list[Any]:
    """Every step shape, eager and captured, twice; what was wrong, and what memory was there before and after."""
    model = BlockModel()
    choices: dict[str, Any] = {} if dual == "auto" else {"dual": dual, "chooser": None}
    with compiled(group, model, transport, **choices) as runtime:
        before = _standing(runtime)
        wrong, number = [], 0
        for _ in range(2):
            for shape in runtime.programs:
                for run in ("eager", "graph"):
                    number += 1
                    if own_ways and (group.rank + number) % 2:
                        run = "eager" if run == "graph" else "graph"
                    wrong.append(step_wrong(runtime, model, shape, number, run))
        assert _standing(runtime) == before
        blocks = [len(program.blocks) for program in runtime.programs.values()]
        group.barrier()
        return [[text for text in wrong if text], blocks, runtime.layout.digest]


def _standing(runtime: Runtime) -> list[Any]:
    """What no step may change: digests, where everything lies, and the bytes of this rank's one shard."""
    shards = runtime.memory.shards
    assert shards is not None
    digests = [runtime.layout.digest, runtime.plan.digest, checksum_of(shards)]
    return [*digests, *(program.digest for program in runtime.programs.values()), *runtime.buffer_table()]
