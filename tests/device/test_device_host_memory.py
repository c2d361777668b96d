"""Pinned memory of the host: words that a device writes and the host waits for, windows of the same kind."""

from __future__ import annotations

import gc
import os

import pytest
from census import no_growth
from device_helpers import TIMEOUT_S, Latch, drained

from graphshard._core import Calls, Driver, DriverError, Memory, OpList, Stream, Word


def test_host_memory_is_memory_like_any_other(driver: Driver, stream: Stream) -> None:
    source, memory = Memory(driver, 100), Memory.allocate_host(driver, 100)
    assert memory.num_bytes == 100 and bytes(memory) == bytes(100)
    assert memory.is_host_readable and not memory.is_read_only
    memoryview(source)[:] = bytes(range(100))
    stream.copy(memory.address, source.address, 100)
    assert stream.synchronize(TIMEOUT_S) and bytes(memory) == bytes(range(100))
    with pytest.raises(DriverError, match="run past the end of the memory of 100 bytes"):
        stream.fill(memory.address + 90, 0, 11)
    assert memory.generation != source.generation


def test_a_word_in_host_memory(driver: Driver, stream: Stream) -> None:
    word = Word(Memory.allocate_host(driver, 8), 4)
    ops = [("write_value", 0, word.address, 5), ("wait_value", 0, word.address, 5)]
    OpList(driver, [stream], 0, ops).capture(Calls([])).instantiate().launch(stream)
    assert word.wait(5, TIMEOUT_S) and word.value == 5
    for offset in (2, 8, (1 << 64) - 4):
        with pytest.raises(DriverError, match=f"offset {offset} is no aligned word of 8 bytes"):
            Word(Memory.allocate_host(driver, 8), offset)


def test_host_memory_outlives_the_work_on_it(driver: Driver, stream: Stream, latch: Latch) -> None:
    memory, seen = Memory.allocate_host(driver, 64), Memory(driver, 64)
    latch.hold(stream)
    stream.fill(memory.address, 3, 64)
    stream.copy(seen.address, memory.address, 64)
    del memory
    gc.collect()
    assert not drained(driver)
    latch.open()
    assert stream.synchronize(TIMEOUT_S) and bytes(seen) == b"\x03" * 64
    assert drained(driver)


def test_dropped_host_memory_leaves_nothing_behind(driver: Driver) -> None:
    Memory.allocate_host(driver, 1 << 20)
    with no_growth():
        for _ in range(50):
            Memory.allocate_host(driver, 1 << 20)


def test_windows_in_host_memory(driver: Driver) -> None:
    window = Memory.allocate_host(driver, 5000, exportable=True)
    assert window.num_bytes == 5000 and window.is_host_readable and bytes(window) == bytes(5000)
    fd = window.export_fd()
    peer = Memory.import_fd(driver, fd, 5000)
    os.close(fd)
    memoryview(window)[17] = 9
    assert memoryview(peer)[17] == 9
    with pytest.raises(DriverError, match="is not exportable"):
        Memory.allocate_host(driver, 5000).export_fd()


@pytest.mark.parametrize("exportable", [False, True])
def test_no_bytes_and_too_many(driver: Driver, exportable: bool) -> None:
    with pytest.raises(DriverError, match="memory of 0 bytes is refused"):
        Memory.allocate_host(driver, 0, exportable)
    with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        Memory.allocate_host(driver, 1 << 50, exportable)
