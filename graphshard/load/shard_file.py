"""A rank's shard file: its whole shard window and its resident weights, as two tensors of bytes.

A safetensors file with the tensors `shards` (uint8, the bytes of `Layout.shard_bytes`) and `resident` (uint8,
`Layout.resident_bytes`), so a rank loads by one read of each. The first starts at a multiple of 4096 bytes. Its
metadata says whose it is, see `ShardManifest.metadata`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from graphshard.core.errors import LoadError
from graphshard.core.layout import Layout
from graphshard.core.specs import WeightSpec
from graphshard.load.atomic_file import AtomicFile
from graphshard.load.safetensors_file import SafetensorsFile
from graphshard.load.shard_manifest import AGAIN, ShardManifest
from graphshard.load.writer import safetensors_header

DATA_ALIGNMENT_BYTES = 4096


class ShardFileWriter:
    """A shard file on its way. What is never written is zero, as padding is. A context manager: discards if not ended.

    Checksums are known when the bytes have been seen, so the header is written last.
    """

    def __init__(self, folder: Path, manifest: ShardManifest, rank: int) -> None:
        """Begin rank `rank`'s file of `manifest`, whose checksums may be missing yet.

        Raises:
            DeviceError: it cannot be written.
        """
        self.rank = rank
        layout = manifest.layout
        self._path = folder / manifest.file_name(rank)
        begin = len(self._header(manifest))
        self._begins = {"shards": begin, "resident": begin + layout.shard_bytes}
        self.num_bytes = begin + layout.shard_bytes + layout.resident_bytes
        self._file = AtomicFile(self._path, self.num_bytes)

    def write(self, area: str, begin: int, data: bytes | bytearray | memoryview) -> None:
        """Write `data` from byte `begin` of `area` on: `shards` or `resident`."""
        self._file.write(self._begins[area] + begin, data)

    def sync(self) -> None:
        """Wait until the disk has what was written so far."""
        self._file.sync()

    def end(self, manifest: ShardManifest) -> Path:
        """Write the header of `manifest`, which has all checksums, and give the file its name there."""
        header = self._header(manifest)
        assert len(header) == self._begins["shards"], f"{len(header)} bytes of header, not {self._begins['shards']}"
        self._file.write(0, header)
        return self._file.commit(manifest.file_name(self.rank))

    def discard(self) -> None:
        """Forget the file, unless it has ended. Idempotent."""
        self._file.discard()

    def __enter__(self) -> ShardFileWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.discard()

    def _header(self, manifest: ShardManifest) -> bytes:
        specs = [WeightSpec(name, (size,), "uint8") for name, size in _areas(manifest.layout).items()]
        return safetensors_header(self._path, specs, manifest.metadata(self.rank), DATA_ALIGNMENT_BYTES)


class ShardFile:
    """Rank `rank`'s file of a manifest, open, and known by its header to be that. Bytes are judged by `check_...`."""

    def __init__(self, folder: Path, manifest: ShardManifest, rank: int) -> None:
        """Open the file that the manifest names.

        Raises:
            LoadError: it is missing, truncated, another rank's, of another save or epoch, or not whole.
        """
        self.manifest, self.rank = manifest, rank
        self.path = folder / manifest.file_name(rank)
        if not os.path.lexists(self.path):
            raise LoadError(_missing(folder, self.path.name, rank))
        try:
            self._file = SafetensorsFile(self.path)
        except LoadError as error:
            raise LoadError(f"the shard file of rank {rank} is not whole: {error}. For shard files: {AGAIN}") from None
        try:
            self._check_metadata(self._file.metadata)
            self._check_tensors()
        except BaseException:
            self.close()
            raise

    def read_into(self, area: str, begin: int, out: memoryview) -> None:
        """Write bytes `[begin, begin + len(out))` of `area` into `out`.

        Raises:
            LoadError: the file was cut short, or cannot be read.
        """
        self._file.read_into(self._file.entries[area].begin + begin, out)

    def check_chunk(self, unit: int, checksum: int) -> None:
        """LoadError unless `checksum` is that of this rank's chunk of `unit`."""
        expected = self.manifest.chunks[self.rank][unit]
        if checksum != expected:
            name = self.manifest.units[unit].name
            raise self._unlike(f"this rank's chunk of unit {unit} ({name})", checksum, expected)

    def check_resident(self, index: int, checksum: int) -> None:
        """LoadError unless `checksum` is that of the resident weight `index`."""
        expected = self.manifest.resident[index]
        if checksum != expected:
            name = self.manifest.layout.resident[index].weight
            raise self._unlike(f"resident weight {name}", checksum, expected)

    def check_unchanged(self) -> None:
        """LoadError if the file was replaced or written to since it was opened."""
        self._file.identity()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        self._file.close()

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _unlike(self, what: str, found: int, expected: int) -> LoadError:
        return LoadError(
            f"{self.path} is corrupt: {what} has checksum {found:016x} instead of {expected:016x}; {AGAIN}"
        )

    def _check_metadata(self, found: Mapping[str, str]) -> None:
        expected = self.manifest.metadata(self.rank)
        unlike = [key for key in expected if found.get(key) != expected[key]]
        if not unlike:
            return
        if "format" in unlike:
            formats = f"its format is {found.get('format')!r}, not {expected['format']}"
            raise LoadError(f"{self.path} is no shard file: {formats}; {AGAIN}")
        if found.get("manifest") == expected["manifest"] and found.get("rank") != expected["rank"]:
            raise LoadError(
                f"{self.path} holds the chunks of rank {found.get('rank')}, not those of rank {expected['rank']}: "
                f"files were renamed, swapped or copied over one another; {AGAIN}"
            )
        said = ", ".join(f"{key} {_short(found.get(key))} instead of {_short(expected[key])}" for key in unlike)
        raise LoadError(f"{self.path} is a file of another save than {self.path.parent}'s: {said}; {AGAIN}")

    def _check_tensors(self) -> None:
        found = {name: (entry.dtype, entry.shape) for name, entry in self._file.entries.items()}
        expected = {name: ("uint8", (size,)) for name, size in _areas(self.manifest.layout).items()}
        if found != expected:
            raise LoadError(f"{self.path} holds {found}, its layout asks for {expected}; {AGAIN}")


def _areas(layout: Layout) -> dict[str, int]:
    """Bytes by tensor, in the order of the file."""
    return {"shards": layout.shard_bytes, "resident": layout.resident_bytes}


def _missing(folder: Path, name: str, rank: int) -> str:
    found: Iterable[Path] = folder.glob("shard-*.safetensors")
    names: Sequence[str] = sorted(path.name for path in found)
    there = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "no shard file at all"
    return f"the shard file of rank {rank} is missing: {folder} has no {name}, but {there}; {AGAIN}"


def _short(value: str | None) -> str:
    """Digests and lists of checksums by their first characters."""
    return "nothing" if value is None else value[:12]
