"""What a check is made on: one GPU that all ranks share, or the host device in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from graphshard._core import DriverError, Memory
from graphshard.bench.threads import run_threads
from graphshard.comm.group import Group
from graphshard.device import CudaDevice, Device, HostDevice
from graphshard.device.base import DeviceKind, device_error
from graphshard.device.cuda import cuda_index
from graphshard.gpu_check.recorder import Row

Value = TypeVar("Value")

TIMEOUT_S = 30.0
"""The longest that a rank waits for anything."""


class PinnedWindowsCuda(CudaDevice):
    """A GPU whose ranks keep their windows in pinned host memory: gathers cross the bus, as from another machine."""

    def allocate(self, num_bytes: int, exportable: bool = False) -> Memory:
        """Windows on the host, all else on the device."""
        return _pinned(self, num_bytes) if exportable else super().allocate(num_bytes)


class PinnedWindowsHost(HostDevice):
    """The host device by the same entry points."""

    def allocate(self, num_bytes: int, exportable: bool = False) -> Memory:
        """Windows by the entry points of pinned memory."""
        return _pinned(self, num_bytes) if exportable else super().allocate(num_bytes)


def _pinned(device: Device, num_bytes: int) -> Memory:
    try:
        return Memory.allocate_host(device.driver, num_bytes, exportable=True)
    except DriverError as error:
        raise device_error(device.name, f"allocating a window of {num_bytes} bytes of pinned memory", error) from error


@dataclass(frozen=True)
class Setup:
    """The device by kind; `host` is a dry run with smaller sizes, whose times say nothing about a GPU."""

    kind: DeviceKind

    @property
    def is_card(self) -> bool:
        """Whether there is a GPU."""
        return self.kind == "cuda"

    def pick(self, on_card: Value, on_host: Value) -> Value:
        """A size or a count."""
        return on_card if self.is_card else on_host

    def device(self, local_rank: int = 0, *, num_ranks: int = 1, pinned_windows: bool = False) -> Device:
        """The device of `local_rank`: ranks share one GPU.

        Raises:
            DeviceError: it is not there.
        """
        if self.is_card:
            index = cuda_index(local_rank, same_gpu=True)
            kind = PinnedWindowsCuda if pinned_windows else CudaDevice
            return kind(index, same_gpu=True)
        return PinnedWindowsHost(num_ranks) if pinned_windows else HostDevice(num_ranks)

    def why_no_pinned_windows(self) -> str | None:
        """Why windows cannot lie in pinned host memory here; None if they can."""
        return self.device().why_not("host_windows") if self.is_card else None

    def need_card(self, row: Row, what: str) -> None:
        """Leave the check on the host."""
        if not self.is_card:
            row.skip(f"{what} needs a CUDA device; this is a dry run on the host")

    def synchronize(self) -> None:
        """Wait for torch's current stream. On the host all is done by then."""
        if self.is_card:
            torch.cuda.current_stream().synchronize()

    def torch_device(self) -> torch.device:
        """Where tensors lie."""
        return torch.device("cuda", torch.cuda.current_device()) if self.is_card else torch.device("cpu")


def on_threads(function: Callable[[Group], Value], world_size: int, timeout_s: float = 4 * TIMEOUT_S) -> list[Value]:
    """What `function(group)` returns on each rank, as threads of this process."""
    return run_threads(function, world_size, timeout_s)


def by_first(group: Group, name: str, step: Callable[[], Value]) -> Value | None:
    """What `step` gives on rank 0, while all other ranks wait and capture nothing (collective)."""
    group.barrier(f"before {name}")
    return group.agree(name, partial(_step_or_none, group.rank, step))


def _step_or_none(rank: int, step: Callable[[], Value]) -> Value | None:
    return step() if rank == 0 else None
