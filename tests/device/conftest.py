"""The host driver and a latch: ordering is tested by holding a stream at a value word, never by sleeping."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_helpers import TIMEOUT_S, Latch
from fake_nccl import FakeNccl, build, open_communicator

from graphshard._core import Communicator, Driver, NcclLibrary, Stream
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


@pytest.fixture(scope="session")
def fake_nccl_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("fake_nccl"))


@pytest.fixture
def fake(fake_nccl_path: Path) -> Iterator[FakeNccl]:
    fake = FakeNccl(fake_nccl_path)
    fake.reset()
    yield fake
    fake.reset()  # whatever hangs may go


@pytest.fixture
def library(fake: FakeNccl, driver: Driver) -> NcclLibrary:
    return NcclLibrary(fake.path, driver)


@pytest.fixture
def communicator(library: NcclLibrary) -> Iterator[Communicator]:
    communicator = open_communicator(library)
    yield communicator
    communicator.abort(TIMEOUT_S)
