"""What a gather costs beside its yardsticks: C's memcpy of as many bytes, gloo's all-gather, and NCCL's.

Every sample gathers several units into as many slots, more bytes than the last-level cache holds, so each one is cold.
All ranks work at once, from a barrier on; the slowest rank's time counts. The yardsticks take turns within one run and
write to the same slots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from graphshard._core import Calls, Memory, OpList, Stream, memcpy
from graphshard.bench.gloo import gloo
from graphshard.bench.stats import summarize
from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.comm.open import open_transport
from graphshard.core.errors import CommError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.specs import DeviceSpec
from graphshard.device import Device, open_device
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import synthetic_model

PEERS = ("memcpy", "gloo")
COLD_BYTES = 96 * 2**20
"""Bytes gathered in one sample, at least: three times the last-level cache of the machines we know."""
NUM_WARMUPS = 2


@dataclass(frozen=True)
class GatherRequest:
    """What to measure."""

    sizes: Sequence[int]
    peers: Sequence[str] = PEERS
    num_repeats: int = 20
    cold_bytes: int = COLD_BYTES
    executor: str = "cooperative"
    transport: str = "pull"
    timeout_s: float = 60.0


def measure_gather(group: Group, request: GatherRequest) -> list[dict[str, object]]:
    """Rows `{num_bytes, what, us, GBps, ...}`, equal on all ranks (collective)."""
    device = open_device("host")
    with gloo(group, request.timeout_s) if "gloo" in request.peers else nullcontext():
        return [row for size in request.sizes for row in _measure_size(group, device, size, request)]


class _Arena:
    """Chunks, slots and plain sources of `count` units of `num_bytes`."""

    def __init__(self, group: Group, device: Device, num_bytes: int, count: int, request: GatherRequest) -> None:
        model = synthetic_model(count, (("proj", (num_bytes,)),), dtype="uint8")
        spec = DeviceSpec(kind="host", name="bench", memory_bytes=2**62)
        self.layout: Layout = build_layout(
            model, make_plan(model, group.world_size, spec, units="weight", prefetch_depth=0, min_shard_bytes=0)
        )
        self.stride = self.layout.units[0].num_bytes
        self.count, self.num_bytes = count, num_bytes
        opening = open_transport(request.transport, device, group, request.timeout_s)
        opening.start()
        self.shards = opening.allocate("shards", self.layout.shard_bytes)
        self.slots = opening.allocate("slots", self.stride * count)
        self.sources = device.allocate(self.stride * count, exportable=False)
        window = torch.frombuffer(self.shards, dtype=torch.uint8)
        window.copy_(torch.arange(window.numel(), dtype=torch.int64).mul_(2 * group.rank + 3).to(torch.uint8))
        torch.frombuffer(self.sources, dtype=torch.uint8).fill_(1)
        checksums = [checksum_of(self.chunk(unit).numpy().data) for unit in range(count)]
        self.transport = opening.connect(self.layout, self.shards, self.slots, checksums)

    def chunk(self, unit: int) -> torch.Tensor:
        """This rank's chunk of `unit`."""
        place = self.layout.units[unit]
        return _view(self.shards, place.chunk_offset, place.chunk_bytes)

    def slot(self, unit: int) -> torch.Tensor:
        """Where `unit` is gathered."""
        return _view(self.slots, unit * self.stride, self.stride)

    def check(self) -> None:
        """CommError unless every slot holds what the ranks loaded."""
        for unit in range(self.count):
            self.transport.verify_unit(unit, self.slot(unit).numpy().data)


def _measure_size(group: Group, device: Device, size: int, request: GatherRequest) -> list[dict[str, object]]:
    arena = _Arena(group, device, size, max(2, -(-request.cold_bytes // size)), request)
    stream = Stream(device.driver)
    runs = _variants(arena, stream, device, request)
    samples: dict[str, list[float]] = {what: [] for what in runs}
    order = list(runs)
    for repeat in range(NUM_WARMUPS + request.num_repeats):
        for what in order[repeat % len(order) :] + order[: repeat % len(order)]:  # none is always first
            group.barrier(what)
            begin = time.perf_counter()
            runs[what]()
            elapsed = time.perf_counter() - begin
            if what != "memcpy" and repeat == 0:
                arena.check()
            if repeat >= NUM_WARMUPS:
                samples[what].append(elapsed * 1e6 / arena.count)
    gathered = group.all_gather(samples, name=f"samples of {size} B")
    runs.clear()  # its graph reads peers' windows
    arena.transport.close()
    slowest = {what: [max(both) for both in zip(*(g[0][what] for g in gathered), strict=True)] for what in order}  # type: ignore[index]
    return [_row(size, what, arena, slowest) for what in order]


def _variants(arena: _Arena, stream: Stream, device: Device, request: GatherRequest) -> dict[str, Callable[[], None]]:
    units = range(arena.count)
    transport = arena.transport
    ops = [
        op
        for unit in units
        for op in transport.gather_ops(unit, arena.slots.address + unit * arena.stride, 0, 0, transport.num_copies)
    ]
    graph = OpList(device.driver, [stream], 0, ops, transport.collectives).capture(Calls([]), (), request.timeout_s)
    launcher = graph.instantiate(request.executor)

    def gather() -> None:
        launcher.launch(stream)
        if not stream.synchronize(request.timeout_s):
            raise CommError(f"{arena.count} gathers did not end within {request.timeout_s:.1f} s")

    def copy() -> None:
        for unit in units:
            offset = unit * arena.stride
            memcpy(arena.slots.address + offset, arena.sources.address + offset, arena.num_bytes)

    # its name since torch 2.13
    all_gather = getattr(torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor)

    def over_gloo() -> None:
        for unit in units:
            all_gather(arena.slot(unit), arena.chunk(unit))

    known = {"memcpy": copy, "gloo": over_gloo}
    return {transport.name: gather, **{peer: known[peer] for peer in request.peers}}


def _row(size: int, what: str, arena: _Arena, slowest: dict[str, list[float]]) -> dict[str, object]:
    summary = summarize(slowest[what])
    row: dict[str, object] = {
        "num_bytes": size,
        "what": what,
        "us": summary.median,
        "p10_us": summary.p10,
        "p90_us": summary.p90,
        "n": summary.n,
        "GBps": size / summary.median / 1e3,
        "units_per_sample": arena.count,
        "samples_us": slowest[what],
    }
    if what != "memcpy" and "memcpy" in slowest:
        row["share_of_memcpy"] = summarize(slowest["memcpy"]).median / summary.median
    return row


def _view(memory: Memory, offset: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
