"""Steps with tensor-parallel blocks: bit for bit what a replicated step computes, over both transports."""

from __future__ import annotations

import pytest
from joint_programs import all_steps
from ranks import MODES, run_on_ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_steps_of_either_mode_are_exact(world_size: int, mode: str, transport: str) -> None:
    for wrong, blocks, _ in run_on_ranks(all_steps, world_size, transport, "auto", mode=mode):
        assert wrong == [] and blocks == [3, 3, 0, 0]
