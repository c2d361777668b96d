"""What ranks compare before they speculate together, and the one small exchange that a step may need."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from graphshard.comm.group import Group
from graphshard.core.counts import by_value
from graphshard.core.errors import CommError, SpecError

Exchange = Callable[[int], Sequence[int]]
"""A server's own exchange: takes this rank's number, returns all ranks', by rank."""

_ALIKE = "give all ranks the same models, plans and settings"


@dataclass(frozen=True, slots=True)
class Agreed:
    """What ranks agreed on for one step."""

    batch_size: int
    """The largest of all ranks': what a graph is chosen by. 0 if no rank has a request."""
    is_over: bool
    """Whether no rank has a request: then none steps, and loops may end."""
    seconds: float
    """What the exchange took on this rank, waiting for the others included; 0 where there was none."""


def compare_rows(group: Group, name: str, rows: Sequence[tuple[str, str]], texts: Mapping[str, str]) -> None:
    """Compare (field, value) rows over all ranks (collective).

    Args:
        group: the ranks.
        name: what is compared, as errors and the group's calls say it.
        rows: causes before what follows from them.
        texts: for fields whose value is a digest, the text behind it: the first line that differs is named.

    Raises:
        CommError: on every rank alike, naming the first difference and the ranks by what they have.
    """
    gathered: list[Any] = [value for value, _ in group.all_gather(rows, name=name)]
    for entries in zip_longest(*gathered, fillvalue=("nothing", "")):
        fields, values = zip(*entries, strict=True)
        if len(set(fields)) > 1:
            raise CommError(f"{name}: ranks differ: the next entry is {by_value(fields)}; {_ALIKE}")
        if len(set(values)) == 1:
            continue
        where = str(fields[0])
        if where in texts:
            told = [str(text) for text, _ in group.all_gather(texts[where], name=f"{name}: {where}")]
            for number, lines in enumerate(zip_longest(*(text.splitlines() for text in told), fillvalue="nothing"), 1):
                if len(set(lines)) > 1:
                    found = by_value([repr(line.strip()) for line in lines])
                    raise CommError(f"{name}: ranks differ: line {number} of {where} is {found}; {_ALIKE}")
        raise CommError(f"{name}: ranks differ: {where} is {by_value(values)}; {_ALIKE}")


def agree_on_size(group: Group, batch_size: int, exchange: Exchange | None, timeout_s: float) -> Agreed:
    """The largest `batch_size` of all ranks, by one exchange (collective).

    Raises:
        CommError: a rank did not come in time, or `exchange` returned no list of all ranks' numbers.
    """
    begin = time.perf_counter()
    if exchange is None:
        sizes: Any = [size for size, _ in group.all_gather(batch_size, name="batch size", timeout_s=timeout_s)]
    else:
        sizes = _checked(exchange(batch_size), group, batch_size)
    largest = max(sizes)
    return Agreed(largest, largest == 0, time.perf_counter() - begin)


def check_size(batch_size: int) -> None:
    """SpecError unless `batch_size` is a whole number from 0 on."""
    if not _is_size(batch_size):
        raise SpecError(f"batch_size={batch_size!r}: give a whole number, 0 for a rank without requests")


def _checked(told: object, group: Group, mine: int) -> list[int]:
    """What a server's exchange returned, if it can be all ranks' sizes."""
    expected = f"it takes this rank's batch size and returns those of all {group.world_size} ranks, by rank"
    if not isinstance(told, Sequence) or len(told) != group.world_size or not all(map(_is_size, told)):
        raise CommError(f"rank {group.rank}: exchange({mine}) returned {told!r}; {expected}")
    if told[group.rank] != mine:
        raise CommError(
            f"rank {group.rank}: exchange({mine}) returned {list(told)}, where this rank's is {told[group.rank]}; "
            f"{expected}"
        )
    return list(told)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
