"""Resharding: a folder of shard files for N ranks made into one for M ranks, offline, a few MiB at a time.

A unit's bytes in a slot do not depend on the number of ranks, but for the padding at its end. So each unit is read
from the N chunks in order, and written as M chunks in order; checksums of both are taken on the way.

Where ranks keep slices on either side the two orders differ: such a unit is read twice, once to verify it, and once in
the order in which it is written. A block that cannot be sliced over M ranks becomes a flat unit, and back.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from graphshard.comm.checksums import Checksum
from graphshard.core.errors import SpecError
from graphshard.core.layout import UnitLayout, chunk_pieces
from graphshard.load.shard_file import ShardFileWriter
from graphshard.load.shard_folder import commit_manifest, open_folder, remove_strays
from graphshard.load.shard_manifest import MANIFEST_NAME, ShardManifest
from graphshard.load.shard_reader import ShardReader

_ZEROS = bytes(2**20)


def reshard_command(folder: Path, world_size: int) -> str:
    """The command line that makes shard files for `world_size` ranks of those in `folder`."""
    target = folder.with_name(f"{folder.name}-{world_size}-ranks")
    return f"graphshard reshard {shlex.quote(str(folder))} {shlex.quote(str(target))} --world-size {world_size}"


def reshard(reader: ShardReader, target: Path, world_size: int) -> ShardManifest:
    """Write the shards of `reader` to the folder `target`, for `world_size` ranks with the same units.

    Returns their manifest, which is written last: `target` holds all of them, or what is no set of shard files.

    Raises:
        SpecError: `target` holds shard files already, or `world_size` is no number of ranks.
        LoadError: a file of the source is corrupt.
        DeviceError: the target cannot be written.
    """
    if world_size < 1:
        raise SpecError(f"world_size is {world_size}: shard files are for at least one rank")
    open_folder(target)
    if (target / MANIFEST_NAME).exists():
        raise SpecError(f"{target} holds shard files already, and would lose them: give a new folder")
    bare = reader.manifest.over(world_size)
    try:
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(ShardFileWriter(target, bare, rank)) for rank in range(world_size)]
            by_unit = [_reshard_unit(reader, unit, writers) for unit in bare.layout.units]
            for index, view in enumerate(bare.layout.resident):
                for begin, piece in reader.resident(index):
                    for writer in writers:
                        writer.write("resident", view.offset + begin, piece)
            chunks = tuple(tuple(checksums[rank] for checksums in by_unit) for rank in range(world_size))
            result = replace(bare, chunks=chunks)
            for writer in writers:
                writer.end(result)
        commit_manifest(target, result)
    finally:
        remove_strays(target)
    return result


def _reshard_unit(reader: ShardReader, unit: UnitLayout, writers: Sequence[ShardFileWriter]) -> list[int]:
    """Write one unit's chunks; their checksums by rank."""
    if unit.is_sliced or reader.manifest.layout.units[unit.unit].is_sliced:
        for _ in reader.unit(unit.unit):
            pass
        checksums = [_write_chunk(reader, unit, rank, writer) for rank, writer in enumerate(writers)]
        reader.check_unchanged()  # what was read now is what was verified
        return checksums
    sink = _Chunks(unit, lambda rank, begin, data: writers[rank].write("shards", unit.chunk_offset + begin, data))
    for begin, piece in reader.unit(unit.unit):
        sink.add(piece[: max(0, unit.num_bytes - begin)])  # for fewer ranks there may be less padding
    sink.fill()
    return sink.checksums


def _write_chunk(reader: ShardReader, unit: UnitLayout, rank: int, writer: ShardFileWriter) -> int:
    """Write `rank`'s chunk from its weights' bytes; its checksum."""
    checksum, end = Checksum(), 0

    def write(data: memoryview) -> None:
        nonlocal end
        writer.write("shards", unit.chunk_offset + end, data)
        checksum.update(data)
        end += len(data)

    def fill(until: int) -> None:
        while end < until:
            write(memoryview(_ZEROS)[: until - end])

    for piece in chunk_pieces(unit, rank):
        fill(piece.chunk_offset)
        for data in reader.read_again(unit.unit, piece.weight, piece.weight_begin, piece.weight_end):
            write(data)
    fill(unit.chunk_bytes)
    return checksum.value


class _Chunks:
    """A unit's bytes, given in order, cut into the chunks of its ranks."""

    def __init__(self, unit: UnitLayout, write: Callable[[int, int, memoryview], None]) -> None:
        self.checksums: list[int] = []
        self._unit, self._write = unit, write
        self._end = 0  # of what was given
        self._checksum = Checksum()

    def add(self, data: memoryview) -> None:
        """The next bytes."""
        size = self._unit.chunk_bytes
        while len(data):
            rank, begin = divmod(self._end, size)
            part = data[: size - begin]
            self._write(rank, begin, part)
            self._checksum.update(part)
            self._end, data = self._end + len(part), data[len(part) :]
            if self._end % size == 0:
                self.checksums.append(self._checksum.value)
                self._checksum = Checksum()

    def fill(self) -> None:
        """Zeros up to the end."""
        while self._end < self._unit.num_bytes:
            self.add(memoryview(_ZEROS)[: self._unit.num_bytes - self._end])
