"""What carries out gathers: the protocol between the runtime and a transport, in two parts.

TransportOpening   before memory is reserved: what must be alike, and where windows are allocated
Transport          over windows that are filled: the ops that a gather becomes, and their checks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from graphshard._core import Communicator, Memory
from graphshard.comm.activations import ActPlace
from graphshard.comm.alignment import Alignment
from graphshard.comm.checksums import ChunkChecksums
from graphshard.comm.control import ControlTable
from graphshard.comm.doors import RankRecord
from graphshard.core.layout import Layout
from graphshard.core.lowering import ActOp

BoundOp = tuple[object, ...]
"""An op of `_core.OpList`."""
WindowUse = Literal["shards", "slots"]


class Activations(Protocol):
    """What tensor-parallel blocks exchange between ranks; they need all of them, under any transport."""

    @property
    def collectives(self) -> tuple[Communicator, ...]:
        """What collective ops of `ops` count by index, after those of the transport."""

    def ops(self, op: ActOp, place: ActPlace, stream: int) -> list[BoundOp]:
        """The lowered `op` (a sum is compute, and none of these) as ops for `_core.OpList`.

        Order:   on the list's stream `stream`; all ranks' lists have the same ones in the same order, each block whole.
        Blocks:  the stream until all ranks have come to it; never the host.
        Capture: yes.
        """

    def alignment(
        self, gathers: Alignment, control: ControlTable, timeout_s: float, shapes: Sequence[str]
    ) -> Alignment:
        """How ranks are kept together: in steps of `shapes` all of them, else as `gathers` has it."""

    def watch(self, is_idle: Callable[[], bool]) -> None:
        """`is_idle` says whether nothing that this rank enqueued waits any more."""

    def close(self) -> None:
        """Give windows back. Local, bounded, idempotent; graphs over them must be gone."""


class Remappable(Protocol):
    """Windows of ranks that come back, see `comm.rejoin`."""

    def remap(self, rank: int, fd: int) -> None:
        """Map the shard window of a rank that came back; `fd` stays the caller's. Bind and capture again after it."""

    def undo_remap(self, rank: int) -> None:
        """Go back to the mapping before the last `remap`."""

    def drop_retired(self) -> None:
        """Give up the mappings that `remap` replaced."""


class Transport(Protocol):
    """Gathers over windows that all ranks registered. Used with the runtime's lock held."""

    @property
    def name(self) -> str:
        """As plans say it: `pull`, `nccl`."""

    @property
    def world_size(self) -> int:
        """The ranks whose chunks make up a unit."""

    @property
    def is_collective(self) -> bool:
        """Whether a gather needs all ranks: they issue the same ones in the same order, eagerly or captured alike."""

    @property
    def num_copies(self) -> int:
        """The copies that `lower` counts for a gather: one a rank, of however many pieces; or one for all."""

    @property
    def collectives(self) -> tuple[Communicator, ...]:
        """What collective ops of `gather_ops` count by index."""

    @property
    def remappable(self) -> Remappable | None:
        """How ranks that come back are taken in; None if they are not."""

    @property
    def must_exit(self) -> str | None:
        """Why this process can be rid of what the transport holds only by its end; None if it need not end."""

    def gather_ops(self, unit: int, slot_address: int, stream: int, begin: int, end: int) -> list[BoundOp]:
        """Copies `begin` to `end` of the gather of `unit` into the slot at `slot_address`, as ops for `_core.OpList`.

        Order:   on the list's stream `stream`; the slot's gate is before them.
        Blocks:  the stream until this rank's slot holds the bytes; never the host.
        Capture: yes.
        """

    def verify_unit(self, unit: int, slot_view: memoryview, rank: int | None = None) -> None:
        """Compare a gathered unit, or only `rank`'s chunk of it, with what its owners loaded.

        Raises:
            CommError: naming this rank, the source ranks whose chunks differ, and the unit.
        """

    def adopt_checksums(self, checksums: ChunkChecksums) -> None:
        """All ranks' chunks were written anew: compare with `checksums` from now on."""

    def generations(self) -> tuple[int, ...]:
        """Numbers that change when a window is mapped anew; what was bound before may not be used then."""

    def alignment(self, control: ControlTable, timeout_s: float) -> Alignment:
        """How steps of this transport keep ranks together, and how long they wait."""

    def close(self) -> None:
        """Give the windows back. Local, bounded, idempotent; graphs over them must be gone."""


class TransportOpening(Protocol):
    """A transport before memory is reserved. Made locally; `start` and `connect` are collective."""

    @property
    def settings(self) -> Mapping[str, str]:
        """What must be alike on all ranks, for the certificate."""

    @property
    def why_no_rejoin(self) -> str | None:
        """Why ranks that died cannot come back; None if they can."""

    def start(self) -> None:
        """Do what must be done before memory is reserved, when certificates are known to be alike (collective)."""

    def allocate(self, use: WindowUse, num_bytes: int) -> Memory:
        """Zeroed memory for this rank's chunks or slots."""

    def connect(
        self,
        layout: Layout,
        shards: Memory | None,
        slots: Memory | None,
        checksums: Sequence[int],
        peers: Sequence[RankRecord] | None = None,
    ) -> Transport:
        """The transport over the memory that `allocate` gave, filled by now; it owns what the opening had (collective).

        Args:
            layout: where chunks and units lie.
            shards: this rank's chunks; None if nothing is sharded.
            slots: where units are gathered.
            checksums: the checksum of this rank's chunk, by unit.
            peers: what each rank shows, where a living one has told it to this one, which came back.
        """

    def open_activations(
        self, transport: Transport, staging: Memory, places: Sequence[ActPlace], timeout_s: float
    ) -> Activations:
        """What blocks exchange tokens and partial sums by (collective), beside the `transport` that `connect` gave.

        Args:
            transport: the weights'.
            staging: where `tp.tokens` and `tp.partial` lie, at equal offsets on all ranks; exportable.
            places: of all blocks at all step shapes.
            timeout_s: the longest that this rank waits for the others.
        """

    def close(self) -> None:
        """Give back what was opened, unless `connect` took it. Local, bounded, idempotent."""
