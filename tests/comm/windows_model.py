"""Small layouts with self-naming bytes, and the memory of one rank for them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from graphshard._core import Calls, Memory, OpList, Stream
from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.comm.pull import BoundCopy, PullTransport
from graphshard.core.layout import Copy, Layout, SlotLayout, UnitLayout
from graphshard.device import Device, open_device

ALIGNMENT = 256


def flat_layout(world_size: int, chunk_sizes: Sequence[int]) -> Layout:
    """A unit for each chunk size, one slot for all."""
    units, offset = [], 0
    for unit, size in enumerate(chunk_sizes):
        copies = tuple(Copy(rank, offset, 0, rank * size, 0, 1, size) for rank in range(world_size))
        units.append(UnitLayout(unit, world_size * size, size, offset, (), copies))
        offset += size
    return _layout(world_size, units, offset)


def interleaved_layout(world_size: int, rows: int, row_bytes: int) -> Layout:
    """One unit whose rows go round the ranks: 2-D copies."""
    size = rows * row_bytes
    copies = tuple(
        Copy(rank, 0, row_bytes, rank * row_bytes, world_size * row_bytes, rows, row_bytes)
        for rank in range(world_size)
    )
    return _layout(world_size, [UnitLayout(0, world_size * size, size, 0, (), copies)], size)


def _layout(world_size: int, units: Sequence[UnitLayout], shard_bytes: int) -> Layout:
    slot_bytes = max(unit.num_bytes for unit in units)
    return Layout(world_size, ALIGNMENT, tuple(units), (SlotLayout(0, 0, slot_bytes),), (), shard_bytes, slot_bytes, 0)


def chunk(rank: int, unit: int, num_bytes: int) -> bytes:
    """Bytes that name their rank, unit and offset."""
    blocks = -(-num_bytes // 32)
    named = (hashlib.blake2b(f"{rank} {unit} {block}".encode(), digest_size=32).digest() for block in range(blocks))
    return b"".join(named)[:num_bytes]


@dataclass
class Shard:
    """One rank's device, window, slot and transport."""

    device: Device
    layout: Layout
    window: Memory
    slot: Memory
    checksums: list[int]
    transport: PullTransport

    @staticmethod
    def connect(group: Group, layout: Layout) -> Shard:
        device = open_device("host")
        window = device.allocate(layout.shard_bytes, exportable=True)
        checksums = []
        for unit in layout.units:
            data = chunk(group.rank, unit.unit, unit.chunk_bytes)
            memoryview(window)[unit.chunk_offset : unit.chunk_offset + unit.chunk_bytes] = data
            checksums.append(checksum_of(data))
        slot = device.allocate(layout.slot_bytes)
        transport = PullTransport(device, group, layout, window, checksums)
        return Shard(device, layout, window, slot, checksums, transport)

    def gather(self, unit: int, copies: Sequence[BoundCopy] | None = None) -> bytes:
        """The slot's bytes after a gather of `unit`, over poison."""
        stream = Stream(self.device.driver)
        chosen = self.transport.copies(unit, self.slot.address) if copies is None else copies
        poison = ("fill", 0, self.slot.address, 0xFF, self.slot.num_bytes)
        OpList(self.device.driver, [stream], 0, [poison, *(copy.bound(0) for copy in chosen)]).issue(Calls([]))
        assert stream.synchronize(20.0)
        return bytes(memoryview(self.slot)[: self.layout.units[unit].num_bytes])
