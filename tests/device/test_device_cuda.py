"""The CUDA device over the host driver: everything but the vendor's library itself."""

from __future__ import annotations

import os

import pytest
from device_helpers import TIMEOUT_S, run_python

from graphshard._core import Driver, DriverError, Memory, Stream, device_uuids
from graphshard.core.errors import DeviceError
from graphshard.device import CudaDevice, open_device
from graphshard.device.cuda import LIBRARY_NAME, cuda_index
from graphshard.device.host import library_path
from graphshard.device.open import why_no_cuda

LIBRARY = str(library_path())


@pytest.fixture
def device() -> CudaDevice:
    return CudaDevice(0, library=LIBRARY)


@pytest.fixture
def without_vendor() -> None:
    """For tests of what a machine without the vendor's driver says."""
    try:
        Driver(LIBRARY_NAME)
    except DriverError:
        return
    pytest.skip(f"{LIBRARY_NAME} is installed here")


def test_describes_itself(device: CudaDevice) -> None:
    assert (device.kind, device.name, device.index) == ("cuda", "cuda:0", 0)
    spec = device.spec()
    assert (spec.kind, spec.name) == ("cuda", device.driver.device_name)
    assert spec.memory_bytes == device.driver.total_bytes
    assert spec.granularity_bytes == device.driver.granularity_bytes


def test_uuids_are_listed_without_a_context(device: CudaDevice) -> None:
    done = run_python(
        """
        import ctypes, sys
        from graphshard._core import device_uuids
        print(*device_uuids(sys.argv[1]))
        get = ctypes.CDLL(sys.argv[1]).cuGetProcAddress_v2
        current = ctypes.c_void_p()
        get(b"cuCtxGetCurrent", ctypes.byref(current), 4000, ctypes.c_uint64(0), None)
        context = ctypes.c_void_p(1)
        assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(current.value)(ctypes.addressof(context)) == 0
        print(context.value)
        """,
        LIBRARY,
    )
    assert (done.stderr, done.stdout) == ("", f"{device.uuid}\nNone\n")
    assert device.uuid.startswith("GPU-") and len(device.uuid) == len("GPU-") + 36
    with pytest.raises(DriverError, match=r"nowhere\.so could not be loaded"):
        device_uuids("nowhere.so")


def test_windows_travel_as_descriptors(device: CudaDevice) -> None:
    mine = device.allocate(4096, exportable=True)
    stream = Stream(device.driver)
    stream.fill(mine.address, 7, 4096)
    assert stream.synchronize(TIMEOUT_S)
    fd = mine.export_fd()
    try:
        theirs = device.import_memory(fd, 4096)
    finally:
        os.close(fd)
    assert theirs.is_read_only and bytes(theirs) == bytes([7]) * 4096
    with pytest.raises(DriverError, match="imported read-only"):
        stream.fill(theirs.address, 1, 1)
    with pytest.raises(DeviceError, match="cuda:0: importing a window of 64 bytes failed"):
        device.import_memory(-1, 64)
    with pytest.raises(DeviceError, match="cuda:0: allocating 0 bytes failed"):
        device.allocate(0)


def test_says_what_it_lacks(device: CudaDevice) -> None:
    assert device.why_not("pull") is None and device.why_not("copy_engine") is None
    assert "no fabric handles: peers must share this machine" in (device.why_not("fabric") or "")
    assert "seeds" in (device.why_not("seeded_executor") or "")
    with pytest.raises(DeviceError, match="cuda:0: feature 'teleport' is unknown: capture, copy_engine"):
        device.why_not("teleport")


def test_fabric_handles_are_refused_where_there_is_no_fabric(device: CudaDevice) -> None:
    with pytest.raises(DriverError, match=r"NOT_SUPPORTED.*needs an NVLink fabric") as caught:
        Memory(device.driver, 4096, fabric=True)
    assert caught.value.entry_point == "cuMemCreate"
    with pytest.raises(DriverError, match="has no fabric handle: allocate it with fabric=True"):
        Memory(device.driver, 4096, exportable=True).export_fabric()
    with pytest.raises(DriverError, match="a fabric handle has 64 bytes, not 3"):
        Memory.import_fabric(device.driver, b"abc", 4096)
    with pytest.raises(DriverError, match="cuMemImportFromShareableHandle failed"):
        Memory.import_fabric(device.driver, bytes(64), 4096)


def test_a_device_that_does_not_exist_is_refused() -> None:
    for index in (-1, 1 << 31, 10**20):
        with pytest.raises(DeviceError, match=rf"device cuda:{index} is not available: there is no such index"):
            CudaDevice(index, library=LIBRARY)
    with pytest.raises(DeviceError, match=r"device cuda:7 is not available: device 7 does not exist.*here: host"):
        CudaDevice(7, library=LIBRARY)


def test_the_rank_gets_the_device_that_falls_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cuda_index(0, library=LIBRARY) == cuda_index(3, library=LIBRARY) == 0  # one device: whoever asks
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000000")
    with pytest.raises(DeviceError, match="set it before the process starts"):
        cuda_index(0, library=LIBRARY)


def test_what_a_rank_tells_of_its_device(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert str(device.row(2)) == f"rank 2: cuda:0 {device.uuid} (CUDA_VISIBLE_DEVICES=3)"


@pytest.mark.usefixtures("without_vendor")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_without_a_driver_the_reason_is_given(name: str) -> None:
    with pytest.raises(DeviceError, match=rf"device {name} is not available: .*libcuda.so.1.*; available here: host"):
        open_device(name)


@pytest.mark.usefixtures("without_vendor")
def test_doctor_is_told_why() -> None:
    assert "libcuda.so.1" in (why_no_cuda(0) or "")


@pytest.mark.parametrize("name", ["cuda:", "cuda:x", "cuda:-1", "cuda:1:2", "cuda:²", "CUDA", "gpu", ""])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(DeviceError, match="is unknown: host, cuda, cuda:<index>"):
        open_device(name)


def test_the_host_device_needs_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert open_device("host").kind == "host"
