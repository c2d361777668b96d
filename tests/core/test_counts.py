"""Counts in messages have their plurals."""

from __future__ import annotations

from graphshard.core.counts import by_value, counted, some_of, which_ranks


def test_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(number, "launch", "launches") for number in (1, 3)] == ["1 launch", "3 launches"]
    assert (which_ranks([3]), which_ranks([0, 2])) == ("rank 3", "ranks 0 2")


def test_long_lists_are_cut() -> None:
    assert some_of(["a", "b"]) == "a, b" and some_of(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_ranks_that_have_the_same_are_named_together() -> None:
    assert by_value(["a", "b", "a"]) == "a on ranks 0 2, b on rank 1"
    assert by_value([4, 4]) == "4 on ranks 0 1" and by_value([]) == ""
