"""All shard files of a folder, read as units or weights: piece by piece, each chunk verified at its last byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from graphshard.comm.checksums import Checksum
from graphshard.core.layout import UnitLayout, chunk_pieces
from graphshard.load.shard_file import ShardFile
from graphshard.load.shard_manifest import ShardManifest, read_manifest

PIECE_BYTES = 4 * 2**20
"""What is in memory at once."""


class ShardReader:
    """The files of every rank, open. A context manager."""

    def __init__(self, folder: Path, on_bytes: Callable[[int], None]) -> None:
        """Open every file in `folder` that its manifest names; `on_bytes` is told of each piece that was read.

        Raises:
            LoadError: the manifest or a file is missing or not what was written.
        """
        self.folder = folder
        self.manifest: ShardManifest = read_manifest(folder)
        self.num_bytes_read = 0
        self._on_bytes = on_bytes
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._files: list[ShardFile] = []
        try:
            for rank in range(self.manifest.world_size):
                self._files.append(ShardFile(folder, self.manifest, rank))
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """What `unit` of every unit and `resident` read together."""
        layout = self.manifest.layout
        return layout.world_size * layout.shard_bytes + sum(view.num_bytes for view in layout.resident)

    def unit(self, unit: int) -> Iterator[tuple[int, memoryview]]:
        """Pieces of the whole unit `unit`: where each begins, and its bytes until the next is asked.

        In order and with the padding; of a sliced unit rank by rank, in order for each weight, without it.

        Raises:
            LoadError: a chunk is corrupt; said when its end is reached, so use nothing before the iteration has ended.
        """
        layout = self.manifest.layout.units[unit]
        for rank, file in enumerate(self._files):
            checksum = Checksum()
            for begin, piece in self._pieces(file, "shards", layout.chunk_offset, layout.chunk_bytes, checksum):
                if layout.is_sliced:
                    yield from _of_slices(layout, rank, begin, piece)
                else:
                    yield rank * layout.chunk_bytes + begin, piece
            file.check_chunk(unit, checksum.value)

    def read_again(self, unit: int, weight: str, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes `[begin, end)` of `weight` of `unit`, in order, each piece until the next is asked.

        Nothing is verified, and nobody is told: whoever asks has had the whole unit before.
        """
        layout = self.manifest.layout.units[unit]
        for rank, file in enumerate(self._files):
            for name, weight_begin, weight_end, chunk_offset in chunk_pieces(layout, rank):
                first, last = max(begin, weight_begin), min(end, weight_end)
                if name != weight:
                    continue
                for at in range(first, last, PIECE_BYTES):
                    piece = self._buffer[: min(PIECE_BYTES, last - at)]
                    file.read_into("shards", layout.chunk_offset + chunk_offset + at - weight_begin, piece)
                    yield piece

    def resident(self, index: int) -> Iterator[tuple[int, memoryview]]:
        """Pieces of the resident weight `index` of the layout, as `unit` has them; ranks hold equal ones."""
        view = self.manifest.layout.resident[index]
        checksum = Checksum()
        yield from self._pieces(self._files[0], "resident", view.offset, view.num_bytes, checksum)
        self._files[0].check_resident(index, checksum.value)

    def check_unchanged(self) -> None:
        """LoadError if a file was replaced or written to since it was opened."""
        for file in self._files:
            file.check_unchanged()

    def close(self) -> None:
        """Close all files. Idempotent."""
        for file in self._files:
            file.close()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pieces(
        self, file: ShardFile, area: str, offset: int, num_bytes: int, checksum: Checksum
    ) -> Iterator[tuple[int, memoryview]]:
        for begin in range(0, num_bytes, PIECE_BYTES):
            piece = self._buffer[: min(PIECE_BYTES, num_bytes - begin)]
            file.read_into(area, offset + begin, piece)
            checksum.update(piece)
            self.num_bytes_read += len(piece)
            self._on_bytes(len(piece))
            yield begin, piece


def _of_slices(layout: UnitLayout, rank: int, begin: int, piece: memoryview) -> Iterator[tuple[int, memoryview]]:
    """The parts of `piece`, bytes from `begin` on of `rank`'s chunk, that are weights, by their places in the unit."""
    for view, one in zip(layout.views, layout.slices, strict=True):
        first, last = max(begin, one.offset), min(begin + len(piece), one.offset + one.num_bytes)
        if first < last:
            yield view.offset + rank * one.num_bytes + first - one.offset, piece[first - begin : last - begin]
