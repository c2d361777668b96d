"""What ranks must know of each other's devices before they share memory: who is where, and whether copies arrive.

That a driver says it can access a peer (`cuDeviceCanAccessPeer`) is not enough: it does not know of containers, of
descriptors that cannot travel, and of bridges that lose data. So each rank maps each peer's memory and copies it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphshard._core import DriverError, Memory, Stream
from graphshard.comm.group import Group
from graphshard.core.errors import DeviceError
from graphshard.device.base import Device
from graphshard.device.cuda import CudaDevice
from graphshard.device.mapping import DeviceRow, refuse_shared

PROBE_BYTES = 1 << 16


def compare_devices(group: Group, device: Device) -> tuple[DeviceRow, ...]:
    """The GPU of each rank that is on one, by rank (collective).

    Raises:
        DeviceError: on every rank, naming the ranks that are on one GPU, unless all of them allow it (`same_gpu`).
    """
    told = [asdict(device.row(group.rank)), device.same_gpu] if isinstance(device, CudaDevice) else None
    gathered: list[Any] = [value for value, _ in group.all_gather(told, name="devices")]
    rows = tuple(DeviceRow(**value[0]) for value in gathered if value is not None)
    refuse_shared(rows, same_gpu=all(value[1] for value in gathered if value is not None))
    return rows


def probe_pull(group: Group, device: Device, timeout_s: float) -> None:
    """Map every peer's memory and copy from it, once and bounded (collective).

    Raises:
        DeviceError: on every rank, naming each pair of ranks between which nothing or something else arrived.
    """
    stream = Stream(device.driver)
    window = group.agree("probe window", lambda: _own_window(group, device, stream, timeout_s))
    fds = [group.agree("probe export", lambda: _exported(device, window))]
    try:
        columns = group.all_gather(None, fds, name="probe windows")
    finally:
        os.close(fds[0])
    try:
        verdicts = _verdicts(group, device, stream, [peer_fds[0] for _, peer_fds in columns], timeout_s)
    finally:
        for _, peer_fds in columns:
            os.close(peer_fds[0])
    # after this nobody reads anybody's window any more
    table: list[Any] = [value for value, _ in group.all_gather(verdicts, name="probe verdicts")]
    failed = [
        f"rank {rank} from rank {source}: {reason}"
        for rank, row in enumerate(table)
        for source, reason in enumerate(row)
        if reason
    ]
    if failed:
        raise DeviceError(
            f"transport pull is not available: {len(failed)} of {group.world_size * (group.world_size - 1)} copies "
            f"between ranks failed - {'; '.join(failed)}. Ranks must share a machine and its GPUs peer access "
            "(nvidia-smi topo -p2p r); containers need one IPC namespace and the same driver"
        )


def _pattern(rank: int) -> bytes:
    half = PROBE_BYTES // 2
    return bytes([rank % 251 + 1]) * half + bytes([rank // 251 + 1]) * half


def _own_window(group: Group, device: Device, stream: Stream, timeout_s: float) -> Memory:
    window, pattern = device.allocate(PROBE_BYTES, exportable=True), _pattern(group.rank)
    half = PROBE_BYTES // 2
    stream.fill(window.address, pattern[0], half)
    stream.fill(window.address + half, pattern[-1], half)
    if not stream.synchronize(timeout_s):
        raise DeviceError(f"{device.name}: filling {PROBE_BYTES} bytes of memory did not end in {timeout_s:.1f} s")
    return window


def _exported(device: Device, window: Memory) -> int:
    try:
        return window.export_fd()
    except DriverError as error:
        raise DeviceError(f"{device.name}: memory cannot be exported to peers - {error}") from error


def _verdicts(group: Group, device: Device, stream: Stream, fds: Sequence[int], timeout_s: float) -> list[str | None]:
    """By source rank, why its memory cannot be copied from; None if it can."""
    landing = device.allocate(PROBE_BYTES)
    shown = Memory.allocate_host(device.driver, PROBE_BYTES)
    verdicts: list[str | None] = []
    for source, fd in enumerate(fds):
        if source == group.rank:
            verdicts.append(None)
            continue
        try:
            peer = device.import_memory(fd, PROBE_BYTES, read_only=True)
            stream.fill(landing.address, 0, PROBE_BYTES)
            stream.copy(landing.address, peer.address, PROBE_BYTES)  # the way that gathers take
            stream.copy(shown.address, landing.address, PROBE_BYTES)
            if not stream.synchronize(timeout_s):
                verdicts.append(f"a copy of {PROBE_BYTES} bytes did not end in {timeout_s:.1f} s")
                stream = Stream(device.driver)
                continue
        except (DeviceError, DriverError) as error:
            verdicts.append(str(error))
            continue
        wrong = sum(a != b for a, b in zip(bytes(shown), _pattern(source), strict=True))
        verdicts.append(f"{wrong} of {PROBE_BYTES} bytes arrived as others" if wrong else None)
    return verdicts
