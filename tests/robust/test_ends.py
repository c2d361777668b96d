"""Ranks that are processes, and fail, exit, fork and drop what they have: nobody hangs, nothing is left behind."""

from __future__ import annotations

import pytest
from census import no_growth
from end_programs import capture_drop_and_fork, fail_to_reserve
from mini_programs import HOW, WHERE, end_each_in_its_own_way
from ranks import run_on_ranks, start_processes

EXPECTED = {
    "exit": "ended with code 7 and without a result",
    "raise": "out of luck",
    "os._exit": "ended with code 8 and without a result",
    "SIGKILL": "was killed by SIGKILL",
}


def test_peers_end_in_every_way_and_place(capfd: pytest.CaptureFixture[str]) -> None:
    """Each ends at once with its own code, silently, whatever of it still waits; who is left goes on."""
    ways = [(how, where) for where in WHERE for how in HOW]
    with no_growth(), start_processes(end_each_in_its_own_way, 1 + len(ways)) as ranks:
        results = ranks.wait(60.0)
    assert results[0].is_good, results[0].traceback
    assert results[0].value["wrong"] == [] and ") " in results[0].value["error"]
    for (how, where), result in zip(ways, results[1:], strict=True):
        assert result.error == EXPECTED[how], (how, where, result.error)
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_memory_that_one_rank_lacks_is_one_error_on_all(capfd: pytest.CaptureFixture[str]) -> None:
    """The window, then the slots of rank 2; nothing stays reserved, and the next attempt works."""
    for rank, stages in enumerate(run_on_ranks(fail_to_reserve, 3, mode="processes", timeout_s=120.0)):
        for told, size in zip(stages, stages[0]["sizes"], strict=True):
            assert told["error"].startswith(
                f"DeviceError: reserve failed on rank 2: host: allocating {size} bytes failed"
            )
            assert told["after"] == told["before"], rank
            assert told["wrong"] == []


def test_captures_that_fail_memory_that_is_dropped_and_forks() -> None:
    """In two processes; whatever went wrong there is in the reports."""
    with no_growth():
        reports = run_on_ranks(capture_drop_and_fork, 2, mode="processes", timeout_s=120.0)
    assert reports == [{"captures": [], "pool": [], "fork": []}] * 2
