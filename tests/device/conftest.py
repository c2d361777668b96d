"""The host driver and a latch: ordering is tested by holding a stream at a value word, never by sleeping."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from device_helpers import TIMEOUT_S, Latch

from graphshard._core import Driver, Stream
from graphshard.device.host import library_path


@pytest.fixture(scope="session")
def driver() -> Driver:
    return Driver(str(library_path()))


@pytest.fixture
def stream(driver: Driver) -> Iterator[Stream]:
    stream = Stream(driver)
    yield stream
    assert stream.synchronize(TIMEOUT_S)


@pytest.fixture
def latch(driver: Driver) -> Iterator[Latch]:
    latch = Latch(driver)
    yield latch
    latch.open()
