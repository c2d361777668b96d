"""Every byte of every sharded weight is on one rank, and on one only: what ranks loaded is put side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphshard.comm.group import Group
from graphshard.core.counts import which_ranks
from graphshard.core.errors import CommError
from graphshard.core.layout import Layout, WeightView

Ranges = Mapping[str, Sequence[tuple[int, int]]]
"""Half-open ranges of bytes, by weight."""


def exchange_coverage(group: Group, layout: Layout, loaded: Ranges) -> None:
    """Compare what all ranks loaded of the sharded weights (collective).

    Raises:
        CommError: on every rank, if they have unlike layouts, or a byte was loaded by none or by two.
    """
    views = [view for unit in layout.units for view in unit.views]
    mine = [[i, begin, end] for i, view in enumerate(views) for begin, end in loaded.get(view.weight, ())]
    told: list[Any] = [value for value, _ in group.all_gather([layout.digest, mine], name="loaded bytes")]
    unlike = [rank for rank, (digest, _) in enumerate(told) if digest != told[0][0]]
    if unlike:
        raise CommError(
            f"layouts differ: rank 0 has digest {told[0][0][:12]}, {which_ranks(unlike)} {told[unlike[0]][0][:12]}; "
            "start all ranks with the same model, plan and world size"
        )
    by_rank: list[dict[str, list[tuple[int, int]]]] = []
    for _, ranges in told:
        of_rank: dict[str, list[tuple[int, int]]] = {}
        for index, begin, end in ranges:
            of_rank.setdefault(views[index].weight, []).append((begin, end))
        by_rank.append(of_rank)
    check_coverage(layout, by_rank)


def check_coverage(layout: Layout, loaded: Sequence[Ranges]) -> None:
    """`loaded[rank]` together hold every byte of every sharded weight exactly once.

    Raises:
        CommError: naming the first weight, bytes and ranks where they do not.
    """
    for unit in layout.units:
        for view in unit.views:
            pieces = sorted(
                (b, e, rank) for rank, of_rank in enumerate(loaded) for b, e in of_rank.get(view.weight, ())
            )
            end, owner = 0, -1
            for begin, piece_end, rank in pieces:
                if begin > end:
                    raise _broken(view, f"no rank loaded bytes {end} to {begin}")
                if begin < end:
                    twice = f"{which_ranks(sorted({owner, rank}))} loaded bytes {begin} to {min(end, piece_end)} twice"
                    raise _broken(view, twice)
                end, owner = piece_end, rank
            if end < view.num_bytes:
                raise _broken(view, f"no rank loaded bytes {end} to {view.num_bytes}")
            if end > view.num_bytes:
                raise _broken(view, f"rank {owner} loaded bytes up to {end}")


def _broken(view: WeightView, what: str) -> CommError:
    return CommError(
        f"weight {view.weight}, {view.num_bytes} bytes, is not whole: {what}. Two processes may have the same rank, or "
        "a rank another world size: see that each has its own RANK, and all the same WORLD_SIZE"
    )
