"""Ranks killed or stopped, one or all, at five points; launchers that die. Rank programs without torch."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import mini_programs
import pytest
from census import no_growth
from mini_programs import POINTS, reach, step_beside_a_stopped_rank
from ranks import rank_environment, start_processes
from signs import Signs, until

from graphshard.comm.launch import free_port
from graphshard.comm.process import ProcessId

COLLECTIVE = {
    "connect": r"rank 1 \(pid \d+\) died while (the ranks were connecting|rank [02] waited in certificate)",
    "load": r"rank 1 \(pid \d+\) died while rank [02] waited in load \(call \d+ of this group\)",
    "bind": r"rank 1 \(pid \d+\) died while rank [02] waited in check \(call \d+ of this group\)",
}
"""What the others say when rank 1 dies at a point where they wait for it; at the other points they go on."""


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_one_rank_killed(point: str, tmp_path: Path) -> None:
    with (
        no_growth(),
        Signs(tmp_path) as signs,
        start_processes(reach, 3, str(tmp_path), point, [1], group_timeout_s=None) as ranks,
    ):
        signs.wait_for("here", [1])
        if point == "connect":
            signs.wait_for("hello", [2])
        ranks.signal(1, signal.SIGKILL)
        results = ranks.wait(60.0)
    assert results[1].error == "was killed by SIGKILL"
    for rank in (0, 2):
        assert results[rank].is_good, results[rank].traceback
        if point in COLLECTIVE:
            error = results[rank].value["error"]
            assert re.search(COLLECTIVE[point], error), error
        else:
            assert results[rank].value["wrong"] == []


@pytest.mark.parametrize("point", POINTS)
def test_all_ranks_killed_and_restarted_four_times(point: str, tmp_path: Path) -> None:
    """One port and one run id throughout; nothing is left behind, and every restart works."""
    port = free_port()
    with no_growth():
        for attempt in range(5):
            victims, folder = ([0, 1] if attempt < 4 else []), tmp_path / str(attempt)
            with (
                Signs(folder) as signs,
                start_processes(
                    reach, 2, str(folder), point, victims, group_timeout_s=None, run_id="one", master_port=port
                ) as ranks,
            ):
                pids = signs.wait_for("here", victims)
                for rank in pids:
                    ranks.signal(rank, signal.SIGKILL)
                results = ranks.wait(60.0)
            assert [ProcessId.of(pid).state() for pid in ranks.pids] == ["gone", "gone"]
            assert _sockets(port, ranks.pids) == []
            if victims:
                assert [result.error for result in results] == ["was killed by SIGKILL"] * 2
            else:
                assert [result.value["wrong"] for result in results] == [[], []]
                assert results[0].value["job"] == results[1].value["job"]


@pytest.mark.parametrize("point", POINTS)
def test_ranks_die_with_their_launcher(point: str, tmp_path: Path) -> None:
    """In Python, in native waits of the host driver and in a capture; only the launcher's own ranks are hit."""
    command = [sys.executable, mini_programs.__file__, str(tmp_path), point]
    with (
        Signs(tmp_path) as signs,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as bystander,  # of the same process group
        subprocess.Popen(command, env={**os.environ, **rank_environment()}) as launcher,
    ):
        try:
            pids = signs.wait_for("here", [0, 1])
            ranks = [ProcessId.of(pid) for pid in pids.values()]
            assert all(rank.state() == "running" for rank in ranks)
            launcher.kill()
            until(lambda: all(rank.state() == "gone" for rank in ranks), "all ranks are gone", limit_s=5.0)
            assert bystander.poll() is None
        finally:
            launcher.kill()
            bystander.kill()


def test_a_stopped_rank_delays_nobody(tmp_path: Path) -> None:
    with (
        no_growth(),
        Signs(tmp_path) as signs,
        start_processes(step_beside_a_stopped_rank, 3, str(tmp_path), 200) as ranks,
    ):
        pid = signs.wait_for("stopping", [1])[1]
        signs.wait_for("went on", [0, 2])
        assert ProcessId.of(pid).state() == "stopped"
        ranks.signal(1, signal.SIGCONT)
        results = ranks.wait(60.0)
    for rank in (0, 2):
        assert results[rank].is_good, results[rank].traceback
        told = results[rank].value
        assert (told["wrong"], told["still"]) == ([], "stopped")
        assert re.search(rf"rank 1 \(pid {pid}, stopped\) did not arrive", told["error"]), told["error"]
    assert results[1].is_good


def _sockets(port: int, pids: list[int]) -> list[str]:
    """Named sockets of this job that are still there."""
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@graphshard/" in line]
    return [name for name in names if name.endswith(tuple(f"/{number}" for number in [port, *pids]))]
