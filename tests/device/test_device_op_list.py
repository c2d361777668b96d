"""Op lists, issued eagerly and captured from the same list."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import TIMEOUT_S, Latch, drained, run_captured, run_eager

from graphshard._core import Calls, Driver, DriverError, Event, Memory, OpList, Stream

UNIT_BYTES = 4096
NUM_UNITS = 8

Step = Callable[[], None]
MODES = {
    "eager": run_eager,
    "cooperative": lambda *args: run_captured(*args, executor="cooperative"),
    "threaded": lambda *args: run_captured(*args, executor="threaded"),
    "seeded": lambda *args: run_captured(*args, seed=7),
    "copies earliest": lambda *args: run_captured(*args, seed=-2),
    "copies latest": lambda *args: run_captured(*args, seed=-3),
}


class PingPong:
    """Units gathered into two slots on a copy stream, each read by a call on the compute stream."""

    def __init__(self, driver: Driver) -> None:
        self.shard, self.slots = Memory(driver, NUM_UNITS * UNIT_BYTES), Memory(driver, 2 * UNIT_BYTES)
        self.seen: list[bytes] = []
        self.compute, self.copy = Stream(driver), Stream(driver)
        views = [memoryview(self.slots)[slot * UNIT_BYTES : (slot + 1) * UNIT_BYTES] for slot in range(2)]

        def read(slot: int) -> Callable[[], None]:
            return lambda: self.seen.append(bytes({views[slot][0], views[slot][-1]}))

        self.calls = Calls([read(unit % 2) for unit in range(NUM_UNITS)])
        self.list = OpList(driver, [self.compute, self.copy], 2 * NUM_UNITS + 1, self.ops())

    def ops(self) -> list[tuple[Any, ...]]:
        fork = 2 * NUM_UNITS
        ops: list[tuple[Any, ...]] = [("record", 0, fork), ("wait", 1, fork)]
        for unit in range(NUM_UNITS):
            ready, gate, slot = 2 * unit, 2 * unit + 1, unit % 2
            if unit >= 2:
                ops.append(("wait", 1, gate - 4))
            source = self.shard.address + unit * UNIT_BYTES
            ops.append(("copy", 1, self.slots.address + slot * UNIT_BYTES, source, UNIT_BYTES))
            ops += [("record", 1, ready), ("wait", 0, ready), ("call", 0, unit), ("record", 0, gate)]
        return ops

    def fill(self, version: int) -> list[bytes]:
        """New bytes in the shard, and what a right step sees of them."""
        for unit in range(NUM_UNITS):
            memoryview(self.shard)[unit * UNIT_BYTES : (unit + 1) * UNIT_BYTES] = (
                bytes([(version + unit) % 256]) * UNIT_BYTES
            )
        self.seen.clear()
        return [bytes([(version + unit) % 256]) for unit in range(NUM_UNITS)]


@pytest.mark.parametrize("mode", MODES)
def test_one_list_in_every_mode(driver: Driver, mode: str) -> None:
    work = PingPong(driver)
    step = MODES[mode](work.list, work.calls, work.compute)
    for version in range(20):
        right = work.fill(version)
        step()
        assert work.seen == right


def test_a_thousand_replays(driver: Driver) -> None:
    work = PingPong(driver)
    step = run_captured(work.list, work.calls, work.compute)
    for version in range(1000):
        right = work.fill(version)
        step()
        assert work.seen == right


def test_launches_of_one_graph_are_ordered_from_any_stream(driver: Driver, latch: Latch) -> None:
    compute, other = Stream(driver), Stream(driver)
    log: list[int] = []
    calls = Calls([lambda: log.append(len(log)), lambda: log.append(-len(log))])
    graph_exec = OpList(driver, [compute], 0, [("call", 0, 0), ("call", 0, 1)]).capture(calls).instantiate("threaded")
    latch.hold(compute)
    graph_exec.launch(compute)
    graph_exec.upload(other)
    graph_exec.launch(other)  # ordered after the launch above, though its own stream is free
    assert not other.synchronize(0.05) and log == []
    latch.open()
    assert other.synchronize(TIMEOUT_S) and compute.synchronize(TIMEOUT_S)
    assert log == [0, -1, 2, -3]


def test_parts_of_a_list_and_its_events(driver: Driver, stream: Stream, latch: Latch) -> None:
    log: list[str] = []
    calls = Calls([lambda: log.append("a"), lambda: log.append("b")])
    ops = [("call", 0, 0), ("record", 0, 0), ("wait_value", 0, latch.address, 1), ("call", 0, 1), ("record", 0, 1)]
    op_list = OpList(driver, [stream], 2, ops)
    assert len(op_list) == 5 and len(calls) == 2
    op_list.issue(calls, 0, 2)
    assert op_list.wait_event(0, TIMEOUT_S) and op_list.event_done(0) and log == ["a"]
    op_list.issue(calls, begin=2)
    assert not op_list.event_done(1) and not op_list.wait_event(1, 0.02)
    latch.open()
    assert op_list.wait_event(1, TIMEOUT_S) and log == ["a", "b"]
    for use in (lambda: op_list.issue(calls, 3, 2), lambda: op_list.issue(calls, 0, 6)):
        with pytest.raises(ValueError, match="of 5"):
            use()
    with pytest.raises(IndexError):
        op_list.event_done(2)


def test_copies_in_two_dimensions_fills_and_words(driver: Driver, stream: Stream) -> None:
    source, destination = Memory(driver, 64), Memory(driver, 64)
    memoryview(source)[:] = bytes(range(64))
    ops = [
        ("fill", 0, destination.address, 255, 64),
        ("copy2d", 0, destination.address + 1, 16, source.address, 8, 4, 3),
        ("write_value", 0, destination.address + 60, -2),
        ("wait_value", 0, destination.address + 60, -2),
    ]
    op_list, calls = OpList(driver, [stream], 0, ops), Calls([])
    for step in (run_eager(op_list, calls, stream), run_captured(op_list, calls, stream)):
        memoryview(destination)[:] = bytes(64)
        step()
        right = bytearray(b"\xff" * 64)
        for row in range(3):
            right[1 + 16 * row : 5 + 16 * row] = bytes(range(8 * row, 8 * row + 4))
        right[60:64] = b"\xfe\xff\xff\xff"
        assert bytes(destination) == bytes(right)


def test_c_functions_are_called_without_python(driver: Driver, stream: Stream) -> None:
    libc = ctypes.CDLL(None)
    numbers = (ctypes.c_int * 2)(5, 0)
    called = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_int))(lambda pointer: pointer.__setitem__(1, pointer[0]))
    address = ctypes.cast(called, ctypes.c_void_p).value
    assert address is not None and libc is not None
    calls = Calls([(address, ctypes.addressof(numbers))])
    run_captured(OpList(driver, [stream], 0, [("call", 0, 0)]), calls, stream)()
    assert list(numbers) == [5, 5]
    for wrong in (3, (1,), ("a", 2), (0, 0)):
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            Calls([wrong])  # type: ignore[list-item]


@pytest.mark.parametrize("mode", ["eager", "cooperative", "threaded"])
def test_exceptions_in_calls(driver: Driver, stream: Stream, mode: str) -> None:
    log: list[str] = []
    fails = [True]

    def fail() -> None:
        if fails[0]:
            raise LookupError("the first")

    def fail_again() -> None:
        raise AssertionError("skipped, so never raised")

    calls = Calls([lambda: log.append("a"), fail, fail_again, lambda: log.append("b")])
    op_list = OpList(driver, [stream], 0, [("call", 0, index) for index in (0, 1, 2)])
    step = MODES[mode](op_list, calls, stream)
    with pytest.raises(LookupError, match="the first"):
        step()
    calls.check()  # cleared: the next step runs again
    with pytest.raises(LookupError, match="the first"):
        step()
    fails[0] = False
    with pytest.raises(AssertionError):
        step()
    assert log == ["a", "a", "a"]


def test_arguments_live_as_long_as_what_runs_them(driver: Driver, stream: Stream) -> None:
    class Function:
        def __call__(self) -> None:
            log.append(1)

    log: list[int] = []
    function, source, destination = Function(), Memory(driver, 4096), Memory(driver, 4096)
    alive = weakref.ref(function)
    memoryview(source)[:] = b"\x11" * 4096
    op_list = OpList(driver, [stream], 0, [("copy", 0, destination.address, source.address, 4096), ("call", 0, 0)])
    graph_exec = op_list.capture(Calls([function])).instantiate()
    del function, source, op_list
    gc.collect()
    scribble = [Memory(driver, 4096) for _ in range(4)]
    for memory in scribble:
        memoryview(memory)[:] = b"\xff" * 4096
    for _ in range(3):
        graph_exec.launch(stream)
    assert stream.synchronize(TIMEOUT_S)
    assert log == [1, 1, 1] and bytes(destination) == b"\x11" * 4096
    assert alive() is not None
    del graph_exec
    gc.collect()
    assert alive() is None and drained(driver)


def test_eager_work_outlives_its_list_and_calls(driver: Driver, stream: Stream, latch: Latch) -> None:
    log: list[int] = []
    source, destination = Memory(driver, 4096), Memory(driver, 4096)
    memoryview(source)[:] = b"\x22" * 4096
    ops = [
        ("wait_value", 0, latch.address, 1),
        ("copy", 0, destination.address, source.address, 4096),
        ("call", 0, 0),
    ]
    op_list = OpList(driver, [stream], 0, ops)
    op_list.issue(Calls([lambda: log.append(1)]))
    op_list.issue(Calls([lambda: log.append(2)]))
    del op_list, source
    gc.collect()
    latch.open()
    assert stream.synchronize(TIMEOUT_S)
    assert log == [1, 2] and bytes(destination) == b"\x22" * 4096
    assert drained(driver)


@pytest.mark.parametrize(
    "op",
    [
        ("record", 0),
        ("teleport", 0, 0),
        ("record", -1, 0),
        ("call", 0, "first"),
        ("fill", 0, 4096, 256, 1),
        ("write_value", 0, 4096, 1 << 32),
        ("copy", 0, 1, 2, 3, 4),
        (),
        7,
    ],
)
def test_malformed_ops_are_refused(driver: Driver, stream: Stream, op: Any) -> None:
    with pytest.raises(ValueError, match=r"op 1 is not of any known form|a value word has 32 bits"):
        OpList(driver, [stream], 1, [("record", 0, 0), op])


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (("record", 0, 1), "op 0 of 1 on stream 0: event 1, the list has 1 events"),
        (("wait", 0, 1), "event 1, the list has 1 events"),
        (("record", 1, 0), "the list has 1 streams"),
    ],
)
def test_indices_are_checked(driver: Driver, stream: Stream, op: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        OpList(driver, [stream], 1, [op])


def test_calls_must_cover_the_list(driver: Driver, stream: Stream) -> None:
    op_list = OpList(driver, [stream], 0, [("call", 0, 2)])
    for use in (op_list.issue, op_list.capture):
        with pytest.raises(ValueError, match="calls index 2, Calls has 1 functions"):
            use(Calls([print]))
    with pytest.raises(ValueError, match="needs a stream"):
        OpList(driver, [], 0, [])
    nothing: Any = [None]
    with pytest.raises(ValueError, match="a stream of an op list is none"):
        OpList(driver, nothing, 0, [])
    with pytest.raises(ValueError, match="a collective of an op list is none"):
        OpList(driver, [stream], 0, [], nothing)


def test_foreign_and_misaligned_addresses_are_refused_when_bound(driver: Driver, stream: Stream) -> None:
    memory, tensor = Memory(driver, 8192), torch.zeros(4096, dtype=torch.uint8)
    base, foreign = memory.address, tensor.data_ptr()
    refused = [
        (("copy", 0, foreign, base, 16), "not in any memory"),
        (("copy", 0, base, foreign, 16), "not in any memory"),
        (("copy", 0, base, base + 4096, 4097), "run past the end of the memory of 8192 bytes"),
        (("copy", 0, base, base + 4096, 0), "are no bytes"),
        (("copy2d", 0, base, 4096, base, 4096, 1, 4), "12289 bytes .* run past the end"),
        (("copy2d", 0, base, 1 << 62, base, 4096, 8, 9), "run past the end"),
        (("copy2d", 0, base, 16, base, 16, 8, 0), "are no bytes"),
        (("fill", 0, foreign, 0, 16), "not in any memory"),
        (("write_value", 0, base + 1, 0), "is not a multiple of 4 bytes"),
    ]
    for op, reason in refused:
        with pytest.raises(DriverError, match=f"{reason}.*, at op 0 of 1 on stream 0"):
            OpList(driver, [stream], 0, [op])


def test_external_events_see_a_replay_from_outside(driver: Driver, stream: Stream) -> None:
    begin, end = Event(driver, timing=True), Event(driver, timing=True)
    op_list = OpList(driver, [stream], 0, [("call", 0, 0), ("call", 0, 0)])
    graph = op_list.capture(Calls([int]), [(1, end), (0, begin)])
    assert graph.num_nodes() == {"host": 2, "event_record": 2}
    graph_exec = graph.instantiate()
    del graph
    graph_exec.launch(stream)
    assert end.synchronize(TIMEOUT_S) and stream.synchronize(TIMEOUT_S)
    assert begin.is_done() and end.elapsed_us(begin) >= 0.0
    with pytest.raises(ValueError, match="stands after op 2, the list has 2"):
        op_list.capture(Calls([int]), [(2, end)])
