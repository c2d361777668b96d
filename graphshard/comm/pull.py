"""The pull transport: every rank maps its peers' shard windows and copies their chunks into its own slots.

No flags and no barrier: shards do not change during a step, so an idle, slow or dead rank holds nobody up. Needs ranks
that can map each other's memory: one node (or one NVLink domain).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphshard._core import Communicator, Memory
from graphshard.comm.activations import ActPlace, PullActivations
from graphshard.comm.alignment import Apart
from graphshard.comm.checksums import ChunkChecksums
from graphshard.comm.control import ControlTable
from graphshard.comm.doors import RankRecord
from graphshard.comm.group import Group
from graphshard.comm.transport import BoundOp, Remappable, Transport, WindowUse
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

    def bound(self, stream: int) -> BoundOp:
        """The op for `_core.OpList`, on the stream with that index."""
        if self.rows == 1:
            return ("copy", stream, self.destination, self.source, self.row_bytes)
        pitches = (self.destination, self.destination_pitch, self.source, self.source_pitch)
        return ("copy2d", stream, *pitches, self.row_bytes, self.rows)


class PullTransport:
    """Peers' shard windows, mapped. Made by all ranks of the group at once; everything after that is local."""

    name = "pull"
    is_collective = False
    collectives: tuple[Communicator, ...] = ()
    must_exit: str | None = None

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
            checksums: the checksum of this rank's chunk, by unit, taken from the bytes that were loaded.
            peers: what each rank shows, where a living one has told it to this one, which came back.

        Raises:
            CommError: ranks disagree about the layout or its windows.
            DeviceError: a window cannot be exported or mapped on some rank.
        """
        self.world_size = self.num_copies = group.world_size
        self._rank = group.rank
        self._layout = layout
        self._windows = WindowTable(device, group)
        group.agree("shard window", lambda: self._check(shard_memory, checksums))
        if peers is not None:
            if shard_memory is not None:
                self._windows.adopt(SHARD, shard_memory, [peer.window_fd for peer in peers])
            self._checksums = ChunkChecksums(group.rank, layout, [list(peer.checksums) for peer in peers])
            return
        if shard_memory is not None:
            self._windows.register({SHARD: shard_memory})
        self._checksums = ChunkChecksums.exchange(group, layout, checksums)

    def copies(self, unit: int, slot_address: int) -> list[BoundCopy]:
        """The copies that gather `unit` into the slot at `slot_address`: from rank + 1 on, this rank's own last.

        A copy a rank, or one for each slice of a rank.

        Order:   any; a gather may spread them over streams.
        Blocks:  nothing, it only computes addresses; they hold until `remap` or `close` (see `generations`).
        Capture: yes; one memcpy node each.
        """
        pieces = [copy for copy in self._layout.units[unit].copies if copy.rows and copy.row_bytes]
        pieces.sort(key=lambda copy: (copy.source_rank - self._rank - 1) % self.world_size)
        return [self._bind(copy, slot_address) for copy in pieces]

    def gather_ops(self, unit: int, slot_address: int, stream: int, begin: int, end: int) -> list[BoundOp]:
        """Those of `copies` that read the `begin`-th to `end`-th rank, for `_core.OpList`. See `Transport`."""
        ranks = {(self._rank + 1 + number) % self.world_size for number in range(begin, end)}
        return [copy.bound(stream) for copy in self.copies(unit, slot_address) if copy.source_rank in ranks]

    def verify_unit(self, unit: int, slot_view: memoryview, rank: int | None = None) -> None:
        """Compare a gathered unit, or only `rank`'s chunk of it, with what its owners loaded.

        Raises:
            CommError: naming this rank, the source ranks whose chunks differ, and the unit.
        """
        self._checksums.verify_unit(unit, slot_view, rank)

    def adopt_checksums(self, checksums: ChunkChecksums) -> None:
        """See `Transport`."""
        self._checksums = checksums

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
    def remappable(self) -> Remappable:
        """This transport: windows can be mapped anew when a rank comes back."""
        return self

    def alignment(self, control: ControlTable, timeout_s: float) -> Apart:
        """Ranks go each at its own pace."""
        del control
        return Apart(timeout_s)

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


class PullOpening:
    """What stands of the pull transport before memory is reserved: nothing but the device and the group."""

    name = "pull"
    is_collective = False
    why_no_rejoin: str | None = None
    settings: Mapping[str, str] = {}

    def __init__(self, device: Device, group: Group) -> None:
        self._device, self._group = device, group

    def start(self) -> None:
        """Nothing: windows are exchanged when they are filled."""

    def allocate(self, use: WindowUse, num_bytes: int) -> Memory:
        """Shards are a window for peers, slots private."""
        return self._device.allocate(num_bytes, exportable=use == "shards")

    def connect(
        self,
        layout: Layout,
        shards: Memory | None,
        slots: Memory | None,
        checksums: Sequence[int],
        peers: Sequence[RankRecord] | None = None,
    ) -> PullTransport:
        """Exchange windows and checksums (collective, unless `peers` tells them)."""
        del slots
        return PullTransport(self._device, self._group, layout, shards, checksums, peers)

    def open_activations(
        self, transport: Transport, staging: Memory, places: Sequence[ActPlace], timeout_s: float
    ) -> PullActivations:
        """Exchange windows for them (collective)."""
        del transport, places, timeout_s
        return PullActivations(self._device, self._group, staging)

    def close(self) -> None:
        """Nothing was opened."""
