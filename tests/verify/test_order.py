"""Vector clocks against a plain search for paths over the same streams and events."""

from __future__ import annotations

import random

import pytest

from graphshard.core.lowering import Compute, Lowered, LoweredOp, Record, Wait
from graphshard.verify.order import Order

STREAMS = ("compute", "copy", "prefetch")


def random_list(rng: random.Random) -> Lowered:
    ops: list[LoweredOp] = []
    num_events = rng.randint(1, 5)
    unrecorded = list(range(num_events))
    for _ in range(rng.randint(0, 14)):
        stream = rng.choice(STREAMS)
        kind = rng.randrange(3)
        if kind == 0 and unrecorded:
            ops.append(Record(unrecorded.pop(0), stream, 0))
        elif kind == 1:
            ops.append(Wait(rng.randrange(num_events), stream, 0))
        else:
            ops.append(Compute(0, 1, (), stream, 0))
    return Lowered(tuple(ops), STREAMS, num_events, 0)


def reachable(lists: list[Lowered]) -> dict[tuple[object, object], bool]:
    """Every pair of points (step, index) with a path between them; "begin" and "end" are points on compute."""
    after: dict[object, set[object]] = {}
    compute_tail: object = None
    for step, listed in enumerate(lists):
        tails: dict[str, object] = {"compute": compute_tail}
        records: dict[int, object] = {}

        def append(point: object, stream: str, tails: dict[str, object] = tails) -> None:
            after[point] = set()
            if tails.get(stream) is not None:
                after[tails[stream]].add(point)
            tails[stream] = point

        append((step, "begin"), "compute")
        for index, op in enumerate(listed.ops):
            append((step, index), op.stream)
            if isinstance(op, Record):
                records[op.event] = (step, index)
            elif isinstance(op, Wait) and op.event in records:
                after[records[op.event]].add((step, index))
        append((step, "end"), "compute")
        compute_tail = tails["compute"]
    paths: dict[tuple[object, object], bool] = {}
    for start in after:
        seen: set[object] = set()
        todo = list(after[start])
        while todo:
            point = todo.pop()
            if point not in seen:
                seen.add(point)
                todo += after[point]
        paths |= {(start, end): end in seen for end in after}
    return paths


@pytest.mark.parametrize("num_lists", [1, 2, 3])
def test_before_is_a_path(num_lists: int) -> None:
    rng = random.Random(num_lists)
    pairs = 0
    for _ in range(150):
        lists = [random_list(rng) for _ in range(num_lists)]
        order = Order(lists)
        nodes = {(step, i): order.node(step, i) for step, listed in enumerate(lists) for i in range(len(listed.ops))}
        nodes |= {(step, "begin"): order.begin(step) for step in range(num_lists)}
        nodes |= {(step, "end"): order.end(step) for step in range(num_lists)}
        for (first, second), is_path in reachable(lists).items():
            assert order.before(nodes[first], nodes[second]) == is_path, f"{first} {second}\n{lists}"
            pairs += is_path
    assert pairs > 1000


def test_a_wait_without_a_record_before_it_is_reported_and_orders_nothing() -> None:
    ops: tuple[LoweredOp, ...] = (Compute(0, 1, (), "copy", 0), Wait(0, "compute", 1), Record(0, "copy", 2))
    order = Order([Lowered(ops, STREAMS, 1, 0)] * 2)
    assert [(unbound.step, unbound.index, unbound.wait.event) for unbound in order.unbound] == [(0, 1, 0), (1, 1, 0)]
    assert not order.before(order.node(0, 0), order.node(0, 1))
    # nor does the next step's wait bind to the record of the step before
    assert not order.before(order.node(0, 2), order.node(1, 1))


def test_steps_are_ordered_by_compute_alone() -> None:
    ops: tuple[LoweredOp, ...] = (Compute(0, 1, (), "compute", 0), Compute(1, 2, (), "copy", 1))
    order = Order([Lowered(ops, STREAMS, 0, 0)] * 2)
    assert order.before(order.node(0, 0), order.node(1, 0))
    assert not order.before(order.node(0, 1), order.node(1, 1)), "a graph and a list share no copy stream"
