"""Which nodes of a captured graph belong to which op of the bound list, and what they move.

While a list is captured the number of nodes is noted before and after each op (`_core.Graph.spans`). So an op has the
nodes that appeared while it was issued, whatever a library made of it; nodes outside all spans are compute that others
captured in between (torch). Addresses then say what is moved: a source inside a shard window is a chunk of some unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphshard._core import Memory
from graphshard.core.errors import DeviceError
from graphshard.core.layout import Layout
from graphshard.core.ops import AgLaunch
from graphshard.core.program import Program
from graphshard.runtime.walk import Node

Span = tuple[int, int, int, int]
"""As `_core.Graph.spans` gives it: (bound op, stream, first node, node after the last)."""
HIDING_KINDS = ("graph", "other")
"""Nodes that may hold kernels which a walk does not see."""


@dataclass(frozen=True, slots=True)
class Range:
    """Addresses `[begin, end)` that hold a chunk of `unit`, or are a slot."""

    begin: int
    end: int
    number: int
    """Of the unit, or the slot."""


class Places:
    """What lies where on one rank: slots, and chunks of units in the shard windows that it reads."""

    def __init__(self, slots: Iterable[Range], chunks: Iterable[Range]) -> None:
        self._slots, self._chunks = tuple(slots), tuple(chunks)

    @staticmethod
    def of(layout: Layout, slots: Memory | None, windows: Sequence[int]) -> Places:
        """From the slot window and the addresses of the shard windows, by rank; ranks that are not read may lack."""
        base = slots.address if slots is not None else 0
        places = [Range(base + s.offset, base + s.offset + s.num_bytes, s.slot) for s in layout.slots]
        chunks = [
            Range(window + unit.chunk_offset, window + unit.chunk_offset + unit.chunk_bytes, unit.unit)
            for window in windows
            for unit in layout.units
        ]
        return Places(places, chunks)

    def slot(self, address: int) -> int | None:
        """The slot at `address`."""
        return _find(self._slots, address)

    def unit(self, address: int) -> int | None:
        """The unit of which a chunk lies at `address`."""
        return _find(self._chunks, address)


@dataclass(frozen=True, slots=True)
class GatherNodes:
    """The nodes of one gather, and what the chunk copies among them move."""

    op: int
    launch: AgLaunch
    nodes: tuple[int, ...]
    """By index."""
    kinds: Mapping[str, int]
    num_copies: int
    """Copies of chunks; the other memcpy nodes write flags."""
    num_bytes: int
    units: frozenset[int]
    """Units whose chunks are copied: the launch's own, if all is as it should be."""


def owners(nodes: Sequence[Node], spans: Iterable[Span]) -> list[int]:
    """For each node the bound op that made it; -1: compute that the list did not issue.

    Raises:
        DeviceError: spans overlap or name nodes that are not there: the graph was changed after its capture.
    """
    owner = [-1] * len(nodes)
    for op, _, begin, end in spans:
        if not 0 <= begin <= end <= len(nodes) or any(owner[i] >= 0 for i in range(begin, end)):
            raise DeviceError(
                f"bound op {op} was captured as nodes {begin} to {end} of a graph of {len(nodes)} nodes, which is not "
                "what the driver shows now: the graph was changed after its capture; capture again"
            )
        owner[begin:end] = [op] * (end - begin)
    return owner


def gathers_of(
    nodes: Sequence[Node], spans: Iterable[Span], program: Program, sources: Sequence[int], places: Places
) -> list[GatherNodes]:
    """Each `ag_launch` of `program` with its nodes, in the program's order; `sources` as in `BoundProgram`."""
    by_op: dict[int, list[int]] = {}
    for index, bound_op in enumerate(owners(nodes, spans)):
        if bound_op >= 0:
            by_op.setdefault(sources[bound_op], []).append(index)
    return [
        _gather(index, op, by_op.get(index, []), nodes, places)
        for index, op in enumerate(program.ops)
        if isinstance(op, AgLaunch)
    ]


def _gather(index: int, launch: AgLaunch, mine: Sequence[int], nodes: Sequence[Node], places: Places) -> GatherNodes:
    kinds = Counter(nodes[i].kind for i in mine)
    copies = [(nodes[i], places.unit(nodes[i].source)) for i in mine if nodes[i].kind == "memcpy"]
    chunks = [(node, unit) for node, unit in copies if unit is not None]
    return GatherNodes(
        op=index,
        launch=launch,
        nodes=tuple(mine),
        kinds=dict(sorted(kinds.items())),
        num_copies=len(chunks),
        num_bytes=sum(node.num_bytes for node, _ in chunks),
        units=frozenset(unit for _, unit in chunks),
    )


def problems_of(gathers: Iterable[GatherNodes], nodes: Sequence[Node]) -> list[str]:
    """What a gather must not have, a line each: kernels, nodes that may hide some, chunks of other units, nothing."""
    found = []
    for gather in gathers:
        where = f"unit {gather.launch.unit} (op {gather.op} {gather.launch})"
        for i in gather.nodes:
            if nodes[i].kind == "kernel":
                found.append(f"{where}: node {i} is a kernel {nodes[i].name}".rstrip() + ", for which an SM works")
            elif nodes[i].kind in HIDING_KINDS:
                found.append(f"{where}: node {i} is of kind {nodes[i].kind}, and may hold kernels")
        if not gather.nodes:
            found.append(f"{where}: the graph has no node of it")
        others = sorted(gather.units - {gather.launch.unit})
        if others:
            found.append(f"{where}: copies chunks of units {others}")
    return found


def _find(ranges: Sequence[Range], address: int) -> int | None:
    return next((one.number for one in ranges if one.begin <= address < one.end), None)
