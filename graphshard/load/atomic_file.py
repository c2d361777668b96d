"""A file that appears under its name whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from graphshard.core.errors import DeviceError
from graphshard.core.sizes import format_bytes

PART_SUFFIX = ".part"


class AtomicFile:
    """Written beside its place under another name, synced, then renamed. A context manager: discards if not committed.

    Every failure of the file system is a DeviceError that names the file, and leaves what was there as it was.
    """

    def __init__(self, path: Path, num_bytes: int = 0) -> None:
        """Begin the file that will be `path`: `num_bytes` zeros, until they are written.

        Raises:
            DeviceError: nothing can be written there.
        """
        self.path = path
        self._part = path.with_name(f"{path.name}.{os.urandom(4).hex()}{PART_SUFFIX}")
        self._fd = -1
        try:
            self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            os.ftruncate(self._fd, num_bytes)
        except OSError as error:
            self.discard()
            raise cannot_write(path, error) from None

    def write(self, begin: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` from byte `begin` on. Threads run meanwhile."""
        rest = memoryview(data).cast("B")
        try:
            while len(rest):
                num_written = os.pwrite(self._fd, rest, begin)
                begin, rest = begin + num_written, rest[num_written:]
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def sync(self) -> None:
        """Wait until the disk has what was written so far."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise cannot_write(self.path, error) from None

    def commit(self, name: str | None = None) -> Path:
        """Sync the file and give it its place, or the `name` that is only known now, in its folder."""
        if name is not None:
            self.path = self.path.with_name(name)
        try:
            os.fsync(self._fd)
            self._close()
            os.replace(self._part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        return self.path

    def discard(self) -> None:
        """Forget what was written, unless it was committed. Idempotent."""
        self._close()
        self._part.unlink(missing_ok=True)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` as lasting as the files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cannot_write(path: Path, error: OSError) -> DeviceError:
    """What to raise where the file system refused: with the room that is left."""
    room = ""
    if path.parent.is_dir():
        stat = os.statvfs(path.parent)
        room = f" ({format_bytes(stat.f_bavail * stat.f_frsize)} are free there)"
    return DeviceError(
        f"{path} cannot be written: {error.strerror or error}{room}; what was there before is as it was. "
        "Make room, or give another folder"
    )
