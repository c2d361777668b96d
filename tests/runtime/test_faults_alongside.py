"""What goes on beside a capture, over both transports: work, watchers, garbage, helpers."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from cuda_rig import open_rig
from fault_tools import InThread, Latch, alone, collect, until, with_run
from ranks import run_on_ranks

import graphshard
from graphshard._core import DriverError, Event, Memory, Stream, Word
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.device import open_device
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

LAYERS = [[3000], [4000], [5000]]
HEADS = ("inside", "outside", "tail")
STEP = StepShape(1)


def compiled(group: Group, model: ByteModel, transport: str, **choices: Any) -> Runtime:
    defaults: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "capture_sizes": [], "transport": transport}
    return compile_bytes(group, model, **(defaults | choices))


def capture_anew(runtime: Runtime) -> None:
    """Close what was captured, and capture it again."""
    if STEP in runtime._graphs:
        runtime.graph(1).close()
    runtime.capture()


# --- events recorded before the capture ---


def capture_after_warm_ups(group: Group, transport: str, head: str) -> tuple[list[str], dict[str, int]]:
    model = ByteModel(LAYERS)
    with compiled(group, model, transport, head=head) as runtime:
        for _ in range(3):
            runtime.run(1)  # leaves every ready and every gate recorded
        runtime.prefetch(1)  # and a gather from outside
        runtime.capture()
        graph = runtime.graph(1)
        return [line for _ in range(3) for line in wrong_after(runtime, model, graph.replay)], graph.num_nodes()


@pytest.mark.parametrize("head", HEADS)
def test_events_recorded_before_a_capture_are_not_waited_for_inside(head: str, transport: str) -> None:
    """The list has events of its own in a capture, and the first gather is inside or before the launch."""
    for wrong, nodes in run_on_ranks(capture_after_warm_ups, 2, transport, head):
        assert wrong == [] and not {"event_record", "event_wait"} & set(nodes)


# --- side streams that still run ---


def test_a_capture_begins_when_side_streams_are_done(transport: str) -> None:
    """Nothing is recorded while a gather from outside still runs."""
    model, latch = ByteModel(LAYERS), Latch()
    seen: list[int] = []

    def look(segment: Segment, state: StepState) -> None:
        seen.append(latch.word.value)
        segment.run(state)

    with_run(model, 0, look)
    with alone(model, capture_sizes=[], transport=transport) as runtime:
        runtime._streams["prefetch"].wait_value(latch.word.address, 1)
        capturing = InThread(runtime.capture)
        until(lambda: runtime._slots.num_primes > len(runtime.plan.units), "the capture gathers what it records over")
        assert seen == []
        latch.open()
        capturing.result()
        assert seen == [1]
        assert [wrong_after(runtime, model, runtime.graph(1).replay) for _ in range(2)] == [[], []]


def test_a_side_stream_that_does_not_end_is_named_and_nothing_is_captured() -> None:
    """Under pull the next capture works; under nccl the communicator is broken, see test_nccl_peers."""
    model, latch = ByteModel(LAYERS), Latch()
    with alone(model, capture_sizes=[]) as runtime:
        runtime._streams["prefetch"].wait_value(latch.word.address, 1)
        patience, runtime.timeout_s = runtime.timeout_s, 0.1
        with pytest.raises(graphshard.CommError, match=r"rank 0 waited 0\.1 s for unit 0 outside a step"):
            runtime.capture()
        assert STEP not in runtime._graphs
        latch.open()
        runtime.timeout_s = patience
        runtime.capture()
        assert wrong_after(runtime, model, runtime.graph(1).replay) == []


# --- watchdogs ---


@contextmanager
def watched(look: Callable[[], object]) -> Iterator[list[int]]:
    """`look` from another thread every millisecond; how often it did."""
    over, looks = threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.001):
            look()
            looks[0] += 1

    watcher = InThread(watch)
    try:
        yield looks
    finally:
        over.set()
        watcher.result()


def look_at(runtime: Runtime) -> None:
    """All that a watchdog may ask of a runtime."""
    bound = runtime._bound[STEP]
    for stream in runtime._streams.values():
        try:
            stream.is_idle()
        except DriverError as error:
            assert "cuStreamQuery refused: the stream is being captured" in str(error)  # not asked of the driver
    for event in range(bound.lowered.num_events):
        bound.op_list.event_done(event)
    for communicator in runtime._transport.collectives:
        assert communicator.async_error() is None  # type: ignore[attr-defined]
    control = runtime._control
    for rank, page in enumerate(control.pages):
        _ = page.step, page.op, page.begun_step, page.num_issues, page.failure, control.state(rank)
    _ = runtime._done.value, runtime.driver.free_bytes, runtime.driver.num_retired, runtime.num_steps


def capture_under_watch(group: Group, transport: str) -> tuple[list[str], int]:
    model = ByteModel(LAYERS)
    with compiled(group, model, transport) as runtime:
        with watched(lambda: look_at(runtime)) as looks:
            for _ in range(50):
                capture_anew(runtime)
            wrong = [line for _ in range(20) for line in wrong_after(runtime, model, runtime.graph(1).replay)]
        return wrong + wrong_after(runtime, model, lambda: runtime.run(1)), looks[0]


def test_a_watchdog_disturbs_no_capture(transport: str) -> None:
    """Two ranks capture 50 times each, each watched each millisecond; no capture is lost, no step is late."""
    for wrong, num_looks in run_on_ranks(capture_under_watch, 2, transport):
        assert wrong == [] and num_looks > 0


def test_a_watchdog_disturbs_no_capture_that_torch_opens() -> None:
    """The same where torch.cuda.graph would open the capture: thread-local mode."""
    with open_rig() as rig, watched(lambda: look_at(rig.runtime)) as looks:
        for _ in range(100):
            rig.capture().close()
        step = rig.capture()
        assert [rig.wrong_after(step.launch) for _ in range(3)] == [[], [], []]
        assert looks[0] > 0


# --- garbage collection ---


class Old:
    """A captured step in a reference cycle: gc alone destroys it, whenever it runs."""

    def __init__(self, graph: object) -> None:
        self.graph, self.itself = graph, self


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_beside_captures_and_gc_stays_as_it_was(is_enabled: bool, transport: str) -> None:
    """50 captures, each with an old one in the garbage and a collection at every allocation."""
    model, olds = ByteModel(LAYERS), []
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    with alone(model, capture_sizes=[], transport=transport) as runtime:
        try:
            (gc.enable if is_enabled else gc.disable)()
            gc.set_threshold(1)
            for _ in range(50):
                runtime.capture()
                olds.append(weakref.ref(Old(runtime._graphs.pop(STEP))))
            assert gc.isenabled() is is_enabled
            runtime.capture()
            assert wrong_after(runtime, model, runtime.graph(1).replay) == []
        finally:
            gc.set_threshold(*thresholds)
            (gc.enable if was_enabled else gc.disable)()
        collect()
        assert [old() for old in olds] == [None] * 50


@pytest.mark.parametrize("is_enabled", [True, False])
def test_gc_is_as_it_was_after_a_capture_that_failed(is_enabled: bool, transport: str) -> None:
    """On or off, as it was when the capture began."""
    model = ByteModel(LAYERS)
    was_enabled = gc.isenabled()
    with alone(model, capture_sizes=[], transport=transport) as runtime:
        with_run(model, 1, lambda segment, state: state.buffer("step").sum().item())
        runtime._compute._segments = model.segments
        try:
            (gc.enable if is_enabled else gc.disable)()
            with pytest.raises(graphshard.DeviceError, match="not permitted when stream is capturing"):
                runtime.capture()
            assert gc.isenabled() is is_enabled
        finally:
            (gc.enable if was_enabled else gc.disable)()


# --- helpers ---


def test_helpers_run_beside_another_threads_capture_or_refuse_before_it(transport: str) -> None:
    """None uses a stream that a capture elsewhere would look at; a second capture is refused by name."""
    model = ByteModel(LAYERS)
    device = open_device()
    origin, memory = Stream(device.driver), device.allocate(8192, exportable=True)
    with alone(model, transport=transport) as runtime:
        helpers: dict[str, Callable[[], object]] = {
            "allocate pinned": lambda: Word(Memory.allocate_host(device.driver, 4)).store(1),
            "import a window": lambda: import_and_close(memory),
            "stream and event": lambda: Stream(device.driver).record(Event(device.driver)),
            "fill and copy": lambda: fill_and_wait(memory),
            "prefetch": lambda: runtime.prefetch(1),
            "eager step": lambda: wrong_after(runtime, model, lambda: runtime.run(1)),
            "replay": lambda: wrong_after(runtime, model, runtime.graph(1).replay),
            "another runtime": lambda: alone(model, transport=transport, capture_sizes=[]).close(),
            "an old graph": runtime.graph(1).close,
        }
        origin.begin_capture()
        try:
            for name, helper in helpers.items():
                assert InThread(helper).result() in (None, []), name
            patience, runtime.timeout_s = runtime.timeout_s, 0.05
            with pytest.raises(graphshard.DeviceError, match=r"1x1 cannot be captured: .* another capture is open"):
                InThread(runtime.capture).result()
            runtime.timeout_s = patience
            for use in (lambda: origin.fill(memory.address, 1, 64), lambda: origin.write_value(memory.address, 1)):
                with pytest.raises(DriverError, match="captur"):
                    use()
            origin.call(lambda: None)
        finally:
            graph = origin.end_capture()
        assert graph.num_nodes()["host"] == 1 and sum(graph.num_nodes().values()) == 1
        runtime.capture()
        assert wrong_after(runtime, model, runtime.graph(1).replay) == []
    del graph
    collect()  # what was dropped meanwhile goes when the capture is over


def import_and_close(memory: Memory) -> None:
    fd = memory.export_fd()
    open_device().import_memory(fd, memory.num_bytes)
    os.close(fd)


def fill_and_wait(memory: Memory) -> None:
    stream = Stream(open_device().driver)
    stream.fill(memory.address, 7, 4096)
    stream.copy(memory.address + 4096, memory.address, 4096)
    assert stream.synchronize(30.0)
