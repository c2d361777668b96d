"""A rank that speculates dies and comes back: both of its runtimes do, the others step on meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import start_processes
from signs import Signs
from speculation_programs import serve_both


@pytest.mark.slow
def test_a_rank_comes_back_with_target_and_draft(tmp_path: Path) -> None:
    with Signs(tmp_path) as signs, start_processes(serve_both, 3, str(tmp_path), group_timeout_s=60.0) as ranks:
        signs.wait_for("ready", range(3))
        signs.order("die.1", "now")
        assert ranks.restart(1, timeout_s=60.0).error == "was killed by SIGKILL"
        assert signs.wait_for("ready", [1]) == {1: ranks.pids[1]}
        signs.wait_for("admitted", [0, 2])
        signs.stop(range(3))
        results = ranks.wait(60.0)
    for rank, result in enumerate(results):
        assert result.is_good, result.traceback
        assert result.value["wrong"] == [] and result.value["is_newcomer"] == (rank == 1)
        if rank != 1:
            assert result.value["admitted"] == ["draft", "target"]
    assert "rank 1 came back" in results[1].value["told"]  # it has no part in what ranks do together
