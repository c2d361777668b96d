"""What a load is compared with: as many bytes of the same files, read by nothing but `preadv`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

READ_BYTES = 4 * 2**20
"""At most so much with one call."""


@dataclass(frozen=True)
class Share:
    """Rank `rank`'s equal share of the bytes of all files end to end, read by `num_threads` threads."""

    paths: Sequence[Path]
    rank: int
    world_size: int
    num_threads: int

    def read(self, fresh: Callable[[int], memoryview]) -> memoryview:
        """Read it into `fresh(num_bytes)`, which holds it."""
        sizes = [path.stat().st_size for path in self.paths]
        begin, end = _share(sum(sizes), self.rank, self.world_size)
        held = fresh(end - begin)

        def read(thread: int) -> None:
            first, last = _share(end - begin, thread, self.num_threads)
            for path, at, file_at, num_bytes in _pieces(self.paths, sizes, begin + first, begin + last):
                _read(path, file_at, held[at - begin : at - begin + num_bytes])

        self._run(read)
        return held

    def read_again(self) -> None:
        """Read it, each thread into one buffer over and over: what the page cache gives where nothing is kept."""
        sizes = [path.stat().st_size for path in self.paths]
        begin, end = _share(sum(sizes), self.rank, self.world_size)

        def read(thread: int) -> None:
            buffer = private_memory(READ_BYTES)
            first, last = _share(end - begin, thread, self.num_threads)
            for path, _, file_at, num_bytes in _pieces(self.paths, sizes, begin + first, begin + last):
                _read(path, file_at, buffer[:num_bytes])

        self._run(read)

    def _run(self, read: Callable[[int], None]) -> None:
        with ThreadPoolExecutor(self.num_threads) as pool:
            list(pool.map(read, range(self.num_threads)))


def private_memory(num_bytes: int) -> memoryview:
    """Memory that no other process can map, of the system's ordinary pages; one is made when it is written to."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _share(total: int, index: int, count: int) -> tuple[int, int]:
    return total * index // count, total * (index + 1) // count


def _pieces(paths: Sequence[Path], sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[Path, int, int, int]]:
    """Bytes [begin, end) of all files end to end: (file, where, where in the file, how many) of each read."""
    start = 0
    for path, size in zip(paths, sizes, strict=True):
        for at in range(max(begin, start), min(end, start + size), READ_BYTES):
            yield path, at, at - start, min(READ_BYTES, min(end, start + size) - at)
        start += size


def _read(path: Path, begin: int, out: memoryview) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        done = 0
        while done < len(out):
            num_read = os.preadv(file, [out[done:]], begin + done)
            assert num_read, f"{path} ends at {begin + done}"
            done += num_read
    finally:
        os.close(file)
