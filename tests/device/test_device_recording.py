"""A list recorded into a capture that its caller opened, as torch.cuda.graph does: host functions stand for kernels."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from device_helpers import TIMEOUT_S, Latch, drained

from graphshard._core import Calls, CaptureLock, Driver, DriverError, Event, Graph, Memory, OpList, Recording, Stream

UNIT_BYTES = 1024
NUM_UNITS = 4
NO_CALLS = Calls([])


class Step:
    """Units gathered on a copy stream into two slots; what reads them is no op of the list, but issued around it."""

    def __init__(self, driver: Driver, compute: Stream | None = None) -> None:
        self.shard, self.slots = Memory(driver, NUM_UNITS * UNIT_BYTES), Memory(driver, 2 * UNIT_BYTES)
        self.compute, self.copy = compute or Stream(driver), Stream(driver)
        self.seen: list[int] = []
        fork = 2 * NUM_UNITS
        ops: list[tuple[Any, ...]] = [("record", 0, fork), ("wait", 1, fork)]
        self.parts = [0]  # part u ends right before unit u is read
        for unit in range(NUM_UNITS):
            slot = self.slots.address + unit % 2 * UNIT_BYTES
            if unit >= 2:
                ops.append(("wait", 1, 2 * (unit - 2) + 1))
            ops.append(("copy", 1, slot, self.shard.address + unit * UNIT_BYTES, UNIT_BYTES))
            ops += [("record", 1, 2 * unit), ("wait", 0, 2 * unit)]
            self.parts.append(len(ops))
            ops.append(("record", 0, 2 * unit + 1))
        self.list = OpList(driver, [self.compute, self.copy], 2 * NUM_UNITS + 1, ops)

    def read(self, unit: int) -> Callable[[], None]:
        slot, seen = memoryview(self.slots)[unit % 2 * UNIT_BYTES :][:UNIT_BYTES], self.seen
        return lambda: seen.append(slot[0] if len(set(slot)) == 1 else -1)

    def record_into(self, recording: Recording) -> None:
        for unit, (begin, end) in enumerate(zip(self.parts, self.parts[1:], strict=False)):
            recording.issue(NO_CALLS, begin, end)
            self.compute.call(self.read(unit))
        recording.issue(NO_CALLS, self.parts[-1])

    def fill(self, version: int) -> list[int]:
        right = [(version + unit) % 251 for unit in range(NUM_UNITS)]
        memoryview(self.shard)[:] = b"".join(bytes([byte]) * UNIT_BYTES for byte in right)
        self.seen.clear()
        return right


@pytest.mark.parametrize(("executor", "seed"), [("cooperative", -1), ("threaded", -1), ("", 3), ("", -2), ("", -3)])
def test_ops_and_the_callers_work_alternate_in_one_capture(driver: Driver, executor: str, seed: int) -> None:
    step = Step(driver)
    recording = step.list.recording()
    step.compute.begin_capture()
    step.record_into(recording)
    graph = step.compute.end_capture()
    assert graph.num_nodes() == {"memcpy": NUM_UNITS, "host": NUM_UNITS}
    graph_exec = graph.instantiate(executor, seed)
    for version in range(20):
        right = step.fill(version)
        graph_exec.launch(step.compute)
        assert step.compute.synchronize(TIMEOUT_S)
        step.compute.check()
        assert step.seen == right


def test_a_recording_and_the_lists_own_runs_share_nothing(driver: Driver) -> None:
    step = Step(driver)
    step.compute.begin_capture()
    step.record_into(step.list.recording())
    first = step.compute.end_capture().instantiate()
    step.list.issue(NO_CALLS)
    assert step.list.wait_event(0, TIMEOUT_S)
    step.compute.begin_capture()
    step.record_into(step.list.recording())
    second = step.compute.end_capture().instantiate()
    assert step.list.event_done(0)  # of the eager issue
    for graph_exec in (first, second, first):
        right = step.fill(7)
        graph_exec.launch(step.compute)
        assert step.compute.synchronize(TIMEOUT_S) and step.seen == right


def test_the_calls_of_the_list_may_be_recorded_too(driver: Driver, stream: Stream) -> None:
    log: list[str] = []
    op_list = OpList(driver, [stream], 0, [("call", 0, 0), ("call", 0, 1)])
    recording, calls = op_list.recording(), Calls([lambda: log.append("a"), lambda: log.append("b")])
    assert len(recording) == 2
    stream.begin_capture()
    recording.issue(calls, 0, 1)
    stream.call(lambda: log.append("between"))
    with pytest.raises(ValueError, match="calls index 1, Calls has 1 functions"):
        recording.issue(Calls([print]), 1)
    recording.issue(calls, 1)
    graph_exec = stream.end_capture().instantiate()
    graph_exec.launch(stream)
    graph_exec.launch(stream)
    assert stream.synchronize(TIMEOUT_S) and log == ["a", "between", "b"] * 2


def test_an_exception_in_a_captured_call_is_the_streams(driver: Driver, stream: Stream) -> None:
    log: list[int] = []
    stream.begin_capture()
    stream.call(lambda: [][1])
    stream.call(lambda: log.append(1))
    graph_exec = stream.end_capture().instantiate()
    for _ in range(2):
        graph_exec.launch(stream)
        assert stream.synchronize(TIMEOUT_S)
        with pytest.raises(IndexError):
            stream.check()
    assert log == []


def test_the_graph_owns_what_was_recorded(driver: Driver, latch: Latch) -> None:
    step, launcher = Step(driver), Stream(driver)
    right, seen, address = step.fill(3), step.seen, step.shard.address
    recording = step.list.recording()
    alive = weakref.ref(step)
    step.compute.begin_capture()
    step.record_into(recording)
    graph = step.compute.end_capture()
    del step, recording
    gc.collect()
    assert alive() is None
    graph_exec = graph.instantiate("threaded")
    del graph
    with pytest.raises(DriverError, match="not in any memory"):  # its Memory object is gone, its bytes are not
        launcher.fill(address, 0, 1)
    latch.hold(launcher)
    graph_exec.launch(launcher)
    del graph_exec
    gc.collect()
    latch.open()
    assert launcher.synchronize(TIMEOUT_S) and seen == right
    assert drained(driver)


def test_a_stream_outside_the_capture_is_refused(driver: Driver, stream: Stream) -> None:
    side, memory = Stream(driver), Memory(driver, 64)
    op_list = OpList(driver, [stream, side], 2, [("record", 0, 0), ("fill", 1, memory.address, 9, 64)])
    recording = op_list.recording()
    stream.begin_capture()
    with pytest.raises(DriverError, match="stream of op 1 of 2 on stream 1 has not joined it") as caught:
        recording.issue(NO_CALLS)
    assert caught.value.code == 904
    recording.issue(NO_CALLS, 0, 1)
    with pytest.raises(DriverError, match="has not joined it"):
        recording.issue(NO_CALLS, 1)
    assert stream.end_capture().num_nodes() == {}
    assert side.synchronize(TIMEOUT_S) and bytes(memory) == bytes(64)


def test_a_join_is_remembered_from_part_to_part(driver: Driver, stream: Stream) -> None:
    side, memory = Stream(driver), Memory(driver, 64)
    ops = [("record", 0, 0), ("wait", 1, 0), ("fill", 1, memory.address, 9, 64), ("record", 1, 1), ("wait", 0, 1)]
    recording = OpList(driver, [stream, side], 2, ops).recording()
    stream.begin_capture()
    for index in range(5):
        recording.issue(NO_CALLS, index, index + 1)
    stream.end_capture().instantiate().launch(stream)
    assert stream.synchronize(TIMEOUT_S) and bytes(memory) == b"\x09" * 64


def test_recordings_need_an_open_capture_of_their_own(driver: Driver, stream: Stream) -> None:
    op_list = OpList(driver, [stream], 1, [("record", 0, 0)])
    recording = op_list.recording()
    with pytest.raises(DriverError, match="nobody holds the capture lock"):
        recording.issue(NO_CALLS)
    with CaptureLock(), pytest.raises(DriverError, match="no capture is open on the list's stream 0"):
        recording.issue(NO_CALLS)
    stream.begin_capture()
    recording.issue(NO_CALLS)
    stream.end_capture()
    stream.begin_capture()
    with pytest.raises(DriverError, match="belong to an earlier capture; make a Recording for each"):
        recording.issue(NO_CALLS)
    op_list.recording().issue(NO_CALLS)
    stream.end_capture()
    with pytest.raises(ValueError, match="of 1"):
        recording.issue(NO_CALLS, 1, 0)


def test_a_lost_capture_is_named_and_leaves_its_streams_usable(driver: Driver) -> None:
    step, memory = Step(driver), Memory(driver, 64)
    wrong_pitch = ("copy2d", 0, memory.address, 8, memory.address + 32, 8, 16, 2)
    broken = OpList(driver, [step.compute], 0, [wrong_pitch]).recording()
    recording = step.list.recording()
    step.compute.begin_capture()
    recording.issue(NO_CALLS, 0, step.parts[1] - 1)  # the copy stream has joined and is not joined back
    with pytest.raises(DriverError, match=r"cuMemcpy2DAsync failed: .*, at op 0 of 1 on stream 0"):
        broken.issue(NO_CALLS)
    with pytest.raises(DriverError, match="cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_UNJOINED"):
        step.compute.end_capture()
    assert step.compute.is_idle() and step.copy.is_idle()
    right = step.fill(1)
    step.compute.begin_capture()
    step.record_into(step.list.recording())
    step.compute.end_capture().instantiate().launch(step.compute)
    assert step.compute.synchronize(TIMEOUT_S) and step.seen == right


def test_work_of_others_stays_out_of_the_capture(driver: Driver) -> None:
    step = Step(driver)
    step.compute.begin_capture()
    step.list.recording().issue(NO_CALLS, 0, step.parts[1])
    address, event = step.slots.address, Event(driver)
    refused: list[str] = []

    def attempt(use: Callable[[], object]) -> None:
        try:
            use()
        except DriverError as error:
            refused.append(str(error))

    uses: list[Callable[[], object]] = [
        lambda: step.compute.call(print),
        lambda: step.copy.call(print),  # it has joined the capture
        lambda: step.copy.fill(address, 0, 8),
        lambda: step.list.issue(NO_CALLS),
        lambda: step.copy.record(event),
        lambda: step.compute.begin_capture(),
        lambda: step.compute.end_capture(),
    ]
    for use in uses:
        thread = threading.Thread(target=attempt, args=(use,))
        thread.start()
        thread.join(TIMEOUT_S)
    assert len(refused) == len(uses)
    assert sum("the stream is being captured" in text for text in refused) == len(uses) - 1
    assert "this thread has opened no capture on this stream" in refused[-1]
    assert step.compute.end_capture().num_nodes() == {"memcpy": 1}
    step.copy.fill(address, 0, 8)
    assert step.copy.synchronize(TIMEOUT_S)


def test_one_capture_at_a_time(driver: Driver, stream: Stream) -> None:
    other = Stream(driver)
    stream.begin_capture()
    with pytest.raises(DriverError, match="another capture is open in this process"):
        other.begin_capture(0.01)
    with pytest.raises(DriverError, match="being captured"):
        stream.begin_capture()
    stream.end_capture()
    with pytest.raises(DriverError, match="has opened no capture"):
        stream.end_capture()
    other.begin_capture()
    del other  # a stream that goes away takes its capture along
    gc.collect()
    with CaptureLock():
        pass
    assert stream.is_idle()


def test_somebody_elses_stream_is_an_origin_like_any_other(driver: Driver) -> None:
    theirs = Stream(driver)
    mine = Stream.from_handle(driver, theirs.handle)
    assert mine.handle == theirs.handle
    step = Step(driver, compute=mine)
    right = step.fill(5)
    step.list.issue(NO_CALLS)
    step.compute.begin_capture()
    with pytest.raises(DriverError, match="being captured"):
        Stream.from_handle(driver, theirs.handle).fill(step.slots.address, 0, 8)
    step.record_into(step.list.recording())
    graph_exec = step.compute.end_capture().instantiate()
    graph_exec.launch(mine)
    assert theirs.synchronize(TIMEOUT_S) and step.seen == right
    del step, mine, graph_exec
    gc.collect()
    assert theirs.is_idle()  # it was not ours to destroy


@pytest.mark.parametrize("handle", [0, 1, 2])
def test_default_streams_are_refused(driver: Driver, handle: int) -> None:
    """The legacy stream joins everything. An op list takes Streams alone, so none of its ops can be on one."""
    with pytest.raises(DriverError, match=rf"stream {handle} is refused: the null, legacy and per-thread default"):
        Stream.from_handle(driver, handle)
    with pytest.raises(TypeError):
        OpList(driver, [handle], 0, [])  # type: ignore[list-item]
    assert Stream(driver).handle > 2


def test_somebody_elses_graph_is_instantiated_but_not_destroyed(driver: Driver) -> None:
    step = Step(driver)
    step.compute.begin_capture()
    step.record_into(step.list.recording())
    theirs = step.compute.end_capture()

    class Owner:
        graph = theirs

    owner = Owner()
    alive = weakref.ref(owner)
    mine = Graph.from_handle(driver, theirs.handle, owner)
    del owner
    assert mine.num_nodes() == theirs.num_nodes()
    graph_exec = mine.instantiate()
    del mine
    gc.collect()
    right = step.fill(2)
    assert alive() is not None
    graph_exec.launch(step.compute)
    assert step.compute.synchronize(TIMEOUT_S) and step.seen == right
    del graph_exec
    gc.collect()
    assert drained(driver) and alive() is None
    assert theirs.num_nodes() == {"memcpy": NUM_UNITS, "host": NUM_UNITS}
    with pytest.raises(ValueError, match="a graph's handle is 0"):
        Graph.from_handle(driver, 0, step)
