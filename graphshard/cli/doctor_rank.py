"""The doctor's self-test on one rank: what the host runtime is made of, over a window of a few bytes. No torch."""

from __future__ import annotations

from typing import Any

from graphshard._core import Calls, Memory, OpList, Stream
from graphshard.comm.group import Group
from graphshard.comm.windows import WindowTable
from graphshard.core.errors import DeviceError
from graphshard.device import Device, open_device

WINDOW_BYTES = 4096
TIMEOUT_S = 5.0
EXECUTORS = ("cooperative", "threaded")


def self_test(group: Group) -> dict[str, Any]:
    """Read every rank's window: eagerly, and in a captured graph of two streams under each executor.

    Returns `eager` and each executor's name with an empty string, or what was wrong.
    """
    device = open_device("host", num_ranks=group.world_size)
    own = device.allocate(WINDOW_BYTES, exportable=True)
    memoryview(own)[:] = _pattern(group.rank)
    table = WindowTable(device, group)
    table.register({"doctor": own})
    group.barrier("windows written")
    windows = [table.window("doctor", rank) for rank in range(group.world_size)]
    told = {"eager": _error_of(device, windows, None)}
    told |= {executor: _error_of(device, windows, executor) for executor in EXECUTORS}
    group.barrier("windows read")
    table.close()
    return told


def _pattern(rank: int) -> bytes:
    return bytes((rank * 89 + i * 7) % 251 for i in range(WINDOW_BYTES))


def _error_of(device: Device, windows: list[Memory], executor: str | None) -> str:
    """Copy all windows on a second stream, then copy them again on the first: the last copy must have waited."""
    num_bytes = WINDOW_BYTES * len(windows)
    first, second = (device.allocate(num_bytes) for _ in range(2))
    streams = [Stream(device.driver), Stream(device.driver)]
    copies = [
        ("copy", 1, first.address + WINDOW_BYTES * rank, window.address, WINDOW_BYTES)
        for rank, window in enumerate(windows)
    ]
    ops: list[tuple[object, ...]] = [("record", 0, 0), ("wait", 1, 0), *copies, ("record", 1, 1), ("wait", 0, 1)]
    ops.append(("copy", 0, second.address, first.address, num_bytes))
    try:
        listed = OpList(device.driver, streams, 2, ops)
        if executor is None:
            listed.issue(Calls([]))
        else:
            launcher = listed.capture(Calls([])).instantiate(executor)
            launcher.launch(streams[0])
        if not all(stream.synchronize(TIMEOUT_S) for stream in streams):
            return f"copies of {num_bytes} B did not end within {TIMEOUT_S:.0f} s"
    except (RuntimeError, DeviceError) as error:  # the driver's own are RuntimeErrors
        return str(error)
    found, wanted = bytes(memoryview(second)), b"".join(_pattern(rank) for rank in range(len(windows)))
    bad = next((i for i in range(num_bytes) if found[i] != wanted[i]), None)
    return "" if bad is None else f"byte {bad % WINDOW_BYTES} of rank {bad // WINDOW_BYTES}'s window arrived wrong"
