"""Loading a driver: what is missing is named, all at once; forks are refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from device_helpers import run_python

from graphshard._core import Driver, DriverError, Stream
from graphshard.core.errors import DeviceError
from graphshard.device import HostDevice, open_device
from graphshard.device.host import library_path


def test_host_driver_describes_itself(driver: Driver) -> None:
    assert driver.is_host
    assert driver.path == str(library_path())
    assert driver.version >= 12000
    assert driver.total_bytes > 1 << 28
    assert driver.granularity_bytes % 4096 == 0
    assert driver.device_name


def test_missing_library_is_named(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match=r"nowhere\.so could not be loaded") as caught:
        Driver(str(tmp_path / "nowhere.so"))
    assert caught.value.entry_point == "dlopen"
    assert caught.value.args == (str(caught.value),)


def test_library_that_is_no_driver() -> None:
    with pytest.raises(DriverError, match=r"has no cuGetProcAddress_v2"):
        Driver("libm.so.6")


def test_all_missing_entry_points_in_one_error(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler for a stub driver")
    source, library = tmp_path / "stub.c", tmp_path / "stub.so"
    source.write_text(
        "int cuGetProcAddress_v2(const char* name, void** f, int version, unsigned long flags, int* status)"
        "{ *f = (name[2] == 'I') ? (void*)&cuGetProcAddress_v2 : 0; return 0; }"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", str(source), "-o", str(library)], check=True)
    with pytest.raises(DriverError) as caught:
        Driver(str(library))
    text = str(caught.value)
    assert "cuStreamBeginCapture (version 10010)" in text and "cuMemCreate (version 10020)" in text
    assert "cuInit" not in text
    assert "\n" not in text


def test_device_that_does_not_exist(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"device 7 does not exist: .* has 1 devices"):
        Driver(driver.path, 7)


def test_driver_call_that_fails_names_entry_point_error_and_code(driver: Driver) -> None:
    with pytest.raises(DriverError, match=r"cuDeviceGetAttribute failed: CUDA_ERROR_INVALID_VALUE \(1\)") as caught:
        driver.attribute(1_000_000)
    assert (caught.value.entry_point, caught.value.code) == ("cuDeviceGetAttribute", 1)


def test_host_device_spec() -> None:
    device = open_device("host")
    spec = device.spec()
    assert (spec.kind, device.name) == ("host", "host")
    assert spec.memory_bytes == device.driver.total_bytes
    assert HostDevice(num_ranks=1 << 20).spec().spare_cores == 0
    assert HostDevice(num_ranks=0).spec().spare_cores >= 1


def test_host_device_says_what_it_lacks() -> None:
    device = open_device("host")
    assert device.why_not("pull") is None
    assert "core" in (device.why_not("copy_engine") or "")
    with pytest.raises(DeviceError, match="unknown: capture"):
        device.why_not("teleport")


def test_device_errors_wrap_the_drivers() -> None:
    device = open_device("host")
    with pytest.raises(DeviceError, match="host: allocating 0 bytes failed"):
        device.allocate(0)
    with pytest.raises(DeviceError, match="host: importing a window of 64 bytes failed"):
        device.import_memory(-1, 64)


def test_other_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="device 'tpu' is unknown: host, cuda, cuda:<index>"):
        open_device("tpu")


FORK = """
    import os, sys
    from graphshard._core import Driver, DriverError, Memory, Stream
    driver = Driver(sys.argv[1])
    stream, memory = Stream(driver), Memory(driver, 4096)
    stream.fill(memory.address, 7, 4096)
    stream.call(lambda: None)
    uses = [
        lambda: Driver(sys.argv[1]), lambda: Memory(driver, 1), lambda: Stream(driver), lambda: stream.is_idle(),
        lambda: stream.fill(memory.address, 1, 1), lambda: stream.synchronize(1.0), lambda: driver.total_bytes,
    ]
    if (pid := os.fork()) == 0:
        refused = 0
        for use in uses:
            try:
                use()
            except DriverError as error:
                refused += "before a fork" in str(error) and "spawn" in str(error)
        del stream, memory, driver  # destructors of the parent's objects do nothing here
        sys.exit(0 if refused == len(uses) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert stream.synchronize(60.0) and bytes(memory) == bytes([7]) * 4096
    print("parent works")
"""


def test_forked_child_is_refused_and_parent_undisturbed(driver: Driver) -> None:
    done = run_python(FORK, driver.path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent works\n", "")


def test_import_starts_nothing() -> None:
    done = run_python("import os, graphshard._core, graphshard.device; print(len(os.listdir('/proc/self/task')))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_host_function_may_not_call_the_driver(driver: Driver, stream: Stream) -> None:
    stream.call(lambda: driver.total_bytes)
    assert stream.synchronize(60.0)
    with pytest.raises(DriverError, match="a host function may not call the driver") as caught:
        stream.check()
    assert caught.value.code == 800
