"""Opening a device by name, or saying why it is not there."""

from __future__ import annotations

from graphshard.core.errors import DeviceError
from graphshard.device.base import Device
from graphshard.device.cuda import CudaDevice, cuda_index
from graphshard.device.host import HostDevice


def open_device(name: str = "host", num_ranks: int = 1, *, local_rank: int = 0, same_gpu: bool = False) -> Device:
    """The device called `name` for `local_rank` of the `num_ranks` ranks on this machine.

    Args:
        name: `host`; `cuda`, the device that falls to this rank; `cuda:1`, the visible device of that index.
        num_ranks: how many ranks share the machine's cores.
        local_rank: this rank's place among them.
        same_gpu: whether ranks may share one GPU (for tests).

    Raises:
        DeviceError: with the reason why there is no such device.
    """
    if name == "host":
        return HostDevice(num_ranks)
    if name == "cuda":
        return CudaDevice(cuda_index(local_rank, same_gpu=same_gpu), same_gpu=same_gpu)
    kind, _, index = name.partition(":")
    if kind == "cuda" and index.isascii() and index.isdecimal():
        return CudaDevice(int(index), same_gpu=same_gpu)
    raise DeviceError(f"device {name!r} is unknown: host, cuda, cuda:<index>")


def why_no_cuda(index: int) -> str | None:
    """The reason why `cuda:{index}` cannot be used here; None if it can."""
    try:
        CudaDevice(index)
    except DeviceError as error:
        return str(error)
    return None
