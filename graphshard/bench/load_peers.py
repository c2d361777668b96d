"""What a load is compared with: as many bytes of the same files, read by nothing but `preadv`."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READ_BYTES = 4 * 2**20
"""At most so much with one call."""


def read_share(paths: Sequence[Path], rank: int, world_size: int, num_threads: int) -> memoryview:
    """Rank `rank`'s equal share of the files' bytes, read by `num_threads` threads into fresh memory that holds them.

    The memory is anonymous and private, of the system's ordinary pages; one is made when bytes are read into it.
    """
    sizes = [path.stat().st_size for path in paths]
    begin, end = _share(sum(sizes), rank, world_size)
    held = _fresh(end - begin)

    def read(thread: int) -> None:
        first, last = _share(end - begin, thread, num_threads)
        for path, at, file_at, num_bytes in _pieces(paths, sizes, begin + first, begin + last):
            _read(path, file_at, held[at - begin : at - begin + num_bytes])

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(num_threads)))
    return held


def read_again(paths: Sequence[Path], rank: int, world_size: int, num_threads: int) -> None:
    """The same reads, each thread's into one buffer over and over: what the page cache gives where nothing is kept."""
    sizes = [path.stat().st_size for path in paths]
    begin, end = _share(sum(sizes), rank, world_size)

    def read(thread: int) -> None:
        buffer = _fresh(READ_BYTES)
        first, last = _share(end - begin, thread, num_threads)
        for path, _, file_at, num_bytes in _pieces(paths, sizes, begin + first, begin + last):
            _read(path, file_at, buffer[:num_bytes])

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read, range(num_threads)))


def _share(total: int, index: int, count: int) -> tuple[int, int]:
    return total * index // count, total * (index + 1) // count


def _fresh(num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


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
