"""Ranks in lockstep, without a library: what control pages say decides, and one failure is everybody's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphshard._core import ControlPage
from graphshard.comm.alignment import Awaited
from graphshard.comm.control import CLOSED, ControlTable
from graphshard.comm.group import LocalGroup
from graphshard.comm.lockstep import Lockstep
from graphshard.core.errors import CommError

STEP = Awaited("step 1 of shape 1x1 (graph)", 1, str)


class Library:
    """Communicators that have failed if a test says so."""

    def __init__(self) -> None:
        self.error: str | None = None
        self.num_breaks = 0

    def settings(self) -> Mapping[str, str]:
        return {"nccl": "2.32.3"}

    def async_error(self) -> str | None:
        return self.error

    def break_off(self) -> None:
        self.num_breaks += 1


class Ranks:
    """Three ranks of this process, with their pages and libraries."""

    def __init__(self, timeout_s: float = 0.3) -> None:
        groups = LocalGroup(3)
        self.pages = tuple(ControlPage() for _ in groups)
        for page in self.pages:
            page.set_state(1)
        self.libraries = [Library() for _ in groups]
        self.locks = [
            Lockstep(ControlTable(group, self.pages), group.rank, self.libraries[group.rank], timeout_s)
            for group in groups
        ]
        self.groups = groups

    def issue(self, *ranks: int, unit: int = 0) -> None:
        for rank in ranks:
            self.locks[rank].issue("graph", [unit], STEP.what)


def never(timeout_s: float) -> bool:
    threading.Event().wait(timeout_s)
    return False


def at_once(timeout_s: float) -> bool:
    return True


def error_of(call: Callable[[], object]) -> str:
    with pytest.raises(CommError) as caught:
        call()
    return str(caught.value)


def test_the_first_failure_is_everybodys() -> None:
    ranks = Ranks()
    ranks.issue(0, 2)
    with ThreadPoolExecutor(2) as pool:
        told = set(pool.map(lambda rank: error_of(lambda: ranks.locks[rank].wait(never, STEP)), (0, 2)))
    assert len(told) == 1
    (text,) = told
    assert (
        "waited 0.3 s for step 1 of shape 1x1 (graph): ranks 0 2 came to it, rank 1 did not; it has finished no" in text
    )
    assert error_of(lambda: ranks.locks[1].check("step 1")) == text
    for rank, lock in enumerate(ranks.locks):
        assert lock.broken == text and ranks.libraries[rank].num_breaks == 1
        assert error_of(lambda lock=lock: lock.check("a capture")).startswith("a capture is refused: rank")  # type: ignore[misc]


def test_a_peer_that_has_ended_what_is_waited_for_is_not_missed_when_it_closes() -> None:
    ranks = Ranks()
    ranks.issue(0, 1, 2)
    for rank in (1, 2):
        assert ranks.locks[rank].drain(at_once, is_posted=True) is None
        ranks.pages[rank].set_state(CLOSED)
    looks = iter([False, False, True])
    assert ranks.locks[0].wait(lambda timeout_s: next(looks), STEP)


def test_a_peer_that_closed_before_that_is_named() -> None:
    ranks = Ranks(timeout_s=60.0)
    ranks.issue(0, 1, 2)
    assert ranks.locks[1].drain(at_once, is_posted=True) is None
    ranks.issue(0, 2)
    ranks.pages[1].set_state(CLOSED)
    earlier = Awaited("step 1 of shape 1x1 (graph)", 1, str, number=1)
    looks = iter([False, True])
    assert ranks.locks[0].wait(lambda timeout_s: next(looks), earlier), "the first batch needs nobody any more"
    assert "closed its runtime while rank 0 waited for step 1" in error_of(lambda: ranks.locks[0].wait(never, STEP))


def test_a_rank_that_closes_does_not_wait_for_a_peer_that_is_gone() -> None:
    """Batches that peers have posted, and ended, end here too; of what C replayed no page tells."""
    ranks = Ranks(timeout_s=60.0)
    ranks.issue(0, 1, 2)
    assert ranks.locks[1].drain(at_once, is_posted=True) is None
    ranks.pages[1].set_state(CLOSED)
    looks = iter([False, False, True])
    assert ranks.locks[0].drain(lambda timeout_s: next(looks), is_posted=True) is None
    reason = ranks.locks[0].drain(never, is_posted=False)
    assert reason is not None and " closed its runtime, and may not have come to it" in reason
    assert ranks.locks[0].broken == reason and ranks.libraries[0].num_breaks == 1


def test_a_rank_that_closes_adopts_the_failure_of_a_peer() -> None:
    ranks = Ranks(timeout_s=60.0)
    ranks.issue(0, 1, 2)
    error = ranks.locks[2].fail(ValueError("no memory"), "step 1")
    assert ranks.locks[0].drain(never, is_posted=True) == str(error)


def test_what_a_library_says_ends_the_wait() -> None:
    ranks = Ranks(timeout_s=60.0)
    ranks.issue(0, 1, 2)
    ranks.libraries[1].error = "remote process exited"
    text = error_of(lambda: ranks.locks[1].wait(never, STEP))
    assert text == "rank 1's communicator failed while it waited for step 1 of shape 1x1 (graph): remote process exited"
    assert error_of(lambda: ranks.locks[0].wait(never, STEP)) == text


def test_other_gathers_are_seen_before_outputs_are_believed() -> None:
    """The gather has ended, with another unit's bytes."""
    ranks = Ranks()
    ranks.issue(0, unit=3)
    assert "rank 1 gathers 1 unit, 4 first, in a captured step" in error_of(lambda: ranks.issue(1, unit=4))
    assert "ranks issue different gathers" in error_of(lambda: ranks.locks[0].wait(at_once, STEP))


def test_equal_gathers_after_unlike_ones_are_still_unlike() -> None:
    ranks = Ranks()
    ranks.locks[0].issue("outside", [1, 2], "gathers outside a step")
    ranks.pages[1].post_issue(77, 1 << 56 | 2 << 32 | 1)
    assert "others, in another order or after others" in error_of(lambda: ranks.locks[0].wait(at_once, STEP))


def test_a_rank_may_be_far_ahead() -> None:
    ranks = Ranks()
    for _ in range(100):
        ranks.issue(0, 1)
    ranks.issue(2)
    assert ranks.locks[2].wait(at_once, STEP)


def test_gathers_of_another_kind_want_a_drain_between() -> None:
    lock = Ranks().locks[0]
    assert not lock.must_drain("graph")
    lock.issue("eager", [0], "a step")
    assert (lock.must_drain("eager"), lock.must_drain("outside"), lock.must_drain("graph")) == (False, False, True)
    lock.issue("graph", [0], "a step")
    assert (lock.must_drain("eager"), lock.must_drain("outside"), lock.must_drain("graph")) == (True, True, False)
