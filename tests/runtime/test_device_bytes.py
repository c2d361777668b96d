"""Memory as tensors; on a GPU bytes go by way of host memory, which is played here by a copy."""

from __future__ import annotations

import gc
import types
from typing import Any

import pytest
import torch

from graphshard._core import Memory
from graphshard.core.errors import DeviceError
from graphshard.device import CudaDevice, open_device
from graphshard.device.host import library_path
from graphshard.runtime import device_bytes as module
from graphshard.runtime.device_bytes import device_bytes, read_bytes, writing_bytes


def test_tensors_over_memory_copy_nothing_and_keep_it_alive() -> None:
    device = CudaDevice(0, library=str(library_path()))
    memory = device.allocate(4096)
    tensor = device_bytes(device, memory)
    assert (tensor.data_ptr(), tensor.dtype, tensor.numel()) == (memory.address, torch.uint8, 4096)
    assert not tensor.requires_grad
    generation = memory.generation
    del memory
    gc.collect()
    tensor.fill_(7)
    assert bytes(read_bytes(tensor[:3])) == b"\7\7\7"
    assert device.allocate(4096).generation != generation
    assert device_bytes(device, None).numel() == 0


def test_views_of_any_dtype() -> None:
    device = open_device()
    raw = device_bytes(device, device.allocate(16))
    raw.copy_(torch.arange(16, dtype=torch.uint8))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32):
        view = raw.view(dtype)
        assert view.data_ptr() == raw.data_ptr() and view.view(torch.uint8).equal(raw)


class DeviceMemory:
    """Memory that the host cannot read, as far as anybody is told."""

    def __init__(self, memory: Memory) -> None:
        self.address, self.num_bytes, self.is_host_readable = memory.address, memory.num_bytes, False


def test_torch_is_told_the_address_and_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(open_device().allocate(64))
    asked: list[Any] = []

    def as_tensor(array: Any, device: torch.device) -> Any:
        asked.append((array.__cuda_array_interface__, array._memory, str(device)))
        return types.SimpleNamespace(data_ptr=lambda: memory.address)

    monkeypatch.setattr(module.torch, "as_tensor", as_tensor)
    device_bytes(types.SimpleNamespace(name="cuda:3"), memory)  # type: ignore[arg-type]
    interface = {"shape": (64,), "typestr": "|u1", "data": (memory.address, False), "strides": None, "version": 3}
    assert asked == [(interface, memory, "cuda:3")]


def test_a_copy_instead_of_a_view_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch, "as_tensor", lambda array, device: torch.empty(64, dtype=torch.uint8))
    with pytest.raises(DeviceError, match="cuda:0: torch copied 64 bytes from 0x"):
        device_bytes(types.SimpleNamespace(name="cuda:0"), DeviceMemory(open_device().allocate(64)))  # type: ignore[arg-type]


def test_writing_on_the_host_is_in_place() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    with writing_bytes(tensor) as data:
        data[1] = 5
        assert tensor[1] == 5
    with writing_bytes(tensor[:0]) as nothing:
        assert len(nothing) == 0


class Staged:
    """A tensor that says it is on a GPU, and shows what is copied into it."""

    device = torch.device("cuda", 0)

    def __init__(self, num_bytes: int) -> None:
        self.copies: list[list[int]] = []
        self._num_bytes = num_bytes

    def numel(self) -> int:
        return self._num_bytes

    def copy_(self, other: torch.Tensor) -> None:
        self.copies.append(other.tolist())


def test_writing_to_a_device_is_one_copy_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[object] = []
    stream = types.SimpleNamespace(synchronize=lambda: waits.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waits.append(device) or stream)
    tensor = Staged(4)
    with writing_bytes(tensor) as data:  # type: ignore[arg-type]
        data[1:3] = b"\5\6"
        assert tensor.copies == []
    assert tensor.copies == [[0, 5, 6, 0]] and waits == [tensor.device, "waited"]
    with pytest.raises(KeyError), writing_bytes(tensor):  # type: ignore[arg-type]
        raise KeyError
    assert len(tensor.copies) == 1  # what was not written whole is not shown
