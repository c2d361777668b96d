"""The first thing to be known of a machine, by ctypes alone: does memory that one process exports reach another?

    python bench/gpu/probe.py --library libcuda.so.1 --json FILE

Allocates by virtual memory management, exports a descriptor and sends it over a unix socket to a second process, which
maps the memory, copies it and compares; for device memory, and for pinned host memory where the device has such
windows. Needs no package: nothing is built yet.
"""

from __future__ import annotations

import argparse
import array
import ctypes
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIMIT_S = 20.0
NUM_BYTES = 8 << 20
PATTERN_WORD = 0x5EED0001
DEVICE, HOST_NUMA = 1, 3  # CUmemLocationType
PINNED, DESCRIPTOR, READWRITE, READ = 1, 1, 3, 1
ENTRY_POINTS = {
    "cuInit": 2000,
    "cuDriverGetVersion": 2020,
    "cuDeviceGetCount": 2000,
    "cuDeviceGet": 2000,
    "cuDeviceGetName": 2000,
    "cuDeviceTotalMem": 3020,
    "cuDeviceGetAttribute": 2000,
    "cuDevicePrimaryCtxRetain": 7000,
    "cuCtxSetCurrent": 4000,
    "cuMemGetAllocationGranularity": 10020,
    "cuMemCreate": 10020,
    "cuMemAddressReserve": 10020,
    "cuMemMap": 10020,
    "cuMemSetAccess": 10020,
    "cuMemExportToShareableHandle": 10020,
    "cuMemImportFromShareableHandle": 10020,
    "cuStreamCreate": 2000,
    "cuStreamQuery": 2000,
    "cuMemcpyAsync": 4000,
    "cuMemHostAlloc": 2020,
}
"""With the version that fixes the ABI, as csrc/driver/table.h has them."""
ATTRIBUTES = {
    "multiprocessors": 16,
    "copy_engines": 40,
    "unified_addressing": 41,
    "compute_major": 75,
    "compute_minor": 76,
    "virtual_memory_management": 102,
    "descriptors": 103,
    "fabric_handles": 128,
    "host_numa_node": 134,
    "host_numa_windows": 141,
}
PACKAGES = (
    "torch",
    "nanobind",
    "scikit-build-core",
    "cmake",
    "ninja",
    "pytest",
    "numpy",
    "cuda-bindings",
    "cupy-cuda13x",
) + ("nvidia-nccl-cu13", "nvidia-cuda-runtime")


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class Flags(ctypes.Structure):
    """The last member of CUmemAllocationProp."""

    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class Prop(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("meta", c_void_p),
        ("flags", Flags),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


class Cuda:
    """The driver's entry points on device 0, checked."""

    def __init__(self, library: str) -> None:
        """Load, initialise, retain the primary context."""
        get = ctypes.CDLL(library).cuGetProcAddress_v2
        self._calls: dict[str, Callable[..., int]] = {}
        for name, number in ENTRY_POINTS.items():
            found = c_void_p()
            result = get(name.encode(), byref(found), c_int(number), c_uint64(0), byref(c_int()))
            if result or not found.value:
                raise RuntimeError(f"{library} lacks {name} (version {number})")
            self._calls[name] = ctypes.CFUNCTYPE(c_int)(found.value)
        self.call("cuInit", c_int(0))
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value < 1:
            raise RuntimeError(f"{library} shows no device")
        self.device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(self.device), c_int(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), self.device)
        self.call("cuCtxSetCurrent", context)
        self.stream = c_void_p()
        self.call("cuStreamCreate", byref(self.stream), c_int(1))

    def call(self, name: str, *arguments: Any) -> None:
        """RuntimeError with the CUresult if it is no success."""
        result = self._calls[name](*arguments)
        if result:
            raise RuntimeError(f"{name} failed: CUresult {result}")

    def attribute(self, number: int) -> int | None:
        """None where the driver does not know it."""
        value = c_int()
        return None if self._calls["cuDeviceGetAttribute"](byref(value), c_int(number), self.device) else value.value

    def prop(self, where: int) -> Prop:
        """Exportable memory on the device, or on the host's node beside it."""
        node = max(0, self.attribute(ATTRIBUTES["host_numa_node"]) or 0)
        return Prop(PINNED, DESCRIPTOR, Location(where, self.device.value if where == DEVICE else node), None, Flags())

    def map(self, handle: c_uint64, num_bytes: int, where: int, flags: int) -> int:
        """The address at which the memory `handle` lies."""
        address = c_uint64()
        self.call("cuMemAddressReserve", byref(address), c_size_t(num_bytes), c_size_t(0), c_uint64(0), c_uint64(0))
        self.call("cuMemMap", address, c_size_t(num_bytes), c_size_t(0), handle, c_uint64(0))
        access = Access(Location(DEVICE, self.device.value), flags)
        self.call("cuMemSetAccess", address, c_size_t(num_bytes), byref(access), c_size_t(1))
        if where == HOST_NUMA:
            access = Access(self.prop(where).location, READWRITE)
            self.call("cuMemSetAccess", address, c_size_t(num_bytes), byref(access), c_size_t(1))
        return address.value

    def copy(self, destination: int, source: int, num_bytes: int) -> None:
        """Copy, and wait, bounded."""
        self.call("cuMemcpyAsync", c_uint64(destination), c_uint64(source), c_size_t(num_bytes), self.stream)
        deadline = time.monotonic() + LIMIT_S
        while self._calls["cuStreamQuery"](self.stream) == 600:  # not ready
            if time.monotonic() > deadline:
                raise RuntimeError(f"a copy of {num_bytes} B did not end within {LIMIT_S:.0f} s")

    def pinned(self, num_bytes: int) -> Any:
        """Pinned host memory as bytes."""
        address = c_void_p()
        self.call("cuMemHostAlloc", byref(address), c_size_t(num_bytes), c_int(0))
        return (c_char * num_bytes).from_address(address.value or 0)


def pattern(num_bytes: int) -> bytes:
    """Words that count."""
    return array.array("I", range(PATTERN_WORD, PATTERN_WORD + num_bytes // 4)).tobytes()


def facts(cuda: Cuda) -> dict[str, Any]:
    """What the driver says of the device and of itself."""
    name, total, driver = (c_char * 256)(), c_size_t(), c_int()
    cuda.call("cuDeviceGetName", name, c_int(255), cuda.device)
    cuda.call("cuDeviceTotalMem", byref(total), cuda.device)
    cuda.call("cuDriverGetVersion", byref(driver))
    return {
        "device": name.value.decode(),
        "total_bytes": total.value,
        "driver_version": driver.value,
        "attributes": {attribute: cuda.attribute(number) for attribute, number in ATTRIBUTES.items()},
        "python": sys.version.split()[0],
        "packages": {package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def exchange(cuda: Cuda, library: str, where: int) -> dict[str, Any]:
    """Export memory to a second process, which says what it found."""
    prop, granularity, handle = cuda.prop(where), c_size_t(), c_uint64()
    cuda.call("cuMemGetAllocationGranularity", byref(granularity), byref(prop), c_int(1))
    num_bytes = -(-NUM_BYTES // granularity.value) * granularity.value
    cuda.call("cuMemCreate", byref(handle), c_size_t(num_bytes), byref(prop), c_uint64(0))
    address = cuda.map(handle, num_bytes, where, READWRITE)
    bounce = cuda.pinned(num_bytes)
    bounce.raw = pattern(num_bytes)
    cuda.copy(address, ctypes.addressof(bounce), num_bytes)
    fd = c_int(-1)
    cuda.call("cuMemExportToShareableHandle", byref(fd), handle, c_int(DESCRIPTOR), c_uint64(0))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, __file__, "--library", library, "--import-from", str(theirs.fileno())]
        command += ["--num-bytes", str(num_bytes), "--where", str(where)]
        peer = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True)
        try:
            socket.send_fds(ours, [b"x"], [fd.value])
            told = peer.communicate(timeout=LIMIT_S)[0]
        finally:
            peer.kill()
            peer.wait()
    if peer.returncode:
        raise RuntimeError(f"the importing process ended with {peer.returncode}")
    found: dict[str, Any] = json.loads(told)
    return {"granularity_bytes": granularity.value, "num_bytes": num_bytes, **found}


def import_memory(options: argparse.Namespace) -> dict[str, Any]:
    """The second process: map what comes through the socket, copy it to memory of its own and compare."""
    cuda = Cuda(options.library)
    with socket.socket(fileno=options.import_from) as channel:
        channel.settimeout(LIMIT_S)
        _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    handle = c_uint64()
    cuda.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fds[0]), c_int(DESCRIPTOR))
    is_read_only = True
    try:
        address = cuda.map(handle, options.num_bytes, DEVICE, READ)
    except RuntimeError:
        is_read_only = False
        address = cuda.map(handle, options.num_bytes, DEVICE, READWRITE)
    bounce = cuda.pinned(options.num_bytes)
    cuda.copy(ctypes.addressof(bounce), address, options.num_bytes)
    return {"is_read_only": is_read_only, "is_equal": bounce.raw == pattern(options.num_bytes)}


def main() -> int:
    """Both halves; 1 if device memory did not reach the other process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="libcuda.so.1")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--import-from", type=int)
    parser.add_argument("--num-bytes", type=int)
    parser.add_argument("--where", type=int, default=DEVICE)
    options = parser.parse_args()
    if options.import_from is not None:
        print(json.dumps(import_memory(options)))
        return 0
    rows: list[dict[str, Any]] = []

    def check(name: str, step: Callable[[], dict[str, Any]]) -> None:
        row: dict[str, Any] = {"check": name, "status": "running"}
        rows.append(row)
        began = time.perf_counter()
        try:
            row |= step()
            row["status"] = "passed" if row.get("is_equal", True) else "failed"
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            row |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        rows[-1] = row | {"seconds": round(time.perf_counter() - began, 3)}
        print(json.dumps(rows[-1]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps({"step": "probe", "rows": rows}, indent=1) + "\n")

    cuda: list[Cuda] = []
    check("driver", lambda: (cuda.append(Cuda(options.library)), facts(cuda[0]))[1])
    if cuda:
        check("device memory to another process", lambda: exchange(cuda[0], options.library, DEVICE))
        if cuda[0].attribute(ATTRIBUTES["host_numa_windows"]):
            check("pinned host memory to another process", lambda: exchange(cuda[0], options.library, HOST_NUMA))
    return 1 if any(row["status"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
