"""The whole runtime, killed at points of `compile` and of a step; test_kills.py does more of it without torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import point_programs
import pytest
from census import no_growth
from point_programs import POINTS, reach
from ranks import rank_environment, start_processes
from signs import Signs, until

from graphshard.comm.process import ProcessId

COLLECTIVE = {
    "load": r"rank 1 \(pid \d+\) died while rank [02] waited in load \(",
    "bind": r"rank 1 \(pid \d+\) died while rank [02] waited in check of gathered units \(",
}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_one_rank_killed(point: str, tmp_path: Path) -> None:
    with (
        no_growth(),
        Signs(tmp_path) as signs,
        start_processes(reach, 3, str(tmp_path), point, [1], group_timeout_s=None) as ranks,
    ):
        signs.wait_for("here", [1])
        ranks.signal(1, signal.SIGKILL)
        results = ranks.wait(120.0)
    assert results[1].error == "was killed by SIGKILL"
    for rank in (0, 2):
        assert results[rank].is_good, results[rank].traceback
        if point in COLLECTIVE:
            assert re.search(COLLECTIVE[point], results[rank].value["error"]), results[rank].value
        else:
            assert results[rank].value == {"wrong": []}


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_ranks_die_with_their_launcher(point: str, tmp_path: Path) -> None:
    """All ranks are at `point`: `replay` is a native wait for a step, `capture` a recording."""
    command = [sys.executable, point_programs.__file__, str(tmp_path), point]
    with Signs(tmp_path) as signs, subprocess.Popen(command, env={**os.environ, **rank_environment()}) as launcher:
        try:
            ranks = [ProcessId.of(pid) for pid in signs.wait_for("here", [0, 1]).values()]
            assert all(rank.state() == "running" for rank in ranks)
        finally:
            launcher.kill()
        until(lambda: all(rank.state() == "gone" for rank in ranks), "all ranks are gone", limit_s=5.0)
