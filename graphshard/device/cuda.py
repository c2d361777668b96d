"""A CUDA device: the vendor's driver behind the same interface, on the primary context, which torch uses too.

With `library` another driver stands in for the vendor's; tests give the host driver's path.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from graphshard._core import Driver, DriverError, Memory, device_uuids
from graphshard.core.errors import DeviceError
from graphshard.core.specs import DeviceSpec
from graphshard.device.base import DeviceKind, device_error
from graphshard.device.mapping import MASK, DeviceRow, choose_index

LIBRARY_NAME = "libcuda.so.1"
"""Found by the loader, as every CUDA program finds it: the driver is no part of any toolkit or wheel."""

_LARGEST_INDEX = (1 << 31) - 1  # the driver counts devices by int

# CUdevice_attribute numbers (cuda.h).
_COPY_ENGINES = 40
_WINDOWS = 102
_DESCRIPTORS = 103
_FABRIC = 128
_HOST_WINDOWS = 141


class CudaDevice:
    """One GPU, or one MIG instance, by its visible index."""

    def __init__(self, index: int = 0, *, library: str = LIBRARY_NAME, same_gpu: bool = False) -> None:
        """Open the driver and retain the device's primary context; with `same_gpu` other ranks may use it too.

        Raises:
            DeviceError: no driver, no such device, or one without exportable memory.
        """
        self.index, self.same_gpu = index, same_gpu
        if not 0 <= index <= _LARGEST_INDEX:
            raise DeviceError(f"device cuda:{index} is not available: there is no such index; available here: host")
        try:
            self._driver = Driver(library, index)
        except DriverError as error:
            raise DeviceError(f"device cuda:{index} is not available: {error}; available here: host") from error
        for feature in ("windows", "descriptors"):
            reason = self.why_not(feature)
            if reason is not None:
                raise DeviceError(f"device cuda:{index} is not available: {reason}; available here: host")

    @property
    def kind(self) -> DeviceKind:
        """Always `cuda`."""
        return "cuda"

    @property
    def name(self) -> str:
        """`cuda:` and the visible index, as torch counts."""
        return f"cuda:{self.index}"

    @property
    def driver(self) -> Driver:
        """The vendor's driver, with this device's primary context."""
        return self._driver

    @property
    def uuid(self) -> str:
        """Of the GPU or the MIG instance: equal for whoever sees it, under whatever index."""
        return device_uuids(self._driver.path)[self.index]

    def row(self, rank: int) -> DeviceRow:
        """What `rank`, which computes on this device, tells the others."""
        return DeviceRow(rank, self.name, self.uuid, os.environ.get(MASK))

    def spec(self) -> DeviceSpec:
        """Memory of the device, and the granularity of windows (2 MiB on today's GPUs)."""
        return DeviceSpec(
            kind="cuda",
            name=self._driver.device_name,
            memory_bytes=self._driver.total_bytes,
            granularity_bytes=self._driver.granularity_bytes,
        )

    def allocate(self, num_bytes: int, exportable: bool = False) -> Memory:
        """Zeroed memory of `num_bytes` on the device; a window that peers may map if `exportable`."""
        try:
            return Memory(self._driver, num_bytes, exportable)
        except DriverError as error:
            raise device_error(self.name, f"allocating {num_bytes} bytes", error) from error

    def import_memory(self, fd: int, num_bytes: int, read_only: bool = True) -> Memory:
        """Map the window of `num_bytes` that a peer exported as `fd`, which stays the caller's.

        Read-only where the driver maps so; elsewhere the window is mapped writable and only this library's ops keep
        from writing to it.
        """
        try:
            return Memory.import_fd(self._driver, fd, num_bytes, read_only)
        except DriverError as error:
            raise device_error(self.name, f"importing a window of {num_bytes} bytes", error) from error

    def why_not(self, feature: str) -> str | None:
        """Why this device lacks `feature`, or None if it has it; an unknown feature lists the known ones."""
        if feature in _ALWAYS:
            return None
        if feature in _NEVER:
            return _NEVER[feature]
        if feature not in _ASKED:
            known = ", ".join(sorted({*_ALWAYS, *_NEVER, *_ASKED}))
            raise DeviceError(f"{self.name}: feature {feature!r} is unknown: {known}")
        return _ASKED[feature](self)

    def _lacks(self, attribute: int, reason: str) -> str | None:
        if self._driver.attribute(attribute) > 0:
            return None
        return f"{self._driver.device_name} (driver {self._driver.version}) {reason}"


_ALWAYS = frozenset({"pull", "capture", "cuda_graph", "threads", "processes", "read_only_windows"})
_NEVER = {"seeded_executor": "the order of a graph's nodes is the driver's; seeds are the host device's, for tests"}
_ASKED: dict[str, Callable[[CudaDevice], str | None]] = {
    "windows": lambda device: device._lacks(_WINDOWS, "has no virtual memory management, which windows are made of"),
    "descriptors": lambda device: device._lacks(_DESCRIPTORS, "cannot export memory as a file descriptor"),
    "fabric": lambda device: device._lacks(_FABRIC, "has no fabric handles: peers must share this machine"),
    "host_windows": lambda device: device._lacks(_HOST_WINDOWS, "cannot make windows of pinned host memory"),
    "copy_engine": lambda device: device._lacks(_COPY_ENGINES, "has no copy engine: copies are made by SMs"),
    "nccl": lambda device: None,
}
"""`nccl` is what the device allows; the library has gates of its own."""


def cuda_index(local_rank: int, *, same_gpu: bool = False, library: str = LIBRARY_NAME) -> int:
    """The visible index of the device that `local_rank` computes on, see `mapping.choose_index`.

    Raises:
        DeviceError: no driver, no visible device, or too few of them.
    """
    try:
        uuids = device_uuids(library)
    except DriverError as error:
        raise DeviceError(f"device cuda is not available: {error}; available here: host") from error
    return choose_index(uuids, os.environ.get(MASK), local_rank, same_gpu=same_gpu)
