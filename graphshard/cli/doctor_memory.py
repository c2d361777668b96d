"""Windows on this machine, and those whose owner is gone: their memory lives on as long as a peer maps it.

An owner maps its window writable, peers read-only. So a window that nobody maps writable has lost its owner, as far as
this user may look.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WINDOW_NAME = "/memfd:graphshard (deleted)"


@dataclass
class Window:
    """A window: `num_bytes` is the longest mapping of it."""

    inode: int
    num_bytes: int = 0
    owner_pids: list[int] = field(default_factory=list)
    reader_pids: list[int] = field(default_factory=list)
    holder_pids: list[int] = field(default_factory=list)
    """Processes with a descriptor of it, to hand on to ranks that come back."""

    @property
    def is_pinned_by_dead(self) -> bool:
        """Whether its owner is gone, or has closed it."""
        return not self.owner_pids


@dataclass
class WindowScan:
    """What /proc showed. Best effort: other users' processes and other pid namespaces cannot be looked into."""

    windows: list[Window]
    num_processes: int
    num_unreadable: int

    @property
    def pinned(self) -> list[Window]:
        """Windows without an owner."""
        return [window for window in self.windows if window.is_pinned_by_dead]

    @property
    def blind_spots(self) -> str:
        """What this look could not see."""
        hidden = f"{self.num_unreadable} of {self.num_processes} processes may not be looked into; " * bool(
            self.num_unreadable
        )
        return hidden + "other pid namespaces and descriptors on their way between processes are never seen"


def scan_windows(proc: Path = Path("/proc")) -> WindowScan:
    """Look through all processes' maps and descriptors."""
    found: dict[int, Window] = {}
    num_processes = num_unreadable = 0
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        num_processes += 1
        pid = int(folder.name)
        try:
            for inode, num_bytes, is_writable in _mapped(folder):
                window = found.setdefault(inode, Window(inode))
                window.num_bytes = max(window.num_bytes, num_bytes)
                _add(window.owner_pids if is_writable else window.reader_pids, pid)
            for inode, num_bytes in _held(folder):
                window = found.setdefault(inode, Window(inode))
                window.num_bytes = max(window.num_bytes, num_bytes)
                _add(window.holder_pids, pid)
        except PermissionError:
            num_unreadable += 1
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    return WindowScan(sorted(found.values(), key=lambda window: window.inode), num_processes, num_unreadable)


def _add(pids: list[int], pid: int) -> None:
    if pid not in pids:
        pids.append(pid)


def _mapped(folder: Path) -> Iterator[tuple[int, int, bool]]:
    """(inode, bytes, is writable) of each mapping of a window."""
    for line in (folder / "maps").read_text(errors="replace").splitlines():
        if line.endswith(WINDOW_NAME):
            span, access, _, _, inode = line.split()[:5]
            begin, end = (int(border, 16) for border in span.split("-"))
            yield int(inode), end - begin, "w" in access


def _held(folder: Path) -> Iterator[tuple[int, int]]:
    """(inode, bytes) of each window of which the process has a descriptor."""
    for link in (folder / "fd").iterdir():
        try:
            if os.readlink(link) == WINDOW_NAME:
                status = link.stat()
                yield status.st_ino, status.st_size
        except FileNotFoundError:
            continue  # closed meanwhile
