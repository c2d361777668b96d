"""Dual models over ranks: gathered steps equal whole ones bit for bit, those in slices per token, within rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from block_programs import DECODE, STEPS, alone, both_ways, in_turn, turn_alone
from ranks import run_on_ranks
from test_blocks import assert_close


def check(mode: str, world_size: int, family: str, dtype: str, choices: dict[str, Any], ranks: str) -> None:
    told = run_on_ranks(both_ways, world_size, family, dtype, {"dual": mode, **choices}, mode=ranks)
    for rank, one in enumerate(told):
        assert all(modes and set(modes) == {mode} for modes in one["modes"].values())
        assert one["eager"] == one["graph"]
        want = alone(family, dtype, rank)
        if mode == "gather":
            assert one["eager"] == want
        for got, whole, (batch, t) in zip(one["eager"], want, STEPS, strict=True):
            logits = (torch.tensor(x).view(batch, t, -1).to(getattr(torch, dtype)) for x in (got, whole))
            assert_close(*logits)


CASES = [
    ("llama", "float32", 2, {}, "threads"),
    ("llama", "bfloat16", 3, {}, "processes"),
    ("llama", "float32", 2, {"transport": "nccl"}, "processes"),
    ("kimi_k3", "float32", 4, {}, "threads"),
    ("kimi_k3", "bfloat16", 3, {"transport": "nccl"}, "threads"),
]
MORE = [
    ("kimi_k3", "float32", 2, {"units": "layer", "prefetch_depth": 1, "executor": "threaded"}, "processes"),
    *(
        (family, dtype, world_size, {"transport": transport}, ranks)
        for family in ("llama", "kimi_k3")
        for world_size in (2, 3, 4)
        for transport in ("pull", "nccl")
        for ranks, dtype in (("threads", "bfloat16"), ("processes", "float32"))
    ),
]


def _id(family: str, dtype: str, world_size: int, choices: dict[str, Any], ranks: str) -> str:
    return f"{family} {dtype} {world_size} {ranks} {' '.join(map(str, choices.values())) or 'pull'}"


@pytest.mark.parametrize("mode", ["gather", "tensor_parallel"])
@pytest.mark.parametrize(
    ("family", "dtype", "world_size", "choices", "ranks"),
    [
        *(pytest.param(*case, id=_id(*case)) for case in CASES),
        *(pytest.param(*case, id=f"{_id(*case)} more", marks=pytest.mark.slow) for case in MORE),
    ],
)
def test_each_rank_has_what_whole_weights_give(
    mode: str, family: str, dtype: str, world_size: int, choices: dict[str, Any], ranks: str
) -> None:
    check(mode, world_size, family, dtype, choices, ranks)


@pytest.mark.parametrize(
    ("family", "world_size", "num_steps", "choices", "ranks"),
    [
        ("llama", 2, 100, {}, "processes"),
        pytest.param("llama", 2, 1000, {}, "processes", marks=pytest.mark.slow),
        pytest.param("kimi_k3", 3, 1000, {}, "threads", marks=pytest.mark.slow),
        pytest.param("llama", 2, 1000, {"transport": "nccl"}, "processes", marks=pytest.mark.slow),
        ("kimi_k3", 2, 40, {"transport": "nccl"}, "threads"),
    ],
)
def test_graphs_of_both_modes_take_turns_over_one_shard(
    family: str, world_size: int, num_steps: int, choices: dict[str, Any], ranks: str
) -> None:
    told = run_on_ranks(in_turn, world_size, family, num_steps, choices, mode=ranks, timeout_s=400.0)
    for rank, one in enumerate(told):
        assert one["modes"] == {"prefill": ["gather"], "decode": ["tensor_parallel"]}
        want = turn_alone(family, rank)
        assert one["prefill"] == want["prefill"], "gathered: bit for bit"
        assert_close(*(torch.tensor(x).view(DECODE[0], 1, -1) for x in (one["decode"], want["decode"])))
        assert one["other"] is None, f"step {one['other']} gave other bits than the first of its kind"
        assert one["digests"][0] == one["digests"][1] and one["tables"]
        if ranks == "processes":  # threads' ranks share one heap
            assert one["grown_bytes"] < 2**20
