"""What op lists tell of themselves: the calls that the driver took, and the nodes that each op became."""

from __future__ import annotations

from typing import Any

import pytest
from device_helpers import TIMEOUT_S

from graphshard._core import Calls, Driver, DriverError, Event, Memory, OpList, Stream

COPY_BYTES = 64


class Small:
    """A copy on a branch beside a call on the origin, joined, then a value write."""

    def __init__(self, driver: Driver) -> None:
        self.memory = Memory(driver, 4096)
        self.streams = [Stream(driver), Stream(driver)]
        base = self.memory.address
        self.copy = (base, base + 1024, COPY_BYTES)
        self.word = base + 2048
        self.ops: list[tuple[Any, ...]] = [
            ("record", 0, 0),
            ("wait", 1, 0),
            ("copy", 1, *self.copy),
            ("call", 0, 0),
            ("record", 1, 1),
            ("wait", 0, 1),
            ("write_value", 0, self.word, 1),
        ]
        self.list = OpList(driver, self.streams, 2, self.ops)
        self.calls = Calls([lambda: None])

    def described(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for index, (kind, stream, *rest) in enumerate(self.ops):
            number = rest[0] if kind in ("record", "wait", "call") else 0
            moved = self.copy if kind == "copy" else (self.word, 0, 0) if kind == "write_value" else (0, 0, 0)
            rows.append((index, kind, stream, number, *moved))
        return rows


@pytest.fixture
def small(driver: Driver) -> Small:
    return Small(driver)


def test_a_list_describes_its_ops(driver: Driver, small: Small) -> None:
    assert small.list.ops() == small.described()
    base = small.memory.address
    pitched = OpList(driver, small.streams, 0, [("copy2d", 0, base, 32, base + 1024, 64, 16, 3)])
    assert pitched.ops() == [(0, "copy2d", 0, 0, base, base + 1024, 48)], "rows times a row's bytes"


def test_a_trace_is_what_the_driver_took_since_it_was_asked(small: Small) -> None:
    small.list.issue(small.calls)
    assert small.list.take_trace() == [], "off by default"
    small.list.set_trace(True)
    small.list.issue(small.calls, 0, 3)
    small.list.issue(small.calls, 3)
    assert small.list.take_trace() == small.described()
    assert small.list.take_trace() == []
    small.list.capture(small.calls)
    assert small.list.take_trace() == [], "a capture is no issue"
    small.list.set_trace(False)
    small.list.issue(small.calls)
    assert small.list.take_trace() == []
    assert small.streams[0].synchronize(TIMEOUT_S)


def test_a_refused_op_is_not_in_the_trace(driver: Driver, small: Small) -> None:
    """A host function may not call the driver: what it issues is refused at the first op."""
    inner = OpList(driver, [Stream(driver)], 1, [("record", 0, 0)])
    inner.set_trace(True)
    outer, no_calls = Stream(driver), Calls([])
    outer.call(lambda: inner.issue(no_calls))
    assert outer.synchronize(TIMEOUT_S)
    with pytest.raises(DriverError):
        outer.check()
    assert inner.take_trace() == []


def test_spans_say_which_nodes_are_which_ops(small: Small) -> None:
    graph = small.list.capture(small.calls)
    assert graph.spans() == [(2, 1, 0, 1), (3, 0, 1, 2), (6, 0, 2, 3)], "records and waits are no nodes"
    assert sum(graph.num_nodes().values()) == 3 and graph.handle != 0


def test_nodes_of_others_are_in_no_span(driver: Driver, small: Small) -> None:
    graph = small.list.capture(small.calls, [(2, Event(driver)), (3, Event(driver))])
    assert graph.spans() == [(2, 1, 0, 1), (3, 0, 2, 3), (6, 0, 4, 5)]
    assert graph.num_nodes()["event_record"] == 2


def test_spans_of_a_recording_leave_out_what_its_caller_enqueued(driver: Driver, small: Small) -> None:
    origin = small.streams[0]
    origin.begin_capture()
    recording = small.list.recording()
    recording.issue(small.calls, 0, 4)
    origin.call(lambda: None)
    recording.issue(small.calls, 4)
    graph = origin.end_capture()
    assert recording.spans() == [(2, 1, 0, 1), (3, 0, 1, 2), (6, 0, 3, 4)]
    assert graph.spans() == [] and graph.num_nodes() == {"batch_mem_op": 1, "host": 2, "memcpy": 1}
