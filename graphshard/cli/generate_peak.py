"""The most memory that a process held for a while: the kernel keeps the peak of RSS; that of PSS is sampled."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

from graphshard.bench.memory import read_pss

INTERVAL_S = 0.02


class PeakMemory:
    """A context manager: `rss_bytes` and `pss_bytes` are the peaks inside it, `is_rss_exact` whether from its begin on.

    RSS counts pages that are shared with others in full, PSS its share of them; both count pages of mapped files.
    """

    def __init__(self) -> None:
        self.rss_bytes = 0
        self.pss_bytes = 0
        self.is_rss_exact = _reset_rss_peak()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="graphshard-peak", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.pss_bytes = max(self.pss_bytes, read_pss().total_bytes)
        self.rss_bytes = _rss_peak_bytes()

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self.pss_bytes = max(self.pss_bytes, read_pss().total_bytes)


def _reset_rss_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # a sandbox: the peak then counts from the process's start
        return False
    return True


def _rss_peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
