"""Counts in messages have their plurals."""

from __future__ import annotations

from graphshard.core.counts import counted, which_ranks


def test_one_is_singular() -> None:
    assert [counted(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert [counted(number, "launch", "launches") for number in (1, 3)] == ["1 launch", "3 launches"]
    assert (which_ranks([3]), which_ranks([0, 2])) == ("rank 3", "ranks 0 2")
