"""Streams and events: order, bounded waits, host functions and their errors, refused addresses."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable

import pytest
import torch
from device_helpers import TIMEOUT_S, Latch

from graphshard._core import Calls, Driver, DriverError, Event, Memory, Stream


def test_ops_run_in_order(driver: Driver, stream: Stream) -> None:
    first, second = Memory(driver, 4096), Memory(driver, 4096)
    seen: list[bytes] = []
    stream.fill(first.address, 3, 4096)
    stream.copy(second.address + 8, first.address, 16)
    stream.call(lambda: seen.append(bytes(second)[:32]))
    stream.write_value(second.address, 0x01020304)
    stream.call(lambda: seen.append(bytes(second)[:32]))
    assert stream.synchronize(TIMEOUT_S)
    stream.check()
    assert seen == [bytes(8) + b"\3" * 16 + bytes(8), b"\4\3\2\1" + bytes(4) + b"\3" * 16 + bytes(8)]
    assert stream.is_idle()


@pytest.mark.parametrize("offsets", [(0, 0), (1, 0), (0, 3), (63, 17)], ids=str)
@pytest.mark.parametrize("num_bytes", [(64 << 10) - 1, 64 << 10, (64 << 10) + 127, (1 << 20) + 13, (16 << 20) + 65])
def test_copies_of_every_size_move_their_bytes_alone(
    driver: Driver, stream: Stream, num_bytes: int, offsets: tuple[int, int]
) -> None:
    """The host driver copies in other ways from 64 KiB and from 16 MiB on."""
    to, since = offsets
    source, destination = Memory(driver, num_bytes + 128), Memory(driver, num_bytes + 128)
    given = torch.frombuffer(source, dtype=torch.uint8)
    given.random_(0, 255, generator=torch.Generator().manual_seed(num_bytes))
    found = torch.frombuffer(destination, dtype=torch.uint8).fill_(255)
    stream.copy(destination.address + to, source.address + since, num_bytes)
    assert stream.synchronize(TIMEOUT_S)
    assert torch.equal(found[to : to + num_bytes], given[since : since + num_bytes])
    assert bool((found[:to] == 255).all()) and bool((found[to + num_bytes :] == 255).all())


def test_waits_are_bounded(stream: Stream, driver: Driver, latch: Latch) -> None:
    event = Event(driver)
    latch.hold(stream)
    stream.record(event)
    assert not stream.is_idle() and not event.is_done()
    assert not stream.synchronize(0.0) and not stream.synchronize(0.02)
    assert not event.synchronize(0.0) and not event.synchronize(0.02)
    latch.open()
    assert event.synchronize(TIMEOUT_S) and stream.synchronize(TIMEOUT_S)
    assert event.is_done() and stream.is_idle()


@pytest.mark.parametrize("timeout_s", [-1.0, float("inf"), float("nan")])
def test_unbounded_waits_are_refused(stream: Stream, driver: Driver, timeout_s: float) -> None:
    for wait in (stream.synchronize, Event(driver).synchronize):
        with pytest.raises(ValueError, match="waits are never unbounded"):
            wait(timeout_s)


def test_signals_end_a_wait(stream: Stream, latch: Latch) -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise InterruptedError("a signal came")

    latch.hold(stream)
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        with pytest.raises(InterruptedError):
            stream.synchronize(TIMEOUT_S)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_events_order_streams_and_bind_when_waited(driver: Driver, stream: Stream, latch: Latch) -> None:
    other, event = Stream(driver), Event(driver)
    log: list[str] = []
    latch.hold(stream)
    stream.call(lambda: log.append("first"))
    stream.record(event)
    other.wait(event)
    other.call(lambda: log.append("second"))
    other.record(event)  # a later record does not change the wait above
    latch.open()
    assert other.synchronize(TIMEOUT_S)
    assert log == ["first", "second"]


def test_events_measure_time(driver: Driver, stream: Stream) -> None:
    begin, end = Event(driver, timing=True), Event(driver, timing=True)
    stream.record(begin)
    stream.record(end)
    assert stream.synchronize(TIMEOUT_S)
    assert end.elapsed_us(begin) >= 0.0
    with pytest.raises(DriverError) as caught:
        end.elapsed_us(Event(driver))
    assert caught.value.entry_point == "cuEventElapsedTime"


def test_value_waits_are_signed_differences(driver: Driver, stream: Stream) -> None:
    word = Memory(driver, 4)
    stream.write_value(word.address, 0xFFFFFFFE)
    stream.wait_value(word.address, -3)  # -2 is past -3
    stream.write_value(word.address, 1)
    stream.wait_value(word.address, 0xFFFFFFFF)  # 1 is past -1
    assert stream.synchronize(TIMEOUT_S)
    with pytest.raises(ValueError, match="a value word has 32 bits"):
        stream.write_value(word.address, 1 << 32)


def test_first_exception_is_kept_and_later_calls_skipped(stream: Stream) -> None:
    log: list[int] = []

    def fail(text: str) -> Callable[[], object]:
        def function() -> None:
            raise LookupError(text)

        return function

    stream.call(lambda: log.append(1))
    stream.call(fail("first"))
    stream.call(fail("second"))
    stream.call(lambda: log.append(2))
    assert stream.synchronize(TIMEOUT_S)
    with pytest.raises(LookupError, match="first") as caught:
        stream.check()
    assert caught.traceback[-1].name == "function"
    stream.check()  # cleared
    stream.call(lambda: log.append(3))
    assert stream.synchronize(TIMEOUT_S)
    assert log == [1, 3]


def test_calls_are_owned_until_they_ran(stream: Stream, latch: Latch) -> None:
    class Function:
        def __call__(self) -> None:
            log.append(1)

    log: list[int] = []
    function = Function()
    alive = weakref.ref(function)
    latch.hold(stream)
    stream.call(function)
    del function
    assert alive() is not None
    latch.open()
    assert stream.synchronize(TIMEOUT_S)
    assert log == [1]
    while alive() is not None:  # the worker drops it right after the call
        pass


def test_streams_keep_their_work_when_dropped(driver: Driver, latch: Latch) -> None:
    log: list[int] = []
    done = Event(driver)
    stream = Stream(driver)
    latch.hold(stream)
    stream.call(lambda: log.append(1))
    stream.record(done)
    del stream
    latch.open()
    assert done.synchronize(TIMEOUT_S)
    assert log == [1]


def test_host_functions_may_drop_driver_objects(driver: Driver, stream: Stream) -> None:
    owned = [Memory(driver, 4096), Event(driver), Stream(driver)]
    stream.call(owned.clear)
    assert stream.synchronize(TIMEOUT_S)
    stream.check()
    assert owned == [] and driver.num_retired == 0


def test_host_functions_may_make_and_drop_calls(stream: Stream) -> None:
    """A worker is inside Python already when Python code that it runs gives up callables."""
    made: list[int] = []
    stream.call(lambda: made.append(len(Calls([lambda: None, lambda: None]))))
    stream.call(lambda: made.append(len(Calls([]))))
    assert stream.synchronize(TIMEOUT_S)
    stream.check()
    assert made == [2, 0]


def test_foreign_and_misaligned_addresses_are_refused(driver: Driver, stream: Stream) -> None:
    memory = Memory(driver, 8192)
    tensor = torch.zeros(4096, dtype=torch.uint8)
    base = memory.address
    refused = [
        (lambda: stream.copy(tensor.data_ptr(), base, 16), "16 bytes at 0x.* not in any memory of this driver"),
        (lambda: stream.copy(base, tensor.data_ptr(), 16), "not in any memory of this driver"),
        (lambda: stream.copy(base, 0, 16), "not in any memory of this driver"),
        (lambda: stream.fill(base + 8000, 0, 193), "run past the end of the memory of 8192 bytes"),
        (lambda: stream.fill(base, 0, 0), "are no bytes"),
        (lambda: stream.write_value(base + 2, 0), "is not a multiple of 4 bytes"),
        (lambda: stream.wait_value(base + 1, 0), "is not a multiple of 4 bytes"),
        (lambda: stream.wait_value(tensor.data_ptr() // 4 * 4, 0), "not in any memory of this driver"),
    ]
    for use, reason in refused:
        with pytest.raises(DriverError, match=reason):
            use()
    assert stream.is_idle()
