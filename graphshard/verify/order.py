"""Happens-before of lowered lists that run one after the other: vector clocks over streams and events.

One list follows another on `compute`, the origin, and on nothing else: a captured graph and a re-issued list differ in
what more they order, so nothing more is believed. Every other stream of a step starts knowing nothing of the step
before; the list's own fork and join have to order it. A wait binds, as on CUDA, to the latest record of its event
that was issued before it in the same list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.lowering import Lowered, LoweredOp, Record, Wait

Clock = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unbound:
    """A wait for an event that its own list has not recorded before: it crosses the list's border."""

    step: int
    index: int
    wait: Wait


class Order:
    """Answers `before(x, y)` in O(1) for the nodes of `lists`, run in this order.

    A node is an int: `node(step, index)` for op `index` of list `step`; `begin(step)` and `end(step)` are the points
    on `compute` just before and just after that list.
    """

    def __init__(self, lists: Sequence[Lowered]) -> None:
        assert lists, "an order needs at least one list"
        self.origin = lists[0].streams[0] if lists[0].streams else "compute"
        self.unbound: list[Unbound] = []
        self._columns: dict[tuple[int, str], int] = {}
        self._offsets: list[int] = []
        self._column_of: list[int] = []
        self._position_of: list[int] = []
        self._seen: list[Clock] = []  # per node: for each stream, how many of its nodes happened before it
        for step, listed in enumerate(lists):
            for op in listed.ops:
                self._column(step, op.stream)
        self._column(0, self.origin)
        self._counts = [0] * len(self._columns)
        self._frontiers: list[Clock] = [(0,) * len(self._columns)] * len(self._columns)
        for step, listed in enumerate(lists):
            self._walk(step, listed.ops)

    def node(self, step: int, index: int) -> int:
        """The node of op `index` of list `step`."""
        return self._offsets[step] + index

    def begin(self, step: int) -> int:
        """The point on `compute` before the first op of list `step`."""
        return self._offsets[step] - 1

    def end(self, step: int) -> int:
        """The point on `compute` after the last op of list `step`."""
        return self._offsets[step + 1] - 2 if step + 1 < len(self._offsets) else len(self._seen) - 1

    def before(self, first: int, second: int) -> bool:
        """Whether `first` has ended before `second` begins, in every execution."""
        column = self._column_of[first]
        if column == self._column_of[second]:
            return self._position_of[first] < self._position_of[second]
        return self._seen[second][column] > self._position_of[first]

    def _column(self, step: int, stream: str) -> int:
        """The clock's column of a stream; `compute` is one stream over all steps, the others one a step."""
        key = (0, stream) if stream == self.origin else (step, stream)
        return self._columns.setdefault(key, len(self._columns))

    def _append(self, column: int) -> None:
        """Append a node to the stream of `column`."""
        self._column_of.append(column)
        self._position_of.append(self._counts[column])
        self._seen.append(self._frontiers[column])
        self._counts[column] += 1

    def _walk(self, step: int, ops: Sequence[LoweredOp]) -> None:
        """Append the nodes of one list, its begin and its end."""
        origin = self._column(step, self.origin)
        recorded: dict[int, Clock] = {}
        self._append(origin)
        self._offsets.append(len(self._seen))
        for index, op in enumerate(ops):
            column = self._column(step, op.stream)
            if isinstance(op, Wait):
                if op.event in recorded:
                    self._frontiers[column] = tuple(map(max, self._frontiers[column], recorded[op.event]))
                else:
                    self.unbound.append(Unbound(step, index, op))
            self._append(column)
            if isinstance(op, Record):
                frontier = self._frontiers[column]
                recorded[op.event] = frontier[:column] + (self._counts[column],) + frontier[column + 1 :]
        self._append(origin)
