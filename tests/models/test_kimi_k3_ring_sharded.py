"""Steps that are taken back, over ranks: captured or not, the bits of one rank's model without a ring."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from kimi_k3_reference import SIZES, SMALL
from ranks import run_on_ranks

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import SpecError
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.auto import make_plan

CONFIG = replace(SMALL, sizes=replace(SIZES, num_layers=3))  # KDA and a dense MLP, KDA and experts, MLA and experts
HOST = DeviceSpec("host", "any", memory_bytes=2**62)
SHAPES = [(2, 3), (2, 1)]
RING = 4
ACCEPTED = [((2, 3), (3, 2)), ((2, 3), (1, 0)), ((2, 1), (1, 1)), ((2, 3), (0, 3)), ((2, 1), (0, 1)), ((2, 3), (3, 1))]
"""Of each step: its shape, and how many tokens of each row are accepted."""


def both_ways(group: Group, dtype: str, ring: dict[str, Any], choices: dict[str, Any]) -> list[str]:
    """Bits of logits and states: eagerly, and once more as graphs on what the first has left."""
    model, weights = random_kimi_k3(replace(CONFIG, dtype=dtype), 5, max_batch_size=2, **ring)
    with graphshard.compile(model, group, checkpoint=weights, capture_sizes=SHAPES, **choices) as runtime:
        return [_decode(runtime, run, bool(ring)) for run in ("eager", "graph")]


def _decode(runtime: Runtime, run: str, has_ring: bool) -> str:
    generator, lengths = torch.Generator().manual_seed(11), torch.zeros(2, dtype=torch.int64)
    seen = []
    for size, counts in ACCEPTED:
        accepted, t = torch.tensor(counts), size[1]
        tokens = torch.randint(SIZES.vocab, size, generator=generator)
        positions, is_accepted = lengths[:, None] + torch.arange(t), torch.arange(t) < accepted[:, None]
        if not has_ring:  # it never sees what is not accepted
            positions = positions.where(is_accepted, -1)
        seen.append(_step(runtime, run, tokens, positions)[is_accepted])
        if has_ring:
            runtime.buffers(StepShape(*size), "input")["accepted"].copy_(accepted)
            runtime.fold(*size, run=run)
        lengths += accepted
    caches = runtime.buffers(StepShape(2), "cache")
    for name in sorted(caches):
        if name.endswith("latent_cache"):
            seen += [caches[name][row, :length] for row, length in enumerate(lengths.tolist())]
        elif "ring" not in name:
            seen.append(caches[name])
    assert all(bool(tensor.isfinite().all()) for tensor in seen)
    return "\n".join(str(tensor.float().flatten().view(torch.int32).tolist()) for tensor in seen)


def _step(runtime: Runtime, run: str, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    shape = StepShape(*tokens.shape)
    inputs = runtime.buffers(shape, "input")
    inputs["tokens"].copy_(tokens)
    inputs["positions"].copy_(positions)
    if run == "graph":
        runtime.graph(*tokens.shape).replay()
    else:
        runtime.run(*tokens.shape)
    return runtime.buffers(shape, "output")["logits"].clone()


@cache
def _without_a_ring(dtype: str) -> str:
    eager, captured = both_ways(LocalGroup(1)[0], dtype, {}, {"plan": "replicated"})
    assert eager == captured
    return eager


@pytest.mark.parametrize(
    ("world_size", "dtype", "ring", "choices"),
    [
        (1, "float32", {"compact_ring": True}, {"plan": "replicated"}),
        pytest.param(1, "bfloat16", {}, {"units": "layer", "prefetch_depth": 1}, marks=pytest.mark.slow),
        (2, "float32", {}, {"units": "weight", "prefetch_depth": 1, "transport": "nccl"}),
        (2, "bfloat16", {"compact_ring": True}, {"units": "layer", "prefetch_depth": 1, "executor": "threaded"}),
        (2, "float32", {"compact_ring": True, "fused": False}, {"units": "layer", "prefetch_depth": 0}),
    ],
)
def test_sharded_steps_and_folds_give_the_bits_of_a_model_without_a_ring(
    world_size: int, dtype: str, ring: dict[str, Any], choices: dict[str, Any]
) -> None:
    want = _without_a_ring(dtype)
    for eager, captured in run_on_ranks(both_ways, world_size, dtype, {"ring": RING, **ring}, choices):
        assert eager == want
        assert captured == want


def test_the_plan_keeps_what_the_fold_reads_and_says_why() -> None:
    reasons = {}
    for is_compact in (False, True):
        model = KimiK3(CONFIG, 2, ring=RING, compact_ring=is_compact)
        plan = make_plan(model.spec(), 2, HOST, units="layer", prefetch_depth=1)
        reasons[is_compact] = {d.weight: "sharded" if d.unit is not None else d.reason for d in plan.decisions}
        for name in model.folds[0].spec.reads:
            assert "commit_fold, for all layers at once" in reasons[is_compact][name], name
    changed = {name for name, reason in reasons[False].items() if reasons[True][name] != reason}
    assert changed == {f"model.layers.{layer}.self_attn.f_b_proj.weight" for layer in (0, 1)}
    assert {reasons[False][name] for name in changed} == {"sharded"}


def test_a_plan_that_shards_what_the_fold_reads_is_refused_by_name() -> None:
    spec = KimiK3(CONFIG, 2, ring=RING, compact_ring=True).spec()
    with pytest.raises(SpecError, match=r"model\.layers\.0\.self_attn\.f_b_proj\.weight.*commit_fold"):
        make_plan(spec, 2, HOST, units="layer", include=["*f_b_proj*"])
    loose = KimiK3(CONFIG, 2, ring=RING).spec()
    plan = make_plan(loose, 2, HOST, units="layer", include=["*f_b_proj*"])
    assert sum(d.unit is not None for d in plan.decisions) == 2
