"""The host device: graphshard's own driver over CPU memory, one per machine, shared by all ranks on it."""

from __future__ import annotations

import os
from pathlib import Path

from graphshard import _core
from graphshard._core import Driver, DriverError, Memory
from graphshard.core.errors import DeviceError
from graphshard.core.specs import DeviceSpec
from graphshard.device.base import DeviceKind, device_error

LIBRARY_NAME = "libgraphshard_hostcuda.so"

# What is asked of a device by name, and why the host lacks it.
_MISSING = {
    "copy_engine": "copies on the host are made by cores, and compete with compute unless a core is spare",
    "cuda_graph": "compute on the host is recorded from ATen calls, not captured by torch.cuda.graph",
}
_PRESENT = frozenset({"pull", "nccl", "capture", "threads", "processes", "read_only_windows", "seeded_executor"})


def library_path() -> Path:
    """Where the host driver is installed: in `lib` beside the extension."""
    return Path(_core.__file__).resolve().parent / "lib" / LIBRARY_NAME


class HostDevice:
    """CPU memory behind the driver interface. Ranks are threads or processes of one machine."""

    def __init__(self, num_ranks: int = 1) -> None:
        """Open the driver. `num_ranks` on this machine keep a core each; the others are spare."""
        path = library_path()
        if not path.is_file():
            raise DeviceError(f"host: the driver {LIBRARY_NAME} was not found at {path}; reinstall graphshard")
        try:
            self._driver = Driver(str(path))
        except DriverError as error:
            raise device_error(self.name, f"opening {path}", error) from error
        self._num_ranks = num_ranks

    @property
    def kind(self) -> DeviceKind:
        """Always `host`."""
        return "host"

    @property
    def name(self) -> str:
        """Always `host`: a machine has one."""
        return "host"

    @property
    def driver(self) -> Driver:
        """The host driver."""
        return self._driver

    def spec(self) -> DeviceSpec:
        """Memory of the machine, and the cores on which no rank computes."""
        return DeviceSpec(
            kind="host",
            name=self._driver.device_name,
            memory_bytes=self._driver.total_bytes,
            granularity_bytes=self._driver.granularity_bytes,
            spare_cores=max(0, len(os.sched_getaffinity(0)) - self._num_ranks),
        )

    def allocate(self, num_bytes: int, exportable: bool = False) -> Memory:
        """Zeroed memory of `num_bytes`; a window that peers may map if `exportable`."""
        try:
            return Memory(self._driver, num_bytes, exportable)
        except DriverError as error:
            raise device_error(self.name, f"allocating {num_bytes} bytes", error) from error

    def import_memory(self, fd: int, num_bytes: int, read_only: bool = True) -> Memory:
        """Map the window of `num_bytes` that a peer exported as `fd`, which stays the caller's."""
        try:
            return Memory.import_fd(self._driver, fd, num_bytes, read_only)
        except DriverError as error:
            raise device_error(self.name, f"importing a window of {num_bytes} bytes", error) from error

    def why_not(self, feature: str) -> str | None:
        """Why the host lacks `feature`, or None if it has it; an unknown feature lists the known ones."""
        if feature in _PRESENT:
            return None
        if feature in _MISSING:
            return _MISSING[feature]
        raise DeviceError(f"host: feature {feature!r} is unknown: {', '.join(sorted(_PRESENT | _MISSING.keys()))}")
