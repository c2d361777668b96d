"""Rows from driver calls and rows from nodes: equal where the same was done, and where not, which row differs first."""

from __future__ import annotations

from dataclasses import replace

from graphshard.runtime.evidence.attribution import Places, Range
from graphshard.runtime.evidence.sequence import Seen, SeenOp, compare_runs, first_difference, seen_calls, seen_nodes
from graphshard.runtime.evidence.walk import Node

PLACES = Places(
    [Range(0x1000, 0x1100, 0), Range(0x1100, 0x1200, 1)],
    [Range(0x8000 + u * 0x80, 0x8080 + u * 0x80, u) for u in (0, 1)],
)
STREAMS = ("compute", "copy", "copy_own")
# two units gathered by two copies each, the second on a branch; a call reads each, in turn
CALLS = [
    (0, "record", 0, 0, 0, 0, 0),
    (1, "wait", 1, 0, 0, 0, 0),
    (2, "record", 1, 1, 0, 0, 0),
    (3, "wait", 2, 1, 0, 0, 0),
    (4, "copy", 1, 0, 0x1000, 0x8000, 0x80),
    (5, "copy", 2, 0, 0x1080, 0x8000, 0x80),
    (6, "record", 2, 2, 0, 0, 0),
    (7, "wait", 1, 2, 0, 0, 0),
    (8, "record", 1, 3, 0, 0, 0),
    (9, "copy", 1, 0, 0x1100, 0x8080, 0x80),
    (10, "copy", 1, 0, 0x1180, 0x8080, 0x80),
    (11, "record", 1, 4, 0, 0, 0),
    (12, "wait", 0, 3, 0, 0, 0),
    (13, "call", 0, 0, 0, 0, 0),
    (14, "wait", 0, 4, 0, 0, 0),
    (15, "call", 0, 1, 0, 0, 0),
    (16, "write_value", 0, 0, 0x9000, 0, 0),
]
SOURCES = (-1, -1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, -1)
NODES = (
    Node("memcpy", (), 0x1000, 0x8000, 0x80),
    Node("memcpy", (), 0x1080, 0x8000, 0x80),
    Node("memcpy", (0, 1), 0x1100, 0x8080, 0x80),
    Node("memcpy", (2,), 0x1180, 0x8080, 0x80),
    Node("host", (0, 1)),
    Node("host", (3, 4)),
    Node("batch_mem_op", (5,)),
)
SPANS = [(4, 1, 0, 1), (5, 2, 1, 2), (9, 1, 2, 3), (10, 1, 3, 4), (13, 0, 4, 5), (15, 0, 5, 6), (16, 0, 6, 7)]
ROWS = (
    SeenOp("gather", 0, 0, 0, 0x80, "copy", ()),
    SeenOp("gather", 0, 0, 0, 0x80, "copy_own", ()),
    SeenOp("gather", 1, 1, 1, 0x100, "copy", (0, 1)),
    SeenOp("compute", 3, None, None, 0, "compute", (0, 1)),
    SeenOp("compute", 5, None, None, 0, "compute", (2, 3)),
    SeenOp("write", -1, None, None, 0, "compute", (4,)),
)


def eager(calls: list[tuple[int, str, int, int, int, int, int]] = CALLS) -> Seen:
    return seen_calls(calls, SOURCES, STREAMS, PLACES)


def captured(nodes: tuple[Node, ...] = NODES, spans: list[tuple[int, int, int, int]] = SPANS) -> Seen:
    return seen_nodes(nodes, spans, CALLS, SOURCES, STREAMS, PLACES)


def test_calls_and_nodes_give_the_same_rows() -> None:
    assert eager().ops == ROWS
    assert captured().ops == ROWS
    assert compare_runs(eager(), captured()) is None
    assert [SeenOp.of({**row_values(row), "after": list(row.after)}) for row in ROWS] == list(ROWS)


def row_values(row: SeenOp) -> dict[str, object]:
    return {name: getattr(row, name) for name in ("kind", "op", "unit", "slot", "num_bytes", "stream")}


def test_a_missing_gather_is_named_with_what_stands_there() -> None:
    without = [call for call in CALLS if call[0] not in (9, 10)]
    difference = first_difference(eager().ops, eager(without).ops)
    assert difference is not None and (difference.position, difference.field) == (2, "kind")
    assert difference.text("rank 0", "rank 1") == (
        "position 2 (kind): rank 0 has gather unit=1 slot=1 bytes=256 stream=copy op=1; "
        "rank 1 has compute stream=compute op=3"
    )


def test_a_sequence_that_ends_early() -> None:
    difference = first_difference(ROWS, ROWS[:-1])
    assert difference is not None and (difference.position, difference.field) == (5, "length")
    assert difference.other == "nothing"


def test_other_bytes_another_unit_and_another_stream_differ() -> None:
    for call, name in (
        ((9, "copy", 1, 0, 0x1100, 0x8080, 0x40), "num_bytes"),
        ((9, "copy", 1, 0, 0x1100, 0x8000, 0x80), "unit"),
        ((9, "copy", 1, 0, 0x1000, 0x8080, 0x80), "slot"),
    ):
        difference = first_difference(ROWS, eager([*CALLS[:9], call, *CALLS[10:]]).ops)
        assert difference is not None and (difference.position, difference.field) == (2, name)
    moved = [call if call[0] != 13 else (13, "call", 1, 0, 0, 0, 0) for call in CALLS]
    difference = first_difference(ROWS, eager(moved).ops)
    assert difference is not None and difference.field == "stream"


def test_a_kernel_in_place_of_copies_differs() -> None:
    """Nothing tells what a kernel reads, so its row has no unit and no bytes."""
    nodes = (*NODES[:2], Node("kernel", (0, 1)), Node("kernel", (2,)), *NODES[4:])
    difference = compare_runs(eager(), captured(nodes))
    assert difference is not None and (difference.position, difference.field) == (2, "unit")


def test_an_order_that_the_graph_lacks_is_a_difference_and_more_order_is_none() -> None:
    loose = (*NODES[:5], replace(NODES[5], after=(4,)), NODES[6])
    difference = compare_runs(eager(), captured(loose))
    assert difference is not None and (difference.position, difference.field) == (4, "order")
    assert difference.one == f"{ROWS[4]} after {ROWS[2]}"
    tight = (*NODES[:4], replace(NODES[4], after=(3,)), *NODES[5:])
    assert compare_runs(eager(), captured(tight)) is None
    assert first_difference(ROWS, captured(tight).ops) is None
    unlike = first_difference(ROWS, captured(tight).ops, order=True)
    assert unlike is not None and unlike.field == "order", "across ranks it must be alike"


def test_writes_beside_a_gather_are_rows_of_their_own() -> None:
    calls = [
        (0, "write_value", 1, 0, 0x9000, 0, 0),
        (1, "all_gather", 1, 0, 0x1000, 0x8000, 0x100),
        (2, "write_value", 1, 0, 0x9004, 0, 0),
    ]
    nodes = tuple(
        Node(kind, (i - 1,) if i else (), 0x1000, 0x8000, 0x80)
        for i, kind in enumerate(["batch_mem_op", "batch_mem_op", "memcpy", "memcpy", "batch_mem_op", "batch_mem_op"])
    )
    spans = [(0, 1, 0, 1), (1, 1, 1, 5), (2, 1, 5, 6)]
    seen = seen_nodes(nodes, spans, calls, (0, 0, 0), STREAMS, PLACES)
    assert [(row.kind, row.num_bytes) for row in seen.ops] == [("write", 0), ("gather", 0x100), ("write", 0)]
    assert compare_runs(seen_calls(calls, (0, 0, 0), STREAMS, PLACES), seen) is None
