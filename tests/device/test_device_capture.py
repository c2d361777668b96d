"""Captures: one at a time, events of their own, nothing left of a failed one, any order of drops."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from census import no_growth
from device_helpers import TIMEOUT_S, Latch, drained

from graphshard._core import Calls, CaptureLock, Driver, DriverError, Memory, OpList, Stream


def forked_list(
    driver: Driver, streams: list[Stream], memory: Memory, broken: tuple[Any, ...] | None, at: int
) -> OpList:
    """Fork, four copies on each of two streams, join; `broken` stands in front of op `at` (-1: at the end)."""
    copies = [("copy", 1 + i % 2, memory.address + 64 * (1 + i), memory.address, 64) for i in range(8)]
    ops: list[tuple[Any, ...]] = [("record", 0, 0), ("wait", 1, 0), ("wait", 2, 0), *copies]
    ops += [("record", 1, 1), ("record", 2, 2), ("wait", 0, 1), ("wait", 0, 2)]
    if broken is not None:
        ops.insert(len(ops) if at < 0 else at, broken)
    return OpList(driver, streams, 3, ops)


def test_graph_nodes_are_the_ops_that_work(driver: Driver) -> None:
    streams, memory = [Stream(driver) for _ in range(3)], Memory(driver, 4096)
    graph = forked_list(driver, streams, memory, None, 0).capture(Calls([]))
    assert graph.num_nodes() == {"memcpy": 8}


@pytest.mark.parametrize("at", [0, 7, -1])
def test_failed_captures_leave_nothing_behind(driver: Driver, at: int) -> None:
    streams, memory = [Stream(driver) for _ in range(3)], Memory(driver, 4096)
    wrong_pitch = ("copy2d", 0, memory.address, 8, memory.address + 512, 8, 16, 2)  # rows wider than their pitch
    broken = forked_list(driver, streams, memory, wrong_pitch, at)
    good = forked_list(driver, streams, memory, None, 0)
    calls = Calls([])
    memoryview(memory)[:64] = b"\x77" * 64

    def fail() -> None:
        with pytest.raises(DriverError, match=r"cuMemcpy2DAsync failed: .*, at op \d+ of 16 on stream 0"):
            broken.capture(calls)

    fail()
    with no_growth():
        for _ in range(100):
            fail()
    assert all(stream.is_idle() for stream in streams)  # 900 if one were still capturing
    good.capture(calls).instantiate().launch(streams[0])
    assert streams[0].synchronize(TIMEOUT_S)
    assert bytes(memory)[: 9 * 64] == b"\x77" * (9 * 64)


def test_an_unjoined_capture_fails_and_frees_its_streams(driver: Driver) -> None:
    origin, side, memory = Stream(driver), Stream(driver), Memory(driver, 4096)
    ops = [("record", 0, 0), ("wait", 1, 0), ("copy", 1, memory.address, memory.address + 64, 64)]
    unjoined, calls = OpList(driver, [origin, side], 1, ops), Calls([])
    with no_growth():
        for _ in range(100):
            with pytest.raises(DriverError, match="CUDA_ERROR_STREAM_CAPTURE_UNJOINED") as caught:
                unjoined.capture(calls)
            assert (caught.value.entry_point, caught.value.code) == ("cuStreamEndCapture", 904)
    assert origin.is_idle() and side.is_idle()
    unjoined.issue(calls)
    assert side.synchronize(TIMEOUT_S)


def test_eager_failure_names_the_op(driver: Driver, stream: Stream) -> None:
    memory = Memory(driver, 4096)
    wrong_pitch = ("copy2d", 0, memory.address, 8, memory.address + 512, 8, 16, 2)
    op_list = OpList(driver, [stream], 0, [("fill", 0, memory.address, 1, 1), wrong_pitch])
    with pytest.raises(DriverError, match=r"cuMemcpy2DAsync failed: .*, at op 1 of 2 on stream 0"):
        op_list.issue(Calls([]))
    assert stream.synchronize(TIMEOUT_S)


def test_captures_share_no_event(driver: Driver) -> None:
    streams, memory, calls = [Stream(driver) for _ in range(3)], Memory(driver, 4096), Calls([])
    target, draft = (forked_list(driver, streams, memory, None, 0) for _ in range(2))
    # An event of one capture used in another, or eagerly after it, is an error (905, 907); each of these has its own.
    graphs = [target.capture(calls), draft.capture(calls), target.capture(calls)]
    target.issue(calls)
    assert target.wait_event(1, TIMEOUT_S)
    graphs.append(target.capture(calls))
    assert target.event_done(1)  # of the eager issue: a capture leaves the list's own events alone
    execs = [graph.instantiate() for graph in graphs]
    del graphs, target, draft
    for graph_exec in execs * 3:
        graph_exec.launch(streams[0])
    assert streams[0].synchronize(TIMEOUT_S)


def test_a_second_capture_is_refused(driver: Driver, stream: Stream) -> None:
    op_list, calls = OpList(driver, [stream], 0, [("call", 0, 0)]), Calls([int])
    refused: list[DriverError] = []

    def capture() -> None:
        try:
            op_list.capture(calls)
        except DriverError as error:
            refused.append(error)

    with CaptureLock():
        capture()  # inside another
        thread = threading.Thread(target=capture)
        thread.start()
        thread.join(TIMEOUT_S)
        with pytest.raises(DriverError, match="another capture is open"), CaptureLock(0.01):
            pass
    assert len(refused) == 2
    assert all("capture refused: another capture is open in this process" in str(error) for error in refused)
    assert {(error.entry_point, error.code) for error in refused} == {("cuStreamBeginCapture", 900)}
    assert op_list.capture(calls).num_nodes() == {"host": 1}


def test_a_capture_may_wait_for_another(driver: Driver, stream: Stream) -> None:
    op_list, calls = OpList(driver, [stream], 0, [("call", 0, 0)]), Calls([int])
    captured: list[int] = []

    def capture() -> None:
        captured.append(op_list.capture(calls, lock_timeout_s=TIMEOUT_S).num_nodes()["host"])

    with CaptureLock():
        threads = [threading.Thread(target=capture) for _ in range(4)]
        for thread in threads:
            thread.start()
        assert captured == []
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert captured == [1, 1, 1, 1]


def test_while_a_capture_may_begin_no_stream_is_called_idle(stream: Stream) -> None:
    """The driver is not asked: a query of a stream that is being captured would end the capture."""
    assert stream.is_idle()
    with CaptureLock():
        assert not stream.is_idle()
    assert stream.is_idle()


def test_the_capture_lock_is_released_by_an_exception() -> None:
    with pytest.raises(LookupError), CaptureLock():
        raise LookupError
    with CaptureLock():
        pass


def test_unknown_executor(driver: Driver, stream: Stream) -> None:
    graph = OpList(driver, [stream], 0, [("call", 0, 0)]).capture(Calls([int]))
    with pytest.raises(ValueError, match="executor 'magic' is unknown: cooperative, threaded"):
        graph.instantiate("magic")


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_any_order_of_drops_while_work_is_enqueued(driver: Driver, latch: Latch, order: tuple[int, ...]) -> None:
    streams, memory, log = [Stream(driver) for _ in range(3)], Memory(driver, 4096), []
    op_list = forked_list(driver, streams, memory, ("call", 0, 0), -1)
    calls = Calls([lambda: log.append(1)])
    graph_exec = op_list.capture(calls).instantiate("threaded")
    latch.hold(streams[0])
    graph_exec.launch(streams[0])
    op_list.issue(calls)
    owners: list[Any] = [graph_exec, (op_list, calls), memory, streams]
    del graph_exec, op_list, calls, memory, streams
    for index in order:
        owners[index] = None
    assert driver.num_retired > 0
    latch.open()
    while not drained(driver):
        pass
    assert log == [1, 1]


def test_dropped_graphs_leave_nothing_behind(driver: Driver, stream: Stream) -> None:
    memory = Memory(driver, 4096)
    op_list = OpList(driver, [stream], 0, [("fill", 0, memory.address, 1, 4096)])

    def replay(num_graphs: int) -> None:
        for index in range(num_graphs):
            graph_exec = op_list.capture(Calls([])).instantiate("threaded" if index % 2 else "cooperative")
            graph_exec.launch(stream)
        del graph_exec
        assert stream.synchronize(TIMEOUT_S)
        assert drained(driver)

    replay(2)  # executors keep their threads for the next graph
    with no_growth():
        replay(100)
