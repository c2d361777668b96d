"""What a step was seen to do, op by op: from the driver calls of an eager run, or from the nodes of a captured graph.

Both are rows of one form, so they can be compared with each other and across ranks. Which unit is gathered follows from
where its bytes come from, not from what the op is called; what is before what follows from events, or from edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphshard.runtime.evidence.attribution import GATHERING, Places, Span, TracedOp, owners
from graphshard.runtime.evidence.walk import Node

KINDS = dict.fromkeys(GATHERING, "gather") | {
    "call": "compute",
    "write_value": "write",
    "values": "flags",
    "reduce_scatter": "exchange",
}
"""Bound ops that have rows; records and waits are their order. What copies no chunk of a unit is an exchange."""
COMPARED = ("kind", "op", "unit", "slot", "num_bytes", "stream")


@dataclass(frozen=True, slots=True)
class SeenOp:
    """One row. Nothing in it depends on addresses or on which rank it is."""

    kind: str
    """gather, compute, write (of a word: outputs are there, a gather has begun); of tensor-parallel blocks: flags, and
    exchange of activations."""
    op: int
    """The program's op; -1: the end of the list."""
    unit: int | None
    """The unit whose chunks were read; None: no chunk of any."""
    slot: int | None
    num_bytes: int
    stream: str
    after: tuple[int, ...] = ()
    """Positions of the rows that were over before it began; without those that follow from the others."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> SeenOp:
        """From `asdict`, also after JSON."""
        return SeenOp(**{**values, "after": tuple(values["after"])})

    def __str__(self) -> str:
        return f"{self.kind}{self._gathered()} stream={self.stream} op={self.op}"

    def _gathered(self) -> str:
        """What a gather brings where, as far as its copies say."""
        if self.kind != "gather":
            return ""
        if self.num_bytes == 0:
            return " by a kernel, no copy that names a unit:"
        unit = "none, or several," if self.unit is None else self.unit
        slot = "none, or several," if self.slot is None else self.slot
        return f" unit={unit} slot={slot} bytes={self.num_bytes}"


@dataclass(frozen=True, slots=True)
class Seen:
    """Rows in the order in which they were issued, and for each all rows that were over before it (bits)."""

    ops: tuple[SeenOp, ...]
    before: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two sequences differ."""

    position: int
    field: str
    """One of `COMPARED`, `length`, or `order`."""
    one: str
    other: str

    def text(self, one: str, other: str) -> str:
        """A line; `one` and `other` name the sequences."""
        return f"position {self.position} ({self.field}): {one} has {self.one}; {other} has {self.other}"


@dataclass
class _Row:
    """A row while it grows: the copies of a gather on one stream are one row."""

    kind: str
    op: int
    stream: int
    before: int
    units: set[int | None] = field(default_factory=set)
    slots: set[int] = field(default_factory=set)
    num_bytes: int = 0

    def add(self, places: Places, destination: int, source: int, num_bytes: int) -> None:
        slot = places.slot(destination)
        self.slots |= {slot} if slot is not None else set()
        self.units.add(places.unit(source))
        self.num_bytes += num_bytes

    def seen(self, streams: Sequence[str], after: tuple[int, ...]) -> SeenOp:
        unit, slot = _only(self.units), _only(self.slots)
        return SeenOp(self.kind, self.op, unit, slot, self.num_bytes, streams[self.stream], after)


_Key = tuple[str, int, int, int]


def _kind(traced: TracedOp, places: Places) -> str | None:
    """What the bound op is, by where it reads; None: no row of its own."""
    _, kind, _, _, _, source, _ = traced
    if kind in GATHERING and places.unit(source) is None:
        return "exchange"
    return KINDS.get(kind)


def _key(kind: str, op: int, stream: int, bound_op: int) -> _Key:
    """What is one row: a gather's copies on one stream are, two writes never."""
    return kind, op, stream, bound_op if kind == "write" else -1


def seen_calls(traced: Iterable[TracedOp], sources: Sequence[int], streams: Sequence[str], places: Places) -> Seen:
    """The rows of ops that were handed to the driver in this order; `sources` and `streams` are the bound list's."""
    rows: dict[_Key, _Row] = {}
    numbers: dict[_Key, int] = {}
    over: dict[int, int] = {}  # stream -> rows that are over when its next op begins
    events: dict[int, int] = {}
    for call in traced:
        bound_op, kind, stream, index, destination, source, num_bytes = call
        if kind == "record":
            events[index] = over.get(stream, 0)
        elif kind == "wait":
            over[stream] = over.get(stream, 0) | events.get(index, 0)
        name = _kind(call, places)
        if name is not None:
            key = _key(name, sources[bound_op], stream, bound_op)
            if key not in rows:
                numbers[key] = len(rows)
                rows[key] = _Row(name, sources[bound_op], stream, over.get(stream, 0))
            if name == "gather":
                rows[key].add(places, destination, source, num_bytes)
            else:
                rows[key].num_bytes += num_bytes
            over[stream] = over.get(stream, 0) | 1 << numbers[key]
    return _seen(list(rows.values()), streams)


def seen_nodes(
    nodes: Sequence[Node],
    spans: Sequence[Span],
    bound_ops: Sequence[TracedOp],
    sources: Sequence[int],
    streams: Sequence[str],
    places: Places,
) -> Seen:
    """The rows of a captured graph; `bound_ops` say of which kind the op was during which a node appeared."""
    rows: dict[_Key, _Row] = {}
    members: dict[_Key, list[int]] = {}
    stream_of = {op: stream for op, stream, _, _ in spans}
    counted: set[int] = set()
    for index, bound_op in enumerate(owners(nodes, spans)):
        kind = _kind(bound_ops[bound_op], places) if bound_op >= 0 else None
        if kind is None:
            continue
        source, stream = sources[bound_op], stream_of[bound_op]
        key = _key(kind, source, stream, bound_op)
        row = rows.setdefault(key, _Row(kind, source, stream, 0))
        members.setdefault(key, []).append(index)
        node = nodes[index]
        if kind == "gather" and node.kind == "memcpy" and places.unit(node.source) is not None:
            row.add(places, node.destination, node.source, node.num_bytes)
        elif kind != "gather" and bound_op not in counted:
            counted.add(bound_op)
            row.num_bytes += bound_ops[bound_op][-1]
    sets = [sum(1 << i for i in members[key]) for key in rows]
    ancestors = _ancestors(nodes)
    for key, row in rows.items():
        common = ~0
        for i in members[key]:
            common &= ancestors[i]
        row.before = sum(1 << number for number, one in enumerate(sets) if one & ~common == 0)
    return _seen(list(rows.values()), streams)


def first_difference(one: Sequence[SeenOp], other: Sequence[SeenOp], order: bool = False) -> Difference | None:
    """Where two sequences differ first in `COMPARED` (with `order`: or in what they are after); None if nowhere."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        unlike = [name for name in COMPARED if getattr(a, name) != getattr(b, name)]
        if unlike:
            return Difference(position, unlike[0], str(a), str(b))
        if order and a.after != b.after:
            return Difference(position, "order", f"{a} after {a.after}", f"{b} after {b.after}")
    shared = min(len(one), len(other))
    if len(one) == len(other):
        return None
    return Difference(shared, "length", *(str(ops[shared]) if len(ops) > shared else "nothing" for ops in (one, other)))


def compare_runs(eager: Seen, captured: Seen) -> Difference | None:
    """Where a captured graph differs from the eager run. More order in the graph is none: a library may add some."""
    difference = first_difference(eager.ops, captured.ops)
    if difference is not None:
        return difference
    for position, (needed, found) in enumerate(zip(eager.before, captured.before, strict=True)):
        missing = list(_bits(needed & ~found))
        if missing:
            row, first = eager.ops[position], eager.ops[missing[0]]
            return Difference(position, "order", f"{row} after {first}", "no path between them")
    return None


def _seen(rows: Sequence[_Row], streams: Sequence[str]) -> Seen:
    before = tuple(row.before for row in rows)
    ops = []
    for row in rows:
        implied = 0
        for number in _bits(row.before):
            implied |= before[number]
        ops.append(row.seen(streams, tuple(_bits(row.before & ~implied))))
    return Seen(tuple(ops), before)


def _ancestors(nodes: Sequence[Node]) -> list[int]:
    """For each node the set (bits) of all nodes that are over before it."""
    found: list[int] = []
    for node in nodes:  # in the order of the capture: what a node waits for stands before it
        before = 0
        for i in node.after:
            before |= found[i] | 1 << i
        found.append(before)
    return found


def _bits(number: int) -> Iterable[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _only(values: Iterable[int | None]) -> int | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None
