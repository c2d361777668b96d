"""The whole runtime beside ranks that die, stop and come back: held graphs stay usable, bytes stay right."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from byte_programs import serve
from census import no_growth
from ranks import start_processes
from signs import Signs, until

from graphshard.comm.process import ProcessId


@pytest.mark.slow
@pytest.mark.parametrize("dual", ["off", "gather"])
def test_ranks_die_stop_and_come_back(dual: str, tmp_path: Path) -> None:
    """Rank 1 dies, and comes back while rank 2 is stopped; then ranks 0 and 1 die at once, and both come back."""
    with (
        no_growth(),
        Signs(tmp_path) as signs,
        start_processes(serve, 3, str(tmp_path), dual, group_timeout_s=60.0) as ranks,
    ):
        signs.wait_for("ready", range(3))
        stopped = ProcessId.of(ranks.pids[2])
        ranks.signal(2, signal.SIGSTOP)
        until(lambda: stopped.state() == "stopped", "rank 2 is stopped")
        ranks.signal(1, signal.SIGKILL)
        signs.order("step.0", "50")
        signs.wait_for("stepped", [0])
        assert ranks.restart(1).error == "was killed by SIGKILL"
        first = ranks.pids[1]
        assert signs.wait_for("ready", [1]) == {1: first}
        signs.wait_for(f"admitted 1 {first}", [0])
        assert stopped.state() == "stopped"
        ranks.signal(2, signal.SIGCONT)
        signs.wait_for(f"admitted 1 {first}", [2])

        signs.order("die.0", "now")
        signs.order("die.1", "now")
        for rank in (0, 1):
            assert ranks.restart(rank, timeout_s=60.0).error == "was killed by SIGKILL"
        pids = {rank: ranks.pids[rank] for rank in (0, 1)}
        assert signs.wait_for("ready", pids) == pids
        for rank, pid in pids.items():
            signs.wait_for(f"admitted {rank} {pid}", [2])
        signs.stop(range(3))
        results = ranks.wait(60.0)
    for rank, result in enumerate(results):
        assert result.is_good, result.traceback
        told = result.value
        assert told["wrong"] == [] and told["same"]
        assert told["is_newcomer"] == (rank != 2)
        assert told["after"]["windows"] == told["before"]["windows"]
        if rank == 2:  # the others came back at once, and may not have met each other before they ended
            assert told["pinned_at_the_end"] == {}
    survivor = results[2].value
    assert set(survivor["pinned"]) >= {"0", "1"} and set(survivor["pinned"].values()) == {survivor["pinned"]["0"]}
    assert "rank 1 (pid" in survivor["barrier"] or "rank 0 (pid" in survivor["barrier"]
