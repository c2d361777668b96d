"""An attached module beside a rank that stops, dies inside a forward and comes back: the others' bits stay right."""

from __future__ import annotations

import signal
from pathlib import Path

from attach_programs import serve
from census import no_growth
from ranks import start_processes
from signs import Signs


def test_a_rank_stops_dies_inside_a_forward_and_comes_back(tmp_path: Path) -> None:
    with no_growth(), Signs(tmp_path) as signs, start_processes(serve, 2, str(tmp_path), group_timeout_s=60.0) as ranks:
        signs.wait_for("ready", range(2))
        ranks.signal(1, signal.SIGSTOP)
        signs.order("report.0", "went on beside a stopped one")
        signs.wait_for("went on beside a stopped one", [0])
        ranks.signal(1, signal.SIGCONT)
        signs.order("die.1", "now")
        assert ranks.restart(1, timeout_s=60.0).error == "was killed by SIGKILL"
        signs.order("report.0", "went on beside a dead one")
        signs.wait_for("went on beside a dead one", [0])
        signs.wait_for("ready", [1])
        signs.wait_for(f"admitted 1 {ranks.pids[1]}", [0])
        signs.order("report.1", "is back")
        signs.wait_for("is back", [1])
        signs.order("stop")
        results = ranks.wait(180.0)
    for rank, result in enumerate(results):
        assert result.is_good, result.traceback
        told = result.value
        assert told["num_wrong"] == 0 and told["num_right"] > 0
        assert told["is_newcomer"] == (rank == 1) and told["state"] and told["detached"]
