"""One safetensors file: a validated header, and every tensor's bytes as a view of the mapped file.

Format: 8 bytes of header length (little endian), a JSON header of at most 100 MB, then the tensors' bytes. Offsets in
the header count from the end of the header. Nothing is copied; pages are read when they are touched.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.core.errors import LoadError, SpecError
from graphshard.core.sizes import num_bytes

MAX_HEADER_BYTES = 100_000_000

TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""The format's names for dtypes, and torch's."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: bytes `[begin, end)` counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A file whose header has been checked against its size: every entry lies inside it, and no two overlap."""

    def __init__(self, path: Path) -> None:
        """Read and check the header of `path`.

        Raises:
            LoadError: the file cannot be read, is truncated, or its header is not what the format asks for.
        """
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as file:
                file_bytes = file.seek(0, 2)
                file.seek(0)
                self.metadata, self.entries = _read_header(path, file.read(8), file, file_bytes)
                if file_bytes:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from None

    def read(self, name: str) -> memoryview:
        """The bytes of tensor `name`, read-only, valid as long as it is referred to."""
        entry = self.entries[name]
        assert self._map is not None
        return memoryview(self._map)[entry.begin : entry.end]


def _read_header(
    path: Path, prefix: bytes, file: Any, file_bytes: int
) -> tuple[dict[str, str], dict[str, TensorEntry]]:
    """Metadata, and entries by name."""
    if len(prefix) < 8:
        raise LoadError(
            f"{path} is truncated: {file_bytes} bytes, a safetensors file has at least 8; download it again"
        )
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise LoadError(f"{path} is not a safetensors file: it would have a header of {header_bytes} bytes")
    if 8 + header_bytes > file_bytes:
        raise _truncated(path, 8 + header_bytes, file_bytes)
    try:
        header = json.loads(file.read(header_bytes), object_pairs_hook=_unique_pairs)
    except ValueError as error:  # UnicodeDecodeError too
        raise LoadError(f"{path}: its header is not valid JSON ({error})") from None
    except RecursionError:
        raise LoadError(f"{path}: its header is nested deeper than any of this format's; download it again") from None
    if not isinstance(header, dict):
        raise LoadError(f"{path}: its header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    data = 8 + header_bytes
    entries = {name: _entry(path, name, fields, data) for name, fields in header.items()}
    _check_ranges(path, sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)), data, file_bytes)
    return metadata, entries


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice")
    return dict(pairs)


def _entry(path: Path, name: str, fields: Any, data: int) -> TensorEntry:
    """The checked entry `fields` of the header, shifted to count from the start of the file."""
    where = f"{path}: tensor {name}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise LoadError(f"{where} lacks one of dtype, shape, data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise LoadError(f"{where} has dtype {dtype!r}; known are {', '.join(TORCH_DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise LoadError(f"{where} has shape {shape} and data_offsets {offsets}")
    begin, end = offsets
    try:
        expected = num_bytes(shape, TORCH_DTYPES[dtype], None)
    except SpecError as error:
        raise LoadError(f"{where}: {error}") from None
    if end - begin != expected:
        raise LoadError(f"{where} is {dtype}{shape}, {expected} bytes, but its data_offsets span {end - begin}")
    return TensorEntry(name, TORCH_DTYPES[dtype], tuple(shape), data + begin, data + end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _check_ranges(path: Path, entries: list[TensorEntry], data: int, file_bytes: int) -> None:
    """Entries in order of their bytes: no overlap, no hole, no end beyond the file's, nothing after the last."""
    end = data
    for entry in entries:
        if entry.begin != end:
            what = "overlaps the tensor before it" if entry.begin < end else "is preceded by bytes of no tensor"
            raise LoadError(f"{path}: tensor {entry.name} at byte {entry.begin} {what}, which ends at {end}")
        end = entry.end
    if end > file_bytes:
        raise _truncated(path, end, file_bytes)
    if end < file_bytes:
        raise LoadError(f"{path}: {file_bytes - end} bytes after the last tensor belong to none ({end} expected)")


def _truncated(path: Path, expected: int, found: int) -> LoadError:
    return LoadError(
        f"{path} is truncated by {expected - found} bytes: {found} found, {expected} expected from its header; "
        "download it again"
    )
