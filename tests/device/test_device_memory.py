"""Memory: windows between processes, buffers that keep it alive, drops that wait for enqueued work."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from census import no_growth
from device_helpers import TIMEOUT_S, Latch, drained, is_mapped, run_python

from graphshard._core import Driver, DriverError, Memory, Stream, memcpy


def test_new_memory_is_zero_aligned_and_as_large_as_asked(driver: Driver) -> None:
    memory = Memory(driver, 5000)
    assert memory.num_bytes == 5000
    assert memory.address % driver.granularity_bytes == 0
    assert bytes(memory) == bytes(5000)
    assert not memory.is_read_only


def test_zero_bytes_are_refused(driver: Driver) -> None:
    with pytest.raises(DriverError, match="memory of 0 bytes is refused: ask for 1 byte or more"):
        Memory(driver, 0)


@pytest.mark.parametrize("num_bytes", [1 << 50, (1 << 64) - 1])
def test_not_enough_memory_is_refused_before_reserving(driver: Driver, num_bytes: int) -> None:
    with no_growth(), pytest.raises(DriverError) as caught:
        Memory(driver, num_bytes)
    assert caught.value.entry_point == "cuMemCreate"
    if num_bytes == 1 << 50:
        assert caught.value.code == 2
        assert f"not enough memory: need {1 << 50} bytes, have " in str(caught.value)


def test_generations_are_never_reused(driver: Driver) -> None:
    generations, addresses = set(), set()
    for _ in range(50):
        memory = Memory(driver, 4096)
        generations.add(memory.generation)
        addresses.add(memory.address)
        del memory
    assert len(generations) == 50
    assert len(addresses) < 50  # addresses are, so they cannot tell mappings apart


def test_buffer_is_the_memory_itself(driver: Driver) -> None:
    memory = Memory(driver, 4096)
    tensor = torch.frombuffer(memory, dtype=torch.int32)
    array = np.frombuffer(memory, dtype=np.int32)
    tensor[3] = 77
    assert array[3] == 77 and memoryview(memory).cast("i")[3] == 77
    assert tensor.data_ptr() == memory.address == array.ctypes.data


@pytest.mark.parametrize(
    "view",
    [
        lambda memory: memoryview(memory),
        lambda memory: memoryview(memory)[8:16],
        lambda memory: np.frombuffer(memory, dtype=np.uint8)[100:],
        lambda memory: torch.frombuffer(memory, dtype=torch.uint8).view(2, -1)[1],
    ],
    ids=["memoryview", "slice", "numpy", "torch"],
)
def test_memory_lives_as_long_as_its_last_view(driver: Driver, view: Callable[[Memory], object]) -> None:
    memory = Memory(driver, 4096)
    address = memory.address
    kept = view(memory)
    del memory
    gc.collect()
    assert is_mapped(address)
    assert sum(kept) == 0  # type: ignore[call-overload]
    del kept
    gc.collect()
    assert not is_mapped(address)


def test_memory_leaves_nothing_behind(driver: Driver) -> None:
    Memory(driver, 4096)
    with no_growth():
        for _ in range(100):
            exported = Memory(driver, 1 << 16, exportable=True)
            fd = exported.export_fd()
            Memory.import_fd(driver, fd, 1 << 16)
            os.close(fd)
        del exported


def test_window_in_one_process(driver: Driver) -> None:
    exported = Memory(driver, 10_000, exportable=True)
    fd = exported.export_fd()
    window = Memory.import_fd(driver, fd, 10_000, read_only=False)
    read_only = Memory.import_fd(driver, fd, 10_000)
    os.close(fd)
    assert len({exported.address, window.address, read_only.address}) == 3
    memoryview(window)[9_999] = 5
    assert memoryview(exported)[9_999] == memoryview(read_only)[9_999] == 5
    del exported  # a peer's window outlives its exporter's
    assert memoryview(window)[9_999] == 5


CHILD = """
    import sys
    from graphshard._core import Driver, Memory, Stream
    driver = Driver(sys.argv[1])
    window = Memory.import_fd(driver, int(sys.argv[2]), 100_000, read_only=False)
    assert bytes(window) == bytes(i % 251 for i in range(100_000)), "other bytes than the parent's"
    stream = Stream(driver)
    stream.fill(window.address + 1, 255, 3)
    assert stream.synchronize(60.0)
"""


def test_window_between_processes(driver: Driver) -> None:
    exported = Memory(driver, 100_000, exportable=True)
    memoryview(exported)[:] = bytes(i % 251 for i in range(100_000))
    fd = exported.export_fd()
    done = run_python(CHILD, driver.path, str(fd), pass_fds=[fd])
    os.close(fd)
    assert (done.returncode, done.stderr) == (0, "")
    assert bytes(memoryview(exported)[:5]) == bytes([0, 255, 255, 255, 4])


def test_read_only_window_cannot_be_written(driver: Driver, stream: Stream) -> None:
    exported = Memory(driver, 4096, exportable=True)
    fd = exported.export_fd()
    window = Memory.import_fd(driver, fd, 4096)
    os.close(fd)
    assert window.is_read_only and memoryview(window).readonly
    with pytest.raises(TypeError):
        memoryview(window)[0] = 1
    assert not np.frombuffer(window, dtype=np.uint8).flags.writeable
    for write in (
        lambda: stream.copy(window.address, exported.address, 16),
        lambda: stream.fill(window.address, 1, 16),
        lambda: stream.write_value(window.address, 1),
    ):
        with pytest.raises(DriverError, match="in a window that is imported read-only"):
            write()
    stream.copy(exported.address, window.address, 16)


def test_what_is_no_window_is_refused(driver: Driver) -> None:
    with pytest.raises(DriverError, match="is not exportable: allocate it with exportable=True"):
        Memory(driver, 4096).export_fd()
    small = os.memfd_create("small")
    os.truncate(small, 4096)
    reader, writer = os.pipe()
    try:
        with no_growth():
            for fd in (small, reader, -1):
                with pytest.raises(DriverError, match="a window of 100000 needs"):
                    Memory.import_fd(driver, fd, 100_000)
            with pytest.raises(DriverError, match="memory of 0 bytes is refused"):
                Memory.import_fd(driver, small, 0)
    finally:
        for fd in (small, reader, writer):
            os.close(fd)


def test_memory_dropped_under_a_copy_stays_until_it_is_done(driver: Driver, stream: Stream, latch: Latch) -> None:
    num_bytes = 1 << 20
    source, destination = Memory(driver, num_bytes), Memory(driver, num_bytes)
    memoryview(source)[:] = b"\x5a" * num_bytes
    address = source.address
    latch.hold(stream)
    stream.copy(destination.address, address, num_bytes)
    del source
    gc.collect()
    assert is_mapped(address) and driver.num_retired == 1
    for _ in range(3):  # its address and bytes belong to nobody else
        other = Memory(driver, num_bytes)
        assert other.address != address
        memoryview(other)[:] = b"\xff" * num_bytes
    latch.open()
    assert stream.synchronize(TIMEOUT_S)
    assert bytes(destination) == b"\x5a" * num_bytes
    assert drained(driver) and not is_mapped(address)


def test_address_of_dropped_memory_is_refused(driver: Driver, stream: Stream) -> None:
    memory = Memory(driver, 4096)
    address = memory.address
    del memory
    with pytest.raises(DriverError, match="not in any memory of this driver"):
        stream.fill(address, 1, 4096)


def test_busy_streams_do_not_pile_up_dropped_memory(driver: Driver, latch: Latch) -> None:
    stalled, busy = Stream(driver), Stream(driver)
    for _ in range(20):
        memory = Memory(driver, 4096)
        busy.fill(memory.address, 1, 4096)
    assert busy.synchronize(TIMEOUT_S)
    del memory
    assert drained(driver)
    latch.hold(stalled)
    del stalled  # a stream with work goes when the work is done
    assert driver.num_retired == 1
    latch.open()
    while not drained(driver):
        pass


def test_memcpy(driver: Driver) -> None:
    source, destination = Memory(driver, 1 << 16), Memory(driver, 1 << 16)
    memoryview(source)[:] = os.urandom(1 << 16)
    memcpy(destination.address, source.address, 1 << 16)
    assert bytes(source) == bytes(destination)
