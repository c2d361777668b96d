"""Counts and ranks in messages: `1 rank`, `2 ranks`; `rank 1`, `ranks 0 1`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`number` and `noun`, which takes an s, or is `plural`, unless there is one."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def which_ranks(ranks: Iterable[int]) -> str:
    """The ranks by number, as the prefix of what they say in common."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'' if len(numbers) == 1 else 's'} {' '.join(numbers)}"


def some_of(names: Sequence[str], most: int = 8) -> str:
    """`a, b, c and 12 more`: the first `most` of `names`, and how many there are beside them."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def by_value(values: Sequence[object]) -> str:
    """What ranks have, given by rank: `ab12 on rank 0, cd34 on ranks 1 2`."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on {which_ranks(which)}" for value, which in ranks.items())
