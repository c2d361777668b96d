"""One safetensors file: a validated header, and every tensor's bytes by ranges.

Format: 8 bytes of header length (little endian), a JSON header of at most 100 MB, then the tensors' bytes. Offsets in
the header count from the end of the header.
"""

from __future__ import annotations

import json
import os
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from graphshard.core.errors import LoadError
from graphshard.load.store import TensorEntry

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
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}
"""The format's names for dtypes, and torch's."""


UNREADABLE_DTYPES = {"F6_E2M3": 6, "F6_E3M2": 6}
"""The format's dtypes that torch has none for, and the bits of one element."""

_PACKED_PAIRS = "F4"
"""Two values a byte: the header counts values, torch's `float4_e2m1fn_x2` counts bytes."""


@dataclass(frozen=True, slots=True)
class FileTensor(TensorEntry):
    """A tensor in a file, whose bytes begin at `begin`, counted from the start of the file."""

    begin: int = 0

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.begin + self.num_bytes


class SafetensorsFile:
    """An open file whose header has been checked against its size: every tensor lies inside it, and no two overlap.

    Bytes are read when they are asked for, never mapped: a file that is cut short meanwhile is an error, not a signal.
    """

    def __init__(self, path: Path) -> None:
        """Open `path` and check its header.

        Raises:
            LoadError: the file cannot be read, is truncated, or its header is not what the format asks for.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {error.strerror}") from None
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise LoadError(f"{path} cannot be read: it is {kind_of(found)}, not a file; give a safetensors file")
            self._opened = _state_of(found)
            self.metadata, self.entries = _read_header(path, self._fd, self._opened.num_bytes)
        except OSError as error:
            self.close()
            raise LoadError(f"{path} cannot be read: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def read_into(self, begin: int, out: memoryview) -> None:
        """Write the file's bytes `[begin, begin + len(out))` into `out`. Any number of threads may read at once.

        Raises:
            LoadError: the file is shorter than when it was opened, or cannot be read.
        """
        if not self._finalizer.alive:
            raise LoadError(f"{self.path} is closed: open the checkpoint again")
        done = 0
        try:
            while done < len(out):
                num_read = os.preadv(self._fd, [out[done:]], begin + done)
                if not num_read:
                    raise LoadError(
                        f"{self.path} was truncated after it was opened: it had {self._opened.num_bytes} bytes, now "
                        f"none at {begin + done}; load again when nobody writes it"
                    )
                done += num_read
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read at byte {begin + done}: {error.strerror}") from None

    def identity(self) -> str:
        """Device, inode, size and time of change: equal for the very same file.

        Raises:
            LoadError: what lies at `path` now is not the file that was opened, or was written to since.
        """
        opened = self._opened
        try:
            now = _state_of(os.stat(self.path))
        except OSError as error:
            raise LoadError(f"{self.path} is gone since it was opened ({error.strerror}): load again") from None
        if now != opened:
            which = "replaced by another file" if now.inode != opened.inode else "written to"
            raise LoadError(
                f"{self.path} was {which} since it was opened ({opened.num_bytes} bytes then, {now.num_bytes} now): "
                "what was read of it may be a mixture; load again when nobody writes it"
            )
        return f"{opened.device}:{opened.inode}:{opened.num_bytes}:{opened.modified_ns}"

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        self._finalizer()


class _State(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int


def _state_of(found: os.stat_result) -> _State:
    return _State(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def kind_of(found: os.stat_result) -> str:
    """What lies there that is no regular file."""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((text for is_kind, text in kinds if is_kind(found.st_mode)), "a device")


def _read_header(path: Path, fd: int, file_bytes: int) -> tuple[dict[str, str], dict[str, FileTensor]]:
    """Metadata, and entries by name."""
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise LoadError(
            f"{path} is truncated: {file_bytes} bytes, a safetensors file has at least 8; download it again"
        )
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise LoadError(
            f"{path} is not a safetensors file: it would have a header of {header_bytes} bytes; give another file, or "
            "download it again"
        )
    if 8 + header_bytes > file_bytes:
        raise _truncated(path, 8 + header_bytes, file_bytes)
    try:
        header = json.loads(os.pread(fd, header_bytes, 8).decode(), object_pairs_hook=unique_pairs)
    except ValueError as error:  # UnicodeDecodeError too
        raise LoadError(f"{path}: its header is not valid JSON ({error})") from None
    except RecursionError:
        raise LoadError(f"{path}: its header is nested deeper than any of this format's; download it again") from None
    if not isinstance(header, dict):
        raise LoadError(f"{path}: its header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise LoadError(f"{path}: its __metadata__ is no JSON object of texts; write the file again without it")
    data = 8 + header_bytes
    entries = {name: _entry(path, name, fields, data) for name, fields in header.items()}
    _check_ranges(path, sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)), data, file_bytes)
    return metadata, entries


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object's pairs; ValueError if a name stands there twice."""
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} stands there twice")
    return dict(pairs)


def _entry(path: Path, name: str, fields: Any, data: int) -> FileTensor:
    """The checked entry `fields` of the header, shifted to count from the start of the file."""
    where = f"{path}: tensor {name}"
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise LoadError(f"{where} lacks one of dtype, shape, data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if isinstance(dtype, str) and dtype in UNREADABLE_DTYPES:
        raise LoadError(
            f"{where} has dtype {dtype}, {UNREADABLE_DTYPES[dtype]} bits an element, for which torch has no dtype: "
            "store its bytes as U8"
        )
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        raise LoadError(f"{where} has dtype {dtype!r}; known are {', '.join(TORCH_DTYPES)}")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise LoadError(f"{where} has shape {shape} and data_offsets {offsets}")
    begin, end = offsets
    stored = tuple(shape)
    if dtype == _PACKED_PAIRS:
        if not shape or shape[-1] % 2:
            raise LoadError(f"{where} is {dtype}{shape}, two values a byte: its last dimension must be even")
        stored = (*shape[:-1], shape[-1] // 2)
    entry = FileTensor(name, TORCH_DTYPES[dtype], stored, None, data + begin)
    if end - begin != entry.num_bytes:
        raise LoadError(f"{where} is {dtype}{shape}, {entry.num_bytes} bytes, but its data_offsets span {end - begin}")
    return entry


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _check_ranges(path: Path, entries: list[FileTensor], data: int, file_bytes: int) -> None:
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
