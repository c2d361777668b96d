"""A rank whose step takes long is waited for while it works, and given up when it is silent."""

from __future__ import annotations

import re
import threading
import time
from itertools import count

import pytest
from group_programs import die_in_a_long_step
from ranks import start_processes, try_on_ranks

from graphshard.comm import pulses
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.errors import CommError, LoadError

LIMIT_S = 0.6


def _long_step(group: Group, limits: float, grows: bool) -> int:
    """Rank 1 takes `limits` limits for its step: how long it takes is what the test is about."""
    numbers = count()

    def step() -> int:
        if group.rank == 1:
            time.sleep(limits * LIMIT_S)
        return group.rank

    value = group.agree("long step", step, progress=lambda: next(numbers) if grows else 0)
    group.barrier("after it")
    return value


def test_a_step_may_take_several_limits_while_it_makes_progress() -> None:
    outcomes = try_on_ranks(_long_step, 3, 3.2, True, group_timeout_s=LIMIT_S)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [(0, ""), (1, ""), (2, "")]


def test_a_step_without_progress_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulses, "PATIENCE", 1)
    outcomes = try_on_ranks(_long_step, 3, 3.5, False, group_timeout_s=LIMIT_S)
    for rank in (0, 2):
        text = r"rank [02] waited \d\.\d s in long step \(call 1 of this group\): rank 1 \(a thread\) did not arrive"
        assert outcomes[rank].error_type == "CommError" and re.search(text, outcomes[rank].error), outcomes[rank]
    assert "rank 1" in outcomes[1].error, "the one that came too late is told so"


def test_a_step_that_says_nothing_has_the_plain_limit() -> None:
    late = threading.Event()

    def rank(group: Group) -> None:
        try:
            group.agree("step", lambda: late.wait(60) if group.rank else None)
        finally:
            late.set()

    outcomes = try_on_ranks(rank, 2, group_timeout_s=LIMIT_S)
    assert "rank 0 waited 0.6 s in step (call 1 of this group): rank 1 (a thread) did not arrive" in outcomes[0].error


def test_signs_of_one_call_are_no_signs_of_the_next() -> None:
    """Rank 1 works for long in the first call, and never comes to the second."""

    def rank(group: Group) -> None:
        numbers = count()
        group.agree("first", lambda: time.sleep(2 * LIMIT_S * group.rank), progress=lambda: next(numbers))
        if group.rank == 0:
            group.barrier("second")
        else:
            assert gone.wait(60)

    gone = threading.Event()

    def run(group: Group) -> None:
        try:
            rank(group)
        finally:
            if group.rank == 0:
                gone.set()

    outcomes = try_on_ranks(run, 2, group_timeout_s=LIMIT_S)
    assert "rank 0 waited 0.6 s in second (call 2 of this group)" in outcomes[0].error and outcomes[1].error == ""


def test_a_failure_in_a_long_step_is_everybodys() -> None:
    numbers = count()

    def rank(group: Group) -> None:
        def step() -> None:
            if group.rank == 2:
                raise LoadError("disk on fire")

        group.agree("load", step, progress=lambda: next(numbers))

    for outcome in try_on_ranks(rank, 3):
        assert (outcome.error_type, outcome.error) == ("LoadError", "load failed on rank 2: disk on fire")


def test_a_rank_that_works_sees_that_another_has_left() -> None:
    with LocalGroup(3) as groups:
        assert groups[0].why_hopeless("load") is None
        groups[2].close("LoadError: no more")
        text = "rank 2 (a thread) closed its group after LoadError: no more while rank 0 was in load"
        assert groups[0].why_hopeless("load") == text
        with pytest.raises(CommError, match=r"rank 2 \(a thread\) closed its group after LoadError: no more"):
            groups[0].barrier()
        assert "rank 0 gave up: rank 2" in str(groups[1].why_hopeless("load"))


def test_a_process_that_is_killed_in_a_long_step_is_named_at_once() -> None:
    """The limit is ten minutes."""
    with start_processes(die_in_a_long_step, 3, group_timeout_s=600.0) as ranks:
        results = ranks.wait(60.0)
    assert results[1].error == "was killed by SIGKILL"
    for rank in (0, 2):
        text = r"rank 1 \(pid \d+\) died while rank [02] (waited in load \(|was in load)"
        assert re.search(text, results[rank].error), results[rank]


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    group = LocalGroup(1)[0]
    assert group.agree("step", threading.active_count, progress=lambda: 0) == before + 1
    assert threading.active_count() == before
