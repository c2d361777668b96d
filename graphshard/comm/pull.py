"""The pull transport: every rank maps its peers' shard windows and copies their chunks into its own slots.

No flags and no barrier: shards do not change during a step, so an idle, slow or dead rank holds nobody up. Needs ranks
that can map each other's memory: one node (or one NVLink domain).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphshard._core import Memory
from graphshard.comm.doors import RankRecord
from graphshard.comm.group import Group
from graphshard.comm.windows import WindowTable
from graphshard.core.errors import CommError
from graphshard.core.layout import Copy, Layout
from graphshard.device.base import Device

SHARD = "shard"
"""The name of the window that holds a rank's chunks."""


@dataclass(frozen=True, slots=True)
class BoundCopy:
    """A piece of a gather with addresses. One row (pitches 0) is a 1-D copy."""

    destination: int
    destination_pitch: int
    source: int
    source_pitch: int
    row_bytes: int
    rows: int
    source_rank: int
    is_own: bool
    """Whether the source is this rank's own shard."""

    def bound(self, stream: int) -> tuple[object, ...]:
        """The op for `_core.OpList`, on the stream with that index."""
        if self.rows == 1:
            return ("copy", stream, self.destination, self.source, self.row_bytes)
        pitches = (self.destination, self.destination_pitch, self.source, self.source_pitch)
        return ("copy2d", stream, *pitches, self.row_bytes, self.rows)


class PullTransport:
    """Peers' shard windows, mapped. Made by all ranks of the group at once; everything after that is local."""

    def __init__(
        self,
        device: Device,
        group: Group,
        layout: Layout,
        shard_memory: Memory | None,
        checksums: Sequence[int],
        peers: Sequence[RankRecord] | None = None,
    ) -> None:
        """Exchange windows and checksums (collective, unless `peers` tells them).

        Args:
            device: maps the peers' windows.
            group: as many ranks as `layout` has.
            layout: where chunks lie in a window.
            shard_memory: this rank's window, exportable; None if nothing is sharded.
            checksums: crc32 of this rank's chunk, by unit, taken from the bytes that were loaded.
            peers: what each rank shows, where a living one has told it to this one, which came back.

        Raises:
            CommError: ranks disagree about the layout or its windows.
            DeviceError: a window cannot be exported or mapped on some rank.
        """
        self.world_size = group.world_size
        self._rank = group.rank
        self._layout = layout
        self._windows = WindowTable(device, group)
        self._checksums: list[list[int]]
        group.agree("shard window", lambda: self._check(shard_memory, checksums))
        if peers is not None:
            if shard_memory is not None:
                self._windows.adopt(SHARD, shard_memory, [peer.window_fd for peer in peers])
            self._checksums = [list(peer.checksums) for peer in peers]
            return
        if shard_memory is not None:
            self._windows.register({SHARD: shard_memory})
        told: list[Any] = group.all_gather([layout.digest, list(checksums)], name="checksums")
        self._checksums = [value[1] for value, _ in told]
        unlike = [rank for rank, (value, _) in enumerate(told) if value[0] != layout.digest]
        if unlike:
            raise CommError(
                f"layouts differ: rank {self._rank} has digest {layout.digest[:12]}, ranks {unlike} have others; "
                "start all ranks with the same model and plan"
            )

    def copies(self, unit: int, slot_address: int) -> list[BoundCopy]:
        """The copies that gather `unit` into the slot at `slot_address`: from rank + 1 on, this rank's own last.

        Order:   any; a gather may spread them over streams.
        Blocks:  nothing, it only computes addresses; they hold until `remap` or `close` (see `generations`).
        Capture: yes; one memcpy node each.
        """
        pieces = [copy for copy in self._layout.units[unit].copies if copy.rows and copy.row_bytes]
        pieces.sort(key=lambda copy: (copy.source_rank - self._rank - 1) % self.world_size)
        return [self._bind(copy, slot_address) for copy in pieces]

    def verify_unit(self, unit: int, slot_view: memoryview, rank: int | None = None) -> None:
        """Compare a gathered unit, or only `rank`'s chunk of it, with what its owners loaded.

        `slot_view` are the slot's bytes, on the host.

        Raises:
            CommError: naming this rank, the source ranks whose chunks differ, and the unit.
        """
        found = [0] * self.world_size
        judged = range(self.world_size) if rank is None else (rank,)
        for copy in self._layout.units[unit].copies:
            if copy.source_rank not in judged:
                continue
            for row in range(copy.rows):
                begin = copy.slot_offset + row * copy.slot_pitch
                found[copy.source_rank] = zlib.crc32(slot_view[begin : begin + copy.row_bytes], found[copy.source_rank])
        expected = [checksums[unit] for checksums in self._checksums]
        wrong = [source for source in judged if found[source] != expected[source]]
        if wrong:
            pairs = ", ".join(
                f"{found[source]:08x} from rank {source} instead of {expected[source]:08x}" for source in wrong
            )
            raise CommError(
                f"rank {self._rank} gathered other bytes of unit {unit} than their owners loaded: checksum {pairs}; "
                "the shard was changed after load, or the mapping of that rank's memory is not what it exported"
            )

    def generations(self) -> tuple[int, ...]:
        """One number a rank; a graph bound before one changed must not be replayed. Empty if nothing is sharded."""
        return self._windows.generations(SHARD) if self._windows.num_registrations else ()

    def remap(self, rank: int, fd: int) -> None:
        """Map the shard window of a rank that came back; `fd` stays the caller's. Bind and capture again after it."""
        self._windows.remap(SHARD, rank, fd)

    def undo_remap(self, rank: int) -> None:
        """Go back to the mapping before the last `remap`: what came back was not what it should be."""
        self._windows.undo_remap(SHARD, rank)

    def drop_retired(self) -> None:
        """Give up the mappings that `remap` replaced; nothing bound before may be used any more."""
        self._windows.drop_retired()

    @property
    def num_registrations(self) -> int:
        """Windows registered: one for the one allocation that peers address."""
        return self._windows.num_registrations

    def close(self) -> None:
        """Unmap the peers' windows. Local, idempotent; graphs that read them must be gone."""
        self._windows.close()

    def _bind(self, copy: Copy, slot_address: int) -> BoundCopy:
        return BoundCopy(
            destination=slot_address + copy.slot_offset,
            destination_pitch=copy.slot_pitch,
            source=self._windows.window(SHARD, copy.source_rank).address + copy.source_offset,
            source_pitch=copy.source_pitch,
            row_bytes=copy.row_bytes,
            rows=copy.rows,
            source_rank=copy.source_rank,
            is_own=copy.source_rank == self._rank,
        )

    def _check(self, shard_memory: Memory | None, checksums: Sequence[int]) -> None:
        layout = self._layout
        if layout.world_size != self.world_size:
            raise CommError(
                f"the layout is for {layout.world_size} ranks, the group has {self.world_size}: plan for this group"
            )
        have = shard_memory.num_bytes if shard_memory is not None else 0
        if have < layout.shard_bytes:
            raise CommError(
                f"the shard window of rank {self._rank} has {have} B, the layout needs {layout.shard_bytes} B"
            )
        if len(checksums) != len(layout.units):
            raise CommError(f"rank {self._rank} has {len(checksums)} checksums for {len(layout.units)} units")
