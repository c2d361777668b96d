"""A program: the fixed op list of one step, and what the slots hold when it begins and ends."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.core.ops import AgLaunch, Op


@dataclass(frozen=True, slots=True)
class Program:
    """`ops` in issue order. `entry[s]` is the unit that slot s must hold when it begins (None: anything), `exit[s]`
    the unit that it holds when it ends (None: nothing that can be relied on).

    `outside` are the gathers that the host issues before a replay (the head policy `outside`).
    """

    ops: tuple[Op, ...]
    num_slots: int
    num_units: int
    num_segments: int
    entry: tuple[int | None, ...]
    exit: tuple[int | None, ...]
    outside: tuple[AgLaunch, ...] = ()
