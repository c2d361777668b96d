"""What ranks loaded, as a checksum a chunk: gathered bytes are compared with it, whatever brought them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.layout import Layout

Bytes = bytes | bytearray | memoryview


def checksum_of(data: Bytes) -> int:
    """The xxh3_64 of `data`: the one checksum of bulk bytes. Threads run meanwhile."""
    return xxhash.xxh3_64_intdigest(data)


class Checksum:
    """The checksum of bytes that come one piece after the other."""

    def __init__(self) -> None:
        self._running = xxhash.xxh3_64()

    def update(self, piece: Bytes) -> None:
        """Take in the next piece."""
        self._running.update(piece)

    @property
    def value(self) -> int:
        """Of all pieces so far, as `checksum_of` has it."""
        return self._running.intdigest()


def checksum_of_pieces(pieces: Iterable[Bytes]) -> int:
    """The checksum of all `pieces` one after the other, each taken as it comes."""
    running = xxhash.xxh3_64()
    for piece in pieces:
        running.update(piece)
    return running.intdigest()


def hash_of_pieces(pieces: Iterable[Bytes]) -> str:
    """The xxh3_128 of all `pieces` one after the other: by it ranks tell whether they hold the same weights."""
    running = xxhash.xxh3_128()
    for piece in pieces:
        running.update(piece)
    return running.hexdigest()


class ChunkChecksums:
    """The checksum of every rank's chunk of every unit."""

    def __init__(self, rank: int, layout: Layout, checksums: Sequence[Sequence[int]]) -> None:
        """`checksums[rank][unit]`, of the bytes that were loaded."""
        self._rank = rank
        self._layout = layout
        self._checksums = checksums

    @property
    def by_rank(self) -> Sequence[Sequence[int]]:
        """`[rank][unit]`."""
        return self._checksums

    @staticmethod
    def exchange(group: Group, layout: Layout, checksums: Sequence[int]) -> ChunkChecksums:
        """From this rank's `checksums`, by unit (collective).

        Raises:
            CommError: a rank has another layout.
        """
        told: list[Any] = group.all_gather([layout.digest, list(checksums)], name="checksums")
        unlike = [rank for rank, (value, _) in enumerate(told) if value[0] != layout.digest]
        if unlike:
            raise CommError(
                f"layouts differ: rank {group.rank} has digest {layout.digest[:12]}, ranks {unlike} have others; "
                "start all ranks with the same model and plan"
            )
        return ChunkChecksums(group.rank, layout, [value[1] for value, _ in told])

    def verify_unit(self, unit: int, slot_view: memoryview, rank: int | None = None) -> None:
        """Compare a gathered unit, or only `rank`'s chunk of it, with what its owners loaded.

        `slot_view` are the slot's bytes, on the host.

        Raises:
            CommError: naming this rank, the source ranks whose chunks differ, and the unit.
        """
        judged = range(len(self._checksums)) if rank is None else (rank,)
        found = {source: checksum_of_pieces(self._rows(unit, source, slot_view)) for source in judged}
        expected = [checksums[unit] for checksums in self._checksums]
        wrong = [source for source in judged if found[source] != expected[source]]
        if wrong:
            pairs = ", ".join(
                f"{found[source]:016x} from rank {source} instead of {expected[source]:016x}" for source in wrong
            )
            raise CommError(
                f"rank {self._rank} gathered other bytes of unit {unit} than their owners loaded: checksum {pairs}; "
                "the shard was changed after load, or the mapping of that rank's memory is not what it exported"
            )

    def _rows(self, unit: int, source_rank: int, slot_view: memoryview) -> Iterable[memoryview]:
        """`source_rank`'s chunk, in its order: where a slot has its pieces, and the zeros between slices."""
        place = self._layout.units[unit]
        end = 0
        for copy in place.copies:
            if copy.source_rank != source_rank:
                continue
            if place.is_sliced:
                begin = copy.source_offset - place.chunk_offset
                yield memoryview(bytes(begin - end))
                end = begin + copy.row_bytes
            for row in range(copy.rows):
                begin = copy.slot_offset + row * copy.slot_pitch
                yield slot_view[begin : begin + copy.row_bytes]
        if place.is_sliced:
            yield memoryview(bytes(place.chunk_bytes - end))
