"""Decoding with a draft over ranks: tokens, gaps and every proposal's logits are those of plain states, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_on_ranks
from speculative_ranks import on_rank, plainly

KINDS = ["llama", "kimi_k3"]
CASES = [
    (1, "graph", {}),
    (2, "graph", {"transport": "pull"}),
    (2, "eager", {"transport": "nccl"}),
    (4, "graph", {"transport": "nccl"}),
]
MORE = [
    (1, "eager", {}),
    (2, "graph", {"transport": "pull", "executor": "threaded"}),
    (2, "graph", {"transport": "nccl", "units": "weight"}),
    (3, "graph", {"transport": "pull", "units": "weight", "prefetch_depth": 2}),
    (4, "eager", {"transport": "nccl"}),
    (4, "graph", {"transport": "pull"}),
    (4, "eager", {"transport": "pull"}),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "run", "choices"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_ranks_decode_what_plain_states_do(kind: str, world_size: int, run: str, choices: dict[str, Any]) -> None:
    want = plainly(kind)
    speculative, reference, again = (one[0] for one in want)
    assert speculative == reference == again
    for found in run_on_ranks(on_rank, world_size, kind, run, choices):
        assert found["told"] == want
        if world_size > 1:
            assert min(found["units"]) >= 1 and found["primes"] > 0
