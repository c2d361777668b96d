"""Gathers by size beside the copy limit: the same bytes by plain cuMemcpyAsync, from the same kind of memory.

The limit is measured twice: as the same copies on one stream, and as one copy.
Ranks are threads; rank 0 gathers, the others lend their windows. A sample is many gathers from places that the last one
has not touched, so that no cache helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from graphshard._core import Calls, Event, Memory, OpList, Stream
from graphshard.bench.stats import summarize
from graphshard.comm.group import Group
from graphshard.comm.windows import WindowTable
from graphshard.core.errors import CommError
from graphshard.device import Device
from graphshard.gpu_check.recorder import Row
from graphshard.gpu_check.setup import TIMEOUT_S, Setup, by_first, on_threads
from graphshard.runtime.device_bytes import device_bytes

NUM_RANKS = 4
FAN_OUTS = (1, 2, 4)
MIN_SHARE = 0.85
JUDGED_BYTES = 16 << 20
"""From this size on a gather must reach MIN_SHARE of the same copies' rate; below it each launch counts."""
MAX_PER_SAMPLE = 32
NUM_WARM_UPS = 2
WINDOW = "shard"


def check_limits(row: Row, setup: Setup, is_pinned: bool) -> None:
    """A row for each size: the limit, and gathers over 1, 2 and 4 copy streams."""
    reason = setup.why_no_pinned_windows() if is_pinned else None
    if reason is not None:
        row.skip(reason)
    on_threads(lambda group: _rank(row, setup, group, is_pinned), NUM_RANKS)


def _rank(row: Row, setup: Setup, group: Group, is_pinned: bool) -> None:
    device = setup.device(group.local_rank, num_ranks=group.world_size, pinned_windows=is_pinned)
    window_bytes = setup.pick(512 << 20, 2 << 20)
    shard = device.allocate(window_bytes, exportable=True)
    stream = Stream(device.driver)
    stream.fill(shard.address, group.rank + 1, window_bytes)
    if not stream.synchronize(TIMEOUT_S):
        raise CommError(f"rank {group.rank}: its window could not be filled within {TIMEOUT_S:.0f} s")
    windows = WindowTable(device, group)
    windows.register({WINDOW: shard})
    sources = [windows.window(WINDOW, rank).address for rank in range(group.world_size)]

    def measure() -> None:
        slots = device.allocate(window_bytes * group.world_size)
        one = device.allocate(window_bytes * group.world_size, exportable=True)  # the limit's source, of the same kind
        streams = [stream, *(Stream(device.driver) for _ in range(max(FAN_OUTS) - 1))]
        bench = _Bench(setup, device, sources, slots, one, streams)
        sizes = setup.pick([1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30], [1 << 16, 1 << 20])
        for size in sizes:
            found = bench.measure(size)
            row.append("sizes", found)
            row.require(found["is_whole"], f"gathers of {size} B brought other bytes")
            if setup.is_card and size >= JUDGED_BYTES:
                share = max(one["share"] for one in found["gathers"])
                row.require(share >= MIN_SHARE, f"gathers of {size} B reach {share:.0%} of the same copies' rate")

    by_first(group, "bandwidth", measure)
    group.barrier("measured", timeout_s=4 * TIMEOUT_S)
    windows.close()


class _Bench:
    """Lists of gathers and of plain copies over the same places."""

    def __init__(
        self, setup: Setup, device: Device, sources: list[int], slots: Memory, one: Memory, streams: list[Stream]
    ) -> None:
        self._sources, self._slots, self._one, self._streams = sources, slots, one, streams
        self._setup, self._driver, self._slot_bytes = setup, device.driver, device_bytes(device, slots)
        self._num_repeats = setup.pick(10, 3)

    def measure(self, size: int) -> dict[str, Any]:
        """Microseconds and GB/s of one gather of `size` bytes, own chunk included."""
        chunk = size // len(self._sources)
        count = min(MAX_PER_SAMPLE, self._slots.num_bytes // size)
        limit_us = self._time(lambda: self._copy_plain(size, size, count)) / count
        chunks_us = self._time(lambda: self._copy_plain(size, chunk, count)) / count
        gathers = []
        is_whole = True
        for fan_out in FAN_OUTS:
            launcher = self._gathers(chunk, count, fan_out)
            self._streams[0].fill(self._slots.address, 0, self._slots.num_bytes)
            us = self._time(launcher) / count
            is_whole = is_whole and self._is_whole(chunk, count)
            gathers.append({"fan_out": fan_out, "us": us, "GBps": size / us / 1e3})
            gathers[-1] |= {"share": chunks_us / us, "share_of_one_copy": limit_us / us}
        return {
            "num_bytes": size,
            "num_ranks": len(self._sources),
            "limit_us": limit_us,
            "limit_GBps": size / limit_us / 1e3,
            "limit_by_chunks_us": chunks_us,
            "limit_by_chunks_GBps": size / chunks_us / 1e3,
            "gathers": gathers,
            "is_whole": is_whole,
        }

    def _time(self, act: Callable[[], None]) -> float:
        """The median of the device's microseconds, by events around `act` on the first stream."""
        stream = self._streams[0]
        begin, end = Event(self._driver, timing=True), Event(self._driver, timing=True)
        samples = []
        for number in range(NUM_WARM_UPS + self._num_repeats):
            stream.record(begin)
            act()
            stream.record(end)
            if not stream.synchronize(TIMEOUT_S):
                raise CommError(f"copies did not end within {TIMEOUT_S:.0f} s")
            if number >= NUM_WARM_UPS:
                samples.append(end.elapsed_us(begin))
        return summarize(samples).median

    def _is_whole(self, chunk: int, count: int) -> bool:
        """Whether each chunk that was gathered holds its rank's bytes."""
        num_ranks = len(self._sources)
        seen = self._slot_bytes[: count * num_ranks * chunk].view(count, num_ranks, chunk)
        ranks = torch.arange(1, num_ranks + 1, dtype=torch.uint8, device=seen.device)
        return bool((seen == ranks[None, :, None]).all())

    def _copy_plain(self, size: int, piece: int, count: int) -> None:
        """As many bytes as `count` gathers bring, in copies of `piece` on one stream."""
        stream, destination, source = self._streams[0], self._slots.address, self._one.address
        for at in range(0, size * count, piece):
            stream.copy(destination + at, source + at, piece)

    def _gathers(self, chunk: int, count: int, fan_out: int) -> Callable[[], None]:
        """Launches a captured list of `count` gathers over `fan_out` streams."""
        ops: list[tuple[object, ...]] = [("record", 0, 0)]
        ops += [("wait", stream, 0) for stream in range(1, fan_out)]
        num_ranks = len(self._sources)
        for number in range(count):
            for rank, source in enumerate(self._sources):
                destination = self._slots.address + (number * num_ranks + rank) * chunk
                ops.append(("copy", rank % fan_out, destination, source + number * chunk, chunk))
        for stream in range(1, fan_out):
            ops += [("record", stream, stream), ("wait", 0, stream)]
        streams = self._streams[:fan_out]
        graph = OpList(self._driver, streams, fan_out, ops).capture(Calls([]), lock_timeout_s=TIMEOUT_S)
        launcher = graph.instantiate()
        return lambda: launcher.launch(streams[0])
