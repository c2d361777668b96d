"""The most memory that ranks held at one time, all of them together: PSS sampled at times that they share."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from graphshard.bench.memory import Pss, read_pss

INTERVAL_S = 0.05


class SampledMemory:
    """A context manager: samples anonymous and shared memory at every multiple of 50 ms of the machine's clock.

    `samples` holds bytes by the number of the multiple; processes of one machine have the same clock.
    """

    def __init__(self) -> None:
        self.samples: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="graphshard-samples", daemon=True)

    def __enter__(self) -> SampledMemory:
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._take()

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL_S - time.monotonic() % INTERVAL_S):
            self._take()

    def _take(self) -> None:
        at = int(time.monotonic() / INTERVAL_S)
        self.samples[at] = max(self.samples.get(at, 0), held_bytes(read_pss()))


def held_bytes(pss: Pss) -> int:
    """Private and shared memory, without pages of files, which the kernel can drop."""
    return pss.anon_bytes + pss.shmem_bytes


def highest_sum(by_rank: Sequence[Mapping[int, int]]) -> int:
    """The highest sum over ranks at one time, from each rank's samples by time.

    A rank without a sample at some time counts with the larger of its two next ones: the sum is rather too high.
    """
    times = sorted({at for samples in by_rank for at in samples})
    return max((sum(_at(samples, at) for samples in by_rank) for at in times), default=0)


def _at(samples: Mapping[int, int], at: int) -> int:
    before = max((one for one in samples if one <= at), default=None)
    after = min((one for one in samples if one >= at), default=None)
    return max((samples[one] for one in (before, after) if one is not None), default=0)
