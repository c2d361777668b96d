"""Before/after census: descriptors, threads, child processes and /dev/shm entries of this process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Census:
    """What this process holds. Descriptors count by what they point at: their numbers are reused."""

    fds: Counter[str]
    threads: Counter[str]
    children: Counter[str]
    shared_memory: Counter[str]

    @staticmethod
    def take() -> Census:
        gc.collect()
        return Census(_fds(), _threads(), Counter(map(str, child_pids())), _shared_memory())

    def growth(self, earlier: Census) -> str:
        """What is here and was not in `earlier`, by kind; empty if nothing."""
        parts = []
        for kind in ("fds", "threads", "children", "shared_memory"):
            more = getattr(self, kind) - getattr(earlier, kind)
            if more:
                parts.append(f"{kind}: {dict(more)}")
        return "; ".join(parts)


@contextlib.contextmanager
def no_growth(settle_s: float = 5.0) -> Iterator[None]:
    """Fail if the block leaves anything behind. What is on its way out (a thread, a zombie) may take `settle_s`."""
    before = Census.take()
    yield
    deadline = time.monotonic() + settle_s
    while grown := Census.take().growth(before):
        if time.monotonic() > deadline:
            raise AssertionError(f"left behind: {grown}")
        time.sleep(0.01)


def child_pids(pid: int | None = None) -> list[int]:
    """The children of `pid` (default: this process), zombies included."""
    children = []
    for task in Path(f"/proc/{pid or os.getpid()}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            children += [int(child) for child in (task / "children").read_text().split()]
    return children


def _fds() -> Counter[str]:
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if not target.startswith("/proc/"):  # the listing itself
                found[target.split(":[")[0]] += 1
    return found


def _threads() -> Counter[str]:
    native = len(os.listdir("/proc/self/task"))
    named = Counter(thread.name for thread in threading.enumerate())
    named["(not Python's)"] = native - sum(named.values())
    return named


def _shared_memory() -> Counter[str]:
    return Counter(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else Counter()


def open_files(folder: Path) -> list[str]:
    """The files below `folder` that this process has open, once for each descriptor."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(path for path in found if path.startswith(f"{folder}/"))
