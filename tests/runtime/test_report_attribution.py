"""From nodes to gathers, without a driver: what a walk reads, which op a node belongs to, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphshard.core.errors import DeviceError, SpecError
from graphshard.core.ops import AgLaunch, Gemm, RecordGate, WaitOnce
from graphshard.core.program import Program
from graphshard.runtime.evidence.attribution import Places, Range, gathers_of, problems_of
from graphshard.runtime.evidence.report import (
    CopyEngineEvidence,
    GraphReport,
    LaunchCost,
    check_copy_engine,
    judge,
    kinds_of,
    rows_of,
)
from graphshard.runtime.evidence.walk import CudaPython, Node, walk_graph

SLOT, CHUNKS = 0x1000, 0x8000
"""One slot of 0x100 bytes; unit u's chunk of 0x80 bytes lies at CHUNKS + u * 0x80 of this rank's window."""
PLACES = Places([Range(SLOT, SLOT + 0x100, 0)], [Range(CHUNKS + u * 0x80, CHUNKS + (u + 1) * 0x80, u) for u in (0, 1)])
PROGRAM = Program(
    ops=(
        AgLaunch(0, 0),
        WaitOnce(0, 0),
        Gemm(0, 1, 0, "a", (0,)),
        RecordGate(0, 0),
        AgLaunch(1, 0),
        WaitOnce(1, 0),
        Gemm(1, 2, 0, "b", (1,)),
        RecordGate(1, 0),
    ),
    num_slots=1,
    num_units=2,
    num_segments=2,
    entry=(None,),
    exit=(None,),
)
SOURCES = (0, 0, 2, 4, 6)
"""Bound ops: two copies of the first gather, its compute, one collective for the second gather, its compute."""
KINDS = ("copy", "copy", "call", "all_gather", "call")
BOUND_OPS = [(index, kind, 0, 0, 0, 0, 0) for index, kind in enumerate(KINDS)]
SPANS = [(0, 1, 0, 1), (1, 1, 1, 2), (2, 0, 2, 3), (3, 1, 3, 6), (4, 0, 6, 7)]


def copy(unit: int, half: int, after: tuple[int, ...] = ()) -> Node:
    return Node("memcpy", after, SLOT + half * 0x80, CHUNKS + unit * 0x80, 0x80)


NODES = (
    copy(0, 1),
    copy(0, 0, (0,)),
    Node("host", (1,)),
    Node("batch_mem_op", (2,)),
    Node("memcpy", (3,), 0x9999, 0x7777, 4),  # a flag: its source is no chunk
    copy(1, 1, (4,)),
    Node("host", (5,)),
)


def gathers(nodes: tuple[Node, ...] = NODES) -> Any:
    return gathers_of(nodes, SPANS, BOUND_OPS, PROGRAM, SOURCES, PLACES)


def test_nodes_are_the_gathers_during_which_they_appeared() -> None:
    first, second = gathers()
    assert (first.op, first.launch.unit, first.kinds) == (0, 0, {"memcpy": 2})
    assert (first.num_copies, first.num_bytes, first.units) == (2, 0x100, {0})
    assert second.kinds == {"batch_mem_op": 1, "memcpy": 2}, "barriers belong to the gather"
    assert (second.num_copies, second.num_bytes, second.units) == (1, 0x80, {1}), "flags are no copies of chunks"
    assert problems_of([first, second], NODES) == []


def test_nodes_between_spans_are_compute_of_others() -> None:
    nodes = (*NODES[:2], Node("kernel", (1,), name="their_gemm"), *NODES[3:])
    spans = [span for span in SPANS if span[0] != 2]
    found = gathers_of(nodes, spans, BOUND_OPS, PROGRAM, SOURCES, PLACES)
    assert problems_of(found, nodes) == [] and kinds_of(nodes)["kernel"] == 1


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (
            Node("kernel", (4,), name="symKernel"),
            "unit 1 (op 4 ag_launch unit=1 slot=0 stream=copy): node 5 is a kernel symKernel, for which an SM works",
        ),
        (Node("kernel", (4,)), "node 5 is a kernel, for which an SM works"),
        (Node("graph", (4,)), "node 5 is of kind graph, and may hold kernels"),
        (copy(0, 0, (4,)), "copies chunks of units [0]"),
    ],
)
def test_what_no_gather_may_hold(node: Node, said: str) -> None:
    nodes = (*NODES[:5], node, *NODES[6:])
    found = report(nodes, problems=tuple(problems_of(gathers(nodes), nodes)))
    assert len(found.problems) == 1 and said in found.problems[0] and said in found.text()
    with pytest.raises(DeviceError) as caught:
        judge(found, strict=True)
    assert said in str(caught.value) and str(caught.value).startswith("rank 1, step shape 1x1: unit 1")
    with pytest.warns(UserWarning, match="rank 1, step shape 1x1: unit 1"):
        assert judge(found, strict=False) is found


def test_a_gather_without_nodes_is_missed() -> None:
    spans = [span for span in SPANS if span[0] not in (0, 1)]
    found = gathers_of(NODES, spans, BOUND_OPS, PROGRAM, SOURCES, PLACES)
    assert problems_of(found, NODES) == [
        "unit 0 (op 0 ag_launch unit=0 slot=0 stream=copy): the graph has no node of it"
    ]
    claim = replace(report(), gathers=rows_of(found)).claim
    assert claim == "no kernel nodes in 1 gathers; 1 of the program's gathers are not in the graph"


def test_a_graph_that_was_changed_is_refused() -> None:
    with pytest.raises(DeviceError, match="changed after its capture; capture again"):
        gathers_of(NODES[:5], SPANS, BOUND_OPS, PROGRAM, SOURCES, PLACES)


def report(nodes: tuple[Node, ...] = NODES, **more: Any) -> GraphReport:
    found = rows_of(gathers(nodes))
    return GraphReport(1, 2, "1x1", "nccl", "cuda:0", "/lib/libcuda.so.1", 13000, kinds_of(nodes), found, **more)


SHOWN = CopyEngineEvidence("cuda:0", 13000, "nccl", 1 << 20, 132)


def test_copy_engine_is_never_claimed_from_a_walk_alone(tmp_path: Path) -> None:
    alone = report(launch=LaunchCost.of([1e-6, 2e-6, 3e-6]))
    assert alone.claim == "no kernel nodes in 2 gathers" and "copy engine" not in alone.text()
    assert "launch 2.0 us (p10 1.2, p90 2.8, n=3)" in str(alone)
    SHOWN.save(tmp_path / "shown.json")
    claim = report(copy_engine=CopyEngineEvidence.load(tmp_path / "shown.json")).claim
    assert claim.startswith("no kernel nodes in 2 gathers; copy engine: on cuda:0 a gather of 1.0 MiB finished beside")
    kernel = (*NODES[:5], Node("kernel", (4,)), *NODES[6:])
    assert report(kernel, copy_engine=SHOWN).claim == "kernel nodes in 1 of 2 gathers: units 1"


def test_evidence_of_another_machine_is_no_evidence(tmp_path: Path) -> None:
    check_copy_engine(SHOWN, "cuda:0", 13000, "nccl")
    with pytest.raises(SpecError, match="run tests/gpu/test_copy_engine"):
        check_copy_engine(SHOWN, "cuda:0", 12090, "nccl")
    (tmp_path / "other.json").write_text("[]")
    for name in ("other.json", "none.json"):
        with pytest.raises(SpecError, match="holds no copy-engine evidence"):
            CopyEngineEvidence.load(tmp_path / name)


class FakeGraph:
    """A `GraphDriver` over tuples of (handle, kind) and edges."""

    def __init__(self, kinds: dict[int, str], edges: list[tuple[int, int]]) -> None:
        self._kinds, self._edges = kinds, edges

    def nodes(self, graph: int) -> list[int]:
        return list(self._kinds)

    def edges(self, graph: int) -> list[tuple[int, int]]:
        return self._edges

    def kind(self, node: int) -> str:
        return self._kinds[node]

    def copy(self, node: int) -> tuple[int, int, int]:
        return node, node + 1, 16

    def fill(self, node: int) -> tuple[int, int]:
        return node, 8

    def kernel_name(self, node: int) -> str:
        return "spin"


def test_a_walk_reads_kinds_edges_and_parameters() -> None:
    kinds = {0xA: "memcpy", 0xB: "memset", 0xC: "kernel", 0xD: "empty"}
    nodes = walk_graph(FakeGraph(kinds, [(0xA, 0xC), (0xB, 0xC), (0xC, 0xD)]), 0)
    assert nodes == (
        Node("memcpy", (), 0xA, 0xB, 16),
        Node("memset", (), 0xB, 0, 8),
        Node("kernel", (0, 1), name="spin"),
        Node("empty", (2,)),
    )


def test_an_order_that_is_not_the_captures_is_refused() -> None:
    with pytest.raises(DeviceError, match="lists node 0 of a captured graph before node 1"):
        walk_graph(FakeGraph({1: "empty", 2: "empty"}, [(2, 1)]), 0)


def test_a_drivers_refusal_is_an_error_with_its_name() -> None:
    class Code(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    bindings = SimpleNamespace(
        CUgraph=int, CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuGraphGetNodes=lambda graph, count: (Code(1), [], 0)
    )
    with pytest.raises(DeviceError, match=r"cuGraphGetNodes gave CUDA_ERROR_INVALID_VALUE \(1\)"):
        CudaPython(bindings).nodes(1)
