"""The threads that load: results in order, the first failure ends all, and one that hangs is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from census import no_growth

from graphshard.runtime.weights import workers
from graphshard.runtime.weights.workers import Workers

LIMIT_S = 60.0


def nothing(*_: object) -> None:
    """Look at nothing."""


def test_results_come_in_order_and_what_is_done_is_told_here() -> None:
    done: list[int] = []
    started = threading.Barrier(3)

    def task(index: int) -> Callable[[], int]:
        def run() -> int:
            if index < 3:
                started.wait(LIMIT_S)  # three at once, no more and no fewer
            return 10 * index

        return run

    with no_growth():
        assert Workers[int](3).run([task(i) for i in range(20)], done.append, nothing) == [10 * i for i in range(20)]
    assert sorted(done) == list(range(20))
    assert Workers[int](3).run([], nothing, nothing) == []


def test_a_failure_ends_the_others_between_two_pieces_and_no_new_task_begins() -> None:
    group, begun, running = Workers[int](2), [], threading.Event()

    def fails() -> int:
        begun.append("fails")
        assert running.wait(LIMIT_S)
        raise ValueError("bad piece")

    def goes_on() -> int:
        begun.append("goes on")
        running.set()
        while True:
            group.check()

    with no_growth(), pytest.raises(ValueError, match="bad piece"):
        group.run([fails, goes_on, lambda: begun.append("third") or 0], nothing, nothing)
    assert sorted(begun) == ["fails", "goes on"]


@pytest.mark.parametrize("which", ["on_done", "on_look"])
def test_a_failure_of_who_looks_ends_all(which: str) -> None:
    def fail(*_: object) -> None:
        raise ValueError(which)

    group = Workers[int](2)

    def task() -> int:
        return 1 if which == "on_done" else _until_stopped(group)

    with no_growth(), pytest.raises(ValueError, match=which):
        group.run([task] * 5, fail if which == "on_done" else nothing, fail if which == "on_look" else nothing)


def _until_stopped(group: Workers[int]) -> int:
    while True:
        group.check()


def test_a_task_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_GRACE_S", 0.05)
    hung, release = threading.Event(), threading.Event()

    def hangs() -> int:
        hung.set()
        assert release.wait(LIMIT_S)
        return 0

    def fails() -> int:
        assert hung.wait(LIMIT_S)
        raise ValueError("bad piece")

    with no_growth():
        with pytest.raises(ValueError, match="bad piece"):
            Workers[int](2).run([hangs, fails], nothing, nothing)
        left = [thread for thread in threading.enumerate() if thread.name.startswith("graphshard load")]
        assert len(left) == 1 and left[0].daemon, "it must not keep the process from ending"
        release.set()
        left[0].join(LIMIT_S)
