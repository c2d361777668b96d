"""What graphshard makes and waits for beside a capture of somebody else's, or inside one, is harmless to it.

The host driver has CUDA's rule: what a capture forbids, on its own thread or (global mode) on any, is error 900, and
the capture is lost.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
from cuda_rig import TIMEOUT_S, Rank
from fake_torch_cuda import FakeTorchCuda
from fault_tools import InThread
from ranks import run_on_ranks

from graphshard._core import Calls, Driver, DriverError, Event, Memory, OpList, Stream, Word
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.device import open_device


def make_memory(driver: Driver) -> None:
    """Slots, shards: zeroed by the driver, freed again."""
    for memory in (Memory(driver, 5000), Memory(driver, 5000, exportable=True), Memory.allocate_host(driver, 64)):
        memory.address  # noqa: B018
    gc.collect()


def map_a_window(driver: Driver) -> None:
    fd = Memory(driver, 5000, exportable=True).export_fd()
    try:
        Memory.import_fd(driver, fd, 5000, read_only=True)
    finally:
        os.close(fd)


def make_words(driver: Driver) -> None:
    word = Word(Memory.allocate_host(driver, 4))
    stream = Stream(driver)
    stream.write_value(word.address, 7)
    assert word.wait(7, TIMEOUT_S)


def make_and_wait_for_events(driver: Driver) -> None:
    stream, event = Stream(driver), Event(driver)
    stream.record(event)
    assert event.synchronize(TIMEOUT_S) and event.is_done()
    assert stream.synchronize(TIMEOUT_S) and stream.is_idle()


def bind_and_issue(driver: Driver) -> None:
    stream, memory = Stream(driver), Memory(driver, 4096)
    ops = OpList(driver, [stream], 1, [("fill", 0, memory.address, 3, 4096), ("record", 0, 0)])
    ops.issue(Calls([]))
    assert ops.wait_event(0, TIMEOUT_S) and ops.event_done(0)


HELPERS = (make_memory, map_a_window, make_words, make_and_wait_for_events, bind_and_issue)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = open_device().driver
    driver.free_bytes  # noqa: B018 - this thread's context
    yield driver


def here(call: Callable[[], object]) -> None:
    call()


def elsewhere(call: Callable[[], object]) -> None:
    InThread(call).result()


@pytest.mark.parametrize("where", [here, elsewhere])
@pytest.mark.parametrize("helper", HELPERS)
def test_helpers_are_harmless(driver: Driver, helper: Callable[[Driver], None], where: Callable[..., None]) -> None:
    """The capture is of the global mode; ending it says whether it was lost."""
    with FakeTorchCuda(driver).strict_capture():
        where(lambda: helper(driver))


def test_a_call_that_is_not_shielded_loses_the_capture(driver: Driver) -> None:
    """What the test above would see."""
    torch_cuda = FakeTorchCuda(driver)
    stream = torch_cuda.new_stream()
    with (
        pytest.raises(RuntimeError, match="CUDA error 901 in cuStreamEndCapture"),
        torch_cuda.strict_capture(),
        pytest.raises(RuntimeError, match="CUDA error 900"),
    ):
        torch_cuda.synchronize(stream)


def test_a_capturing_stream_itself_is_still_refused(driver: Driver) -> None:
    stream = Stream(driver)
    stream.begin_capture()
    for wait in (lambda: stream.synchronize(0.0), stream.is_idle):
        with pytest.raises(DriverError, match="captur"):
            wait()
    assert stream.end_capture().num_nodes() == {}


def step_beside_a_capture(group: Group) -> list[str]:
    """Rank 0's server captures something of its own in torch's default mode, the global one, while the rank steps."""
    rank = Rank(group)
    with rank.runtime as runtime:
        graph = runtime.graph(1)
        wrong: list[str] = []
        if group.rank == 1:
            group.barrier("rank 0 is done")
            return wrong
        with rank.torch_cuda.strict_capture():

            def steps() -> None:
                for act in (graph.replay, lambda: runtime.run(1), lambda: runtime.prefetch(1)):
                    act()
                    runtime.synchronize()
                    wrong.extend(rank.model.wrong(runtime.buffers(StepShape(1), "output")))
                runtime.gather_now(0, runtime.plan.residencies[0].slot)

            elsewhere(steps)
        group.barrier("rank 0 is done")
        return wrong


def test_steps_beside_a_capture_of_the_servers() -> None:
    assert run_on_ranks(step_beside_a_capture, 2) == [[], []]
