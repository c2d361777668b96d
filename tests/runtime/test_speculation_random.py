"""Long random runs: the bytes that every segment sees are right, ranks gather alike, nothing hangs."""

from __future__ import annotations

import pytest
from ranks import run_on_ranks
from speculative_random import random_steps


def check(world_size: int, transport: str, run: str, seed: int, num_steps: int) -> None:
    """A failure is repeated by its seed."""
    found = run_on_ranks(random_steps, world_size, transport, run, seed, num_steps, timeout_s=900.0)
    for one in found:
        assert one["wrong"] == [], f"seed {seed}"
        assert one["done"].keys() >= {"step", "skip", "discard", "update", "idle", "stalled"}
        assert one["num_gathers"] > num_steps
    if transport == "nccl":
        assert len({one["trace"] for one in found}) == 1, f"seed {seed}"


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_sixty_steps(transport: str, run: str) -> None:
    check(2, transport, run, 7, 60)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["graph", "eager"])
def test_a_thousand_steps(transport: str, run: str) -> None:
    check(3, transport, run, 11, 1000)
