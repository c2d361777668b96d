"""A rank that skips a step, issues others, stands still, dies or stops: one named error on all ranks; under pull, none.

Eagerly and captured, with two ranks and three. What each rank does is in peer_programs.py.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from census import no_growth
from peer_programs import beside
from ranks import run_on_ranks, try_on_ranks

LIMIT_S = 1.0
SOON_S = 15.0
"""Far less than ranks would be waited for; far more than this machine needs, however loaded."""
LAST = r"it last finished op \d+ of step 2"


def expected(fault: str, world_size: int) -> str:
    """The error that all ranks raise, whoever came first."""
    failing = world_size - 1
    step = r"step 3 of shape 1x1 \((eager|graph)\)"
    others = "rank 0" if world_size == 2 else "ranks 0 1"
    if fault == "unlike":
        return rf"ranks issue different gathers: at {step} \(batch \d+\) rank \d gathers .*; rank \d gathers .*"
    if fault == "dies":
        return rf"rank {failing} \(pid \d+\) died while rank \d waited for {step}; {LAST}"
    if fault == "stalls":  # it came, and then its gathers did not: all ranks are at the same step
        return rf"rank \d waited {LIMIT_S:.1f} s for {step}: all ranks came to it, and it did not end.*"
    stopped = "it is stopped, " if fault == "stops" else ""
    return rf"rank \d waited {LIMIT_S:.1f} s for {step}: {others} came to it, rank {failing} did not; {stopped}{LAST}"


def check(told: list[dict[str, Any]], fault: str, world_size: int) -> None:
    """All were told the same, in time; nothing else was wrong, and nothing goes on."""
    (text,) = {found["told"][0] for found in told}
    assert re.fullmatch(expected(fault, world_size), text), text
    for found in told:
        assert found["told"][1] < SOON_S and found["closed_s"] < SOON_S and found["wrong"] == []
        for what, line in zip((r"step \d", "a capture", "a prefetch"), found["refused"], strict=True):
            assert re.match(rf"{what} is refused: rank \d's communicator is broken \(", line) and text in line, line


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", ["eager", "graph"])
@pytest.mark.parametrize("fault", ["skips", "unlike", "stalls"])
def test_a_rank_that_fails_its_peers_is_one_error_on_all(fault: str, run: str, world_size: int) -> None:
    """Steps, captures and prefetches are refused then, and closing is bounded."""
    check(run_on_ranks(beside, world_size, fault, run, "nccl", LIMIT_S), fault, world_size)


@pytest.mark.parametrize("run", ["eager", "graph"])
@pytest.mark.parametrize("fault", ["skips", "unlike", "stalls"])
def test_under_pull_it_is_that_ranks_own_affair(fault: str, run: str) -> None:
    """Nobody else is told anything, or refused anything."""
    *others, failing = run_on_ranks(beside, 3, fault, run, "pull", LIMIT_S)
    for found in others:
        assert (found["told"][0], found["refused"], found["wrong"]) == ("", ["", "", ""], [])
    assert (failing["refused"], failing["wrong"], failing["must_exit"]) == (["", "", ""], [], None)
    assert ("rank 2 waited" in failing["told"][0]) == (fault == "stalls")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "run", "world_size"), [("dies", "eager", 2), ("dies", "graph", 3), ("stops", "eager", 3)]
)
def test_a_process_that_is_gone_is_one_error_on_the_others(fault: str, run: str, world_size: int) -> None:
    """Dead in the middle of a step, or stopped; the others end with code 0, and no process is left."""
    with no_growth():
        *others, failing = try_on_ranks(beside, world_size, fault, run, "nccl", LIMIT_S, mode="processes")
    assert failing.error == "was killed by SIGKILL"
    assert [outcome.error for outcome in others] == [""] * (world_size - 1), others[0].traceback
    check([outcome.value for outcome in others], fault, world_size)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_under_pull_a_process_that_is_gone_disturbs_nobody(fault: str) -> None:
    with no_growth():
        *others, failing = try_on_ranks(beside, 3, fault, "graph", "pull", LIMIT_S, mode="processes")
    assert failing.error == "was killed by SIGKILL"
    for outcome in others:
        assert outcome.error == "", outcome.traceback
        assert (outcome.value["told"][0], outcome.value["refused"], outcome.value["wrong"]) == ("", ["", "", ""], [])
