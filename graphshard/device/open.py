"""Opening a device, or saying why it is not there."""

from __future__ import annotations

from graphshard._core import Driver, DriverError
from graphshard.core.errors import DeviceError
from graphshard.device.base import Device
from graphshard.device.host import HostDevice


def open_device(kind: str = "host", index: int = 0, num_ranks: int = 1) -> Device:
    """The device of `kind`, shared by `num_ranks` ranks here; DeviceError with the reason if there is none."""
    if kind == "host":
        return HostDevice(num_ranks)
    if kind == "cuda":
        raise DeviceError(f"device cuda:{index} is not available: {why_no_cuda(index)}; available here: host")
    raise DeviceError(f"device {kind!r} is unknown: host, cuda")


def why_no_cuda(index: int) -> str:
    """The reason why `cuda:{index}` cannot be used here."""
    try:
        driver = Driver("libcuda.so.1", index)
    except DriverError as error:
        return str(error)
    return f"a driver was found ({driver.device_name}), but this version runs on the host only"
