"""Which nodes of a captured graph belong to which op of the bound list, and what they move.

While a list is captured the number of nodes is noted before and after each op (`_core.Graph.spans`). So an op has the
nodes that appeared while it was issued, whatever a library made of it; nodes outside all spans are compute that others
captured in between (torch). Addresses then say what is moved: a source inside a shard window is a chunk of some unit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphshard.comm.transport import BoundOp, Transport
from graphshard.core.errors import DeviceError
from graphshard.core.layout import Layout
from graphshard.core.ops import AgLaunch
from graphshard.core.program import Program
from graphshard.runtime.evidence.walk import Node
from graphshard.runtime.memory import RuntimeMemory

Span = tuple[int, int, int, int]
"""As `_core.Graph.spans` gives it: (bound op, stream, first node, node after the last)."""
TracedOp = tuple[int, str, int, int, int, int, int]
"""As `_core.OpList.ops` and `take_trace` give it: (bound op, kind, stream, index, destination, source, bytes)."""
GATHERING = ("copy", "copy2d", "all_gather")
"""Kinds of bound ops that carry out gathers; what tests and watchdogs put beside them is no part of one."""
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
    def of(layout: Layout, memory: RuntimeMemory, transport: Transport) -> Places:
        """Where `memory` has the slots, and where the gathers of `transport` read each unit's chunks."""
        slots = [(memory.slot_address(slot.slot), slot) for slot in layout.slots]
        places = [Range(begin, begin + slot.num_bytes, slot.slot) for begin, slot in slots]
        chunks = [
            Range(*_source(op), unit.unit)
            for unit in layout.units
            for op in transport.gather_ops(unit.unit, 0, 0, 0, transport.num_copies)
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
    nodes: Sequence[Node],
    spans: Iterable[Span],
    bound_ops: Sequence[TracedOp],
    program: Program,
    sources: Sequence[int],
    places: Places,
) -> list[GatherNodes]:
    """Each `ag_launch` of `program` with its nodes, in the program's order; `sources` as in `BoundProgram`."""
    by_op: dict[int, list[int]] = {}
    for index, bound_op in enumerate(owners(nodes, spans)):
        if bound_op >= 0 and bound_ops[bound_op][1] in GATHERING:
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


def _source(op: BoundOp) -> tuple[int, int]:
    """Where a gather op of a transport reads: begin and end."""
    kind, numbers = op[0], [number for number in op[1:] if isinstance(number, int)]
    if kind == "copy":
        _, _, source, num_bytes = numbers
    elif kind == "all_gather":
        _, _, _, source, num_bytes = numbers
    else:
        _, _, _, source, pitch, row_bytes, rows = numbers
        num_bytes = (rows - 1) * pitch + row_bytes
    return source, source + num_bytes


def _find(ranges: Sequence[Range], address: int) -> int | None:
    return next((one.number for one in ranges if one.begin <= address < one.end), None)
