"""Groups: what travels, what is named when it does not, and that nothing is left behind."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
from census import no_growth
from group_programs import (
    die_with_a_child_that_holds_the_sockets,
    end_in_a_call,
    fail_alone,
    gather_descriptors,
    gather_everything,
    make_another_call,
    stay_away,
    use_in_a_fork,
    use_subgroups,
)
from ranks import MODES, run_on_ranks, try_on_ranks

from graphshard.comm.group import LocalGroup
from graphshard.core.errors import CommError, SpecError


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_come_by_rank(mode: str, world_size: int) -> None:
    with no_growth():
        results = run_on_ranks(gather_everything, world_size, 3_000_000, mode=mode)  # more than a socket holds
    for result in results:
        assert [tuple(row) for row in result] == [(rank, 3_000_000) for rank in range(world_size)]


@pytest.mark.parametrize(("mode", "num_fds"), [("threads", 3), ("processes", 3), ("processes", 300)])
def test_descriptors_travel_and_work(mode: str, num_fds: int) -> None:
    with no_growth():  # 300: more than one message carries
        assert len(run_on_ranks(gather_descriptors, 2, num_fds, mode=mode)) == 2


@pytest.mark.parametrize("mode", MODES)
def test_subgroups_are_apart(mode: str) -> None:
    even, odd = [[0, 2], [0, 0, 1, 1], [0, -2]], [[1, 3], [0, 0, 1, 1], [-1, -3]]
    assert run_on_ranks(use_subgroups, 4, mode=mode) == [even, odd, even, odd]


def test_a_failed_subgroup_leaves_the_group_alone() -> None:
    with LocalGroup(3, timeout_s=20) as groups:
        pairs = [groups[rank].subgroup([0, 1]) for rank in (0, 1)]

        def late(rank: int) -> None:
            pair = pairs[rank]
            assert pair is not None
            if rank == 0:
                with pytest.raises(CommError, match=r"rank 1 \(a thread\) did not arrive"):
                    pair.barrier(timeout_s=0.1)
            groups[rank].barrier()
            with pytest.raises(CommError, match="rank 1"):
                pair.barrier()

        _in_threads(late, 2, lambda: groups[2].barrier())


@pytest.mark.parametrize("ranks", [[], [0, 0], [0, 5], [-1]])
def test_subgroups_that_cannot_be(ranks: list[int]) -> None:
    with LocalGroup(2) as groups, pytest.raises(SpecError, match="0 to 1, each once"):
        groups[0].subgroup(ranks)


@pytest.mark.parametrize("mode", MODES)
def test_unlike_calls_are_named_on_all_ranks(mode: str) -> None:
    for outcome in try_on_ranks(make_another_call, 3, mode=mode):
        assert outcome.error_type == "CommError"
        assert "in barrier" in outcome.error and "in windows" in outcome.error, outcome.error
        assert "same order" in outcome.error


@pytest.mark.parametrize("mode", MODES)
def test_one_ranks_error_is_everybodys(mode: str) -> None:
    """A rank that fails before a collective must not leave the others in it."""
    assert run_on_ranks(fail_alone, 3, [], mode=mode) == ["loaded"] * 3
    outcomes = try_on_ranks(fail_alone, 3, [2], mode=mode)
    text = "load failed on rank 2: weight w has dtype int8 in rank 2's copy"
    assert [(o.error_type, o.error) for o in outcomes] == [("LoadError", text)] * 3
    outcomes = try_on_ranks(fail_alone, 3, [0, 2], mode=mode)
    text = "load failed on rank 0 (and on rank 2): weight w has dtype int8 in rank 0's copy"
    assert [(o.error_type, o.error) for o in outcomes] == [("LoadError", text)] * 3


def test_unknown_errors_become_comm_errors() -> None:
    with LocalGroup(1) as groups, pytest.raises(CommError, match="on rank 0: ZeroDivisionError: "):
        groups[0].agree("division", lambda: 1 // 0)


@pytest.mark.parametrize(
    ("how", "state"), [("stop", "stopped"), pytest.param("sleep", "running", marks=pytest.mark.slow)]
)
def test_who_does_not_come_is_named(how: str, state: str) -> None:
    with no_growth():
        outcomes = try_on_ranks(stay_away, 3, how, mode="processes", group_timeout_s=1.0, after_failure_s=2.0)
    for outcome in outcomes[:2]:
        assert "waited 1.0 s in barrier (call 1 of this group): rank 2 (pid" in outcome.error, outcome.error
        assert f", {state}) did not arrive; rank" in outcome.error
        assert "raise timeout_s" in outcome.error
    assert "was killed" in outcomes[2].error


@pytest.mark.parametrize(
    ("how", "words"),
    [("kill", "died"), ("exit", "died"), ("raise", "closed its group after RuntimeError: out of luck")],
)
def test_a_dead_peer_is_named_at_once(how: str, words: str) -> None:
    """The limit of the waits is far above that of the test: only the death itself can end them."""
    with no_growth():
        outcomes = try_on_ranks(end_in_a_call, 3, how, mode="processes", group_timeout_s=600.0, timeout_s=30.0)
    for rank in (0, 2):
        assert outcomes[rank].error_type == "CommError"
        assert "rank 1 (pid" in outcomes[rank].error, outcomes[rank].error
        assert f"{words} while rank" in outcomes[rank].error and "in second (call 2" in outcomes[rank].error


def test_a_child_of_a_dead_peer_hides_nothing() -> None:
    outcomes = try_on_ranks(
        die_with_a_child_that_holds_the_sockets, 2, mode="processes", group_timeout_s=600.0, timeout_s=30.0
    )
    assert "rank 1 (pid" in outcomes[0].value and "died while rank 0 waited" in outcomes[0].value
    assert "SIGKILL" in outcomes[1].error


def test_a_fork_may_not_use_the_group() -> None:
    for text in run_on_ranks(use_in_a_fork, 2, mode="processes"):
        assert "a fork of it: start ranks by spawn" in text


def test_after_close() -> None:
    with no_growth():
        groups = LocalGroup(2)
        pair = groups[0].subgroup([0, 1])
        assert pair is not None
        pair.close()
        with pytest.raises(CommError, match="closed on rank 0: make a new one"):
            pair.barrier()
        groups[0].close()
        groups[0].close()
        with pytest.raises(CommError, match="the group of rank 0 is closed"):
            groups[0].barrier()
        with pytest.raises(CommError, match=r"rank 0 \(a thread\) closed its group while rank 1 waited in barrier"):
            groups[1].barrier()
        with pytest.raises(CommError, match="failed before and is of no more use"):
            groups[1].barrier()
        groups.close()


def test_a_dropped_group_is_released() -> None:
    with no_growth():
        for group in LocalGroup(3):
            assert group.subgroup([group.rank]) is not None
        del group


def test_closing_from_another_thread_ends_a_wait() -> None:
    with LocalGroup(2, timeout_s=30) as groups:
        texts: list[str] = []

        def wait() -> None:
            try:
                groups[0].barrier()
            except CommError as error:
                texts.append(str(error))

        thread = threading.Thread(target=wait)
        thread.start()
        assert groups[1].subgroup([1]) is not None  # rank 1 itself never comes
        groups[0].close()
        thread.join(20)
        assert not thread.is_alive() and "closed" in texts[0]


def test_two_threads_of_a_rank_use_two_groups_at_once() -> None:
    """Rank 0 waits in the group, then in the pair; rank 1's threads come in the opposite order."""
    with LocalGroup(2, timeout_s=30) as groups:
        pairs = [group.subgroup([0, 1]) for group in groups]
        pair_done = threading.Event()

        def use(place: int) -> None:
            rank, in_pair = divmod(place, 2)
            pair = pairs[rank]
            assert pair is not None
            if in_pair:
                pair.all_gather("pair")
                pair_done.set()
            else:
                if rank == 1:
                    assert pair_done.wait(20)
                groups[rank].all_gather("group")

        _in_threads(use, 4)
        assert pair_done.is_set()


def test_one_rank_needs_no_sockets() -> None:
    with no_growth():
        before = len(os.listdir("/proc/self/fd"))
        with LocalGroup(1) as groups:
            assert len(os.listdir("/proc/self/fd")) == before
            groups[0].barrier()
            assert [value for value, _ in groups[0].all_gather([1, "two"])] == [[1, "two"]]


def test_wrong_requests() -> None:
    with pytest.raises(SpecError, match="1 or more"):
        LocalGroup(0)
    with pytest.raises(SpecError, match="seconds above 0"):
        LocalGroup(1, timeout_s=0)


def _in_threads(function: Any, num: int, *more: Any) -> None:
    """Run `function(i)` and each of `more` on threads; the first error is raised here."""
    errors: list[BaseException] = []

    def run(work: Any, *arguments: int) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function, i)) for i in range(num)]
    threads += [threading.Thread(target=run, args=(work,)) for work in more]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if errors:
        raise errors[0]
