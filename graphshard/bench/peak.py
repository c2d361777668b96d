"""The most memory that ranks held at one time, all of them together, sampled at times that they share.

Summed PSS is exact only where all ranks are looked at in the same instant: while ranks map each other's windows, pages
move from one's share to another's, and on a busy machine the looks are far apart. So shared memory is told by its
file, and each file counts once: what PSS adds up to, whenever the ranks are looked at.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphshard.bench.sampling import Sampler

INTERVAL_S = 0.05
ANONYMOUS = "anonymous"
"""The key of private memory in what a rank holds; others are inodes of shared memory."""
_SHARED = ("/memfd:", "/dev/shm/", "/dev/zero")

Held = Mapping[str, int]
Samples = Mapping[int, Held]


class SampledMemory(Sampler):
    """A context manager: samples this process's memory every 50 ms. Ranks of one machine have the same clock.

    `samples` holds `held_now()` by the number of the clock's multiple.
    """

    def __init__(self) -> None:
        super().__init__(INTERVAL_S)
        self.samples: dict[int, Held] = {}

    def take(self) -> None:
        """See Sampler."""
        at = int(time.monotonic() / INTERVAL_S)
        self.samples[at] = _largest((self.samples.get(at, {}), held_now()))


def held_now() -> dict[str, int]:
    """Bytes in memory of this process: private ones, and those of each file of shared memory that it maps, by inode.

    Pages of ordinary files are left out: the kernel drops them when it needs room.
    """
    held = {ANONYMOUS: 0}
    inode, resident = "", 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):  # an address range: a mapping begins
            inode = rest[3] if len(rest) > 4 and rest[4].startswith(_SHARED) else ""
        elif name == "Rss:":
            resident = int(rest[0]) * 1024
        elif name == "Anonymous:":
            private = int(rest[0]) * 1024
            held[ANONYMOUS] += private
            if inode:
                held[inode] = held.get(inode, 0) + resident - private
    return held


def highest_sum(by_rank: Sequence[Samples]) -> int:
    """The highest sum over ranks at one time, from each rank's samples by time; a file's bytes count once.

    A rank without a sample at some time counts with the larger of its two next ones: the sum is rather too high.
    """
    times = sorted({at for samples in by_rank for at in samples})
    ordered = [sorted(samples) for samples in by_rank]
    return max((_sum(_at(one, o, at) for one, o in zip(by_rank, ordered, strict=True)) for at in times), default=0)


def _sum(held: Iterable[Held]) -> int:
    ranks = list(held)
    files = _largest(ranks)
    return sum(one.get(ANONYMOUS, 0) for one in ranks) + sum(files.values()) - files.get(ANONYMOUS, 0)


def _at(samples: Samples, ordered: Sequence[int], at: int) -> Held:
    after, before = bisect_left(ordered, at), bisect_right(ordered, at) - 1
    return _largest(samples[ordered[i]] for i in {before, after} if 0 <= i < len(ordered))


def _largest(held: Iterable[Held]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in held:
        for key, num_bytes in one.items():
            found[key] = max(found.get(key, 0), num_bytes)
    return found


def samples_of(told: Mapping[Any, Held]) -> Samples:
    """Samples that came as JSON, whose keys are texts."""
    return {int(at): held for at, held in told.items()}
