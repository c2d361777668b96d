"""Folds, and drafts that borrow, beside ranks that die and come back."""

from __future__ import annotations

from pathlib import Path

import pytest
from fold_programs import serve_folds, serve_pair
from ranks import start_processes
from signs import Signs


@pytest.mark.slow
def test_folds_go_on_when_a_rank_dies_and_comes_back(tmp_path: Path) -> None:
    """They hold no window's address, so they stay as they were captured."""
    with Signs(tmp_path) as signs, start_processes(serve_folds, 2, str(tmp_path), group_timeout_s=60.0) as ranks:
        signs.wait_for("ready", range(2))
        signs.order("die.1", "now")
        assert ranks.restart(1, timeout_s=60.0).error == "was killed by SIGKILL"
        pid = ranks.pids[1]
        assert signs.wait_for("ready", [1]) == {1: pid}
        signs.wait_for(f"admitted 1 {pid}", [0])
        signs.stop(range(2))
        results = ranks.wait(60.0)
    for result in results:
        assert result.is_good, result.traceback
        assert result.value["wrong"] == [] and result.value["same"]
    assert [result.value["is_newcomer"] for result in results] == [False, True]
    assert results[0].value["admitted"] == 1


@pytest.mark.slow
def test_a_rank_comes_back_with_a_draft_that_borrows(tmp_path: Path) -> None:
    with Signs(tmp_path) as signs, start_processes(serve_pair, 2, str(tmp_path), group_timeout_s=60.0) as ranks:
        signs.wait_for("ready", range(2))
        signs.order("die.1", "now")
        assert ranks.restart(1, timeout_s=60.0).error == "was killed by SIGKILL"
        pid = ranks.pids[1]
        assert signs.wait_for("ready", [1]) == {1: pid}
        for runtime in (0, 1):
            signs.wait_for(f"admitted {runtime} {pid}", [0])
        signs.stop(range(2))
        results = ranks.wait(60.0)
    for result in results:
        assert result.is_good, result.traceback
        assert result.value["wrong"] == []
    assert [result.value["is_newcomer"] for result in results] == [False, True]
    assert results[0].value["admitted"] == [0, 1]
