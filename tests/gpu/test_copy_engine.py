"""A captured gather over pinned host windows finishes while a kernel holds every SM: only copy engines can do that.

`--evidence FILE` keeps what was shown, for `StepGraph.report(copy_engine=FILE)`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu.spin import Spin

from graphshard._core import Calls, Memory, OpList, Stream
from graphshard.core.errors import DeviceError
from graphshard.device import CudaDevice
from graphshard.runtime.evidence.report import CopyEngineEvidence

pytestmark = pytest.mark.gpu
NUM_RANKS = 4
CHUNK_BYTES = 16 << 20
SPIN_S = 10.0
"""The longest that the kernel holds the SMs, whatever else happens."""


@pytest.fixture
def device() -> CudaDevice:
    try:
        return CudaDevice(0)
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.fixture
def spin(device: CudaDevice) -> Iterator[Spin]:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed: pip install cupy-cuda12x or cupy-cuda13x, as the driver is")
    import cupy

    with Spin(device.driver, cupy, device.index, SPIN_S) as spin:
        yield spin


class HostGather:
    """A gather as `pull` captures it: a copy from each rank's window, here in pinned memory of the host."""

    def __init__(self, device: CudaDevice) -> None:
        driver, exportable = device.driver, device.why_not("host_windows") is None
        self.windows = [Memory.allocate_host(driver, CHUNK_BYTES, exportable) for _ in range(NUM_RANKS)]
        for rank, window in enumerate(self.windows):
            memoryview(window)[:] = bytes([rank + 1]) * CHUNK_BYTES
        self.slot = Memory(driver, NUM_RANKS * CHUNK_BYTES)
        self.seen = Memory.allocate_host(driver, NUM_RANKS * CHUNK_BYTES)
        self.stream = Stream(driver)
        copies = [
            ("copy", 0, self.slot.address + rank * CHUNK_BYTES, window.address, CHUNK_BYTES)
            for rank, window in enumerate(self.windows)
        ]
        op_list = OpList(driver, [self.stream], 0, copies)
        self.graph = op_list.capture(Calls([]))
        self.exec = self.graph.instantiate()
        self.exec.upload(self.stream)
        self.exec.launch(self.stream)  # what is set up at a first launch is set up here
        assert self.stream.synchronize(SPIN_S)
        self.stream.fill(self.slot.address, 0, self.slot.num_bytes)
        assert self.stream.synchronize(SPIN_S)

    def slot_bytes(self) -> bytes:
        self.stream.copy(self.seen.address, self.slot.address, self.slot.num_bytes)
        assert self.stream.synchronize(SPIN_S)
        return bytes(memoryview(self.seen))


def test_a_gather_finishes_beside_a_kernel_on_all_sms(
    device: CudaDevice, spin: Spin, request: pytest.FixtureRequest
) -> None:
    gather = HostGather(device)
    assert gather.graph.num_nodes() == {"memcpy": NUM_RANKS}
    spin.start()
    spin.start_another_kernel()
    gather.exec.launch(gather.stream)
    finished = gather.stream.synchronize(SPIN_S / 2)
    was_running, other_is_done = spin.is_running, spin.other_kernel_is_done
    spin.__exit__()
    assert was_running, "the kernel ended before the gather was judged: raise SPIN_S"
    assert not other_is_done, "one more thread found a place on an SM: they were not full, so nothing was shown"
    assert finished, f"{NUM_RANKS} copies of {CHUNK_BYTES} B waited for an SM"
    expected = b"".join(bytes([rank + 1]) * CHUNK_BYTES for rank in range(NUM_RANKS))
    assert gather.slot_bytes() == expected
    assert spin.other_kernel_is_done
    path = request.config.getoption("--evidence", default=None)
    if path is not None:
        driver, num_bytes = device.driver, NUM_RANKS * CHUNK_BYTES
        CopyEngineEvidence(driver.device_name, driver.version, "pull", num_bytes, spin.num_sms).save(Path(path))
