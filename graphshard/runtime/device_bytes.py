"""Memory as tensors, on the host and on a GPU, and bytes on their way between the two.

A tensor is made over an address that a driver mapped, copies nothing and keeps the memory alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphshard._core import Memory
from graphshard.core.errors import DeviceError
from graphshard.device.base import Device


class _CudaArray:
    """What torch asks of an object with device memory; torch holds it as long as a tensor views it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory.address, False),  # torch knows no read-only tensors: who may write is checked by our ops
            "strides": None,
            "version": 3,
        }


@torch.inference_mode(False)
def device_bytes(device: Device, memory: Memory | None) -> Tensor:
    """All of `memory`, allocated on `device`, as uint8; an empty tensor for None. Writable in any of torch's modes.

    Raises:
        DeviceError: torch made a copy instead of a view, as it does for memory of another device.
    """
    if memory is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if memory.is_host_readable:
        return torch.frombuffer(memory, dtype=torch.uint8, count=memory.num_bytes)
    tensor = torch.as_tensor(_CudaArray(memory), device=torch.device(device.name))
    if tensor.data_ptr() != memory.address:
        raise DeviceError(
            f"{device.name}: torch copied {memory.num_bytes} bytes from {memory.address:#x} to "
            f"{tensor.data_ptr():#x} instead of viewing them: is this torch built for CUDA, and {device.name} the same "
            "device there (CUDA_VISIBLE_DEVICES)?"
        )
    return tensor


def read_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a uint8 tensor, on the host: its own memory if they are there, else a copy of them as they are now.

    Blocks:  until what torch's current stream has is done, for device memory.
    """
    return tensor.cpu().numpy().data


@contextmanager
def writing_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Zeroed or present bytes of the host that `tensor`, uint8, holds when the block has ended.

    On the host they are its own; for device memory all of them are written, so fill what is not to be zero.

    Blocks:  until the device has them: our streams do not wait for torch's.
    """
    if tensor.device.type == "cpu":
        yield tensor.numpy().data
        return
    staging = torch.zeros(tensor.numel(), dtype=torch.uint8, device="cpu")
    yield staging.numpy().data
    tensor.copy_(staging)
    torch.cuda.current_stream(tensor.device).synchronize()
