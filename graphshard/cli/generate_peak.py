"""The most memory that a process held for a while: the kernel keeps the peak of RSS; that of PSS is sampled."""

from __future__ import annotations

from pathlib import Path

from graphshard.bench.memory import read_pss
from graphshard.bench.sampling import Sampler

INTERVAL_S = 0.02


class PeakMemory(Sampler):
    """A context manager: `rss_bytes` and `pss_bytes` are the peaks inside it, `is_rss_exact` whether from its begin on.

    RSS counts pages that are shared with others in full, PSS its share of them; both count pages of mapped files.
    """

    def __init__(self) -> None:
        super().__init__(INTERVAL_S)
        self.rss_bytes = self.pss_bytes = 0
        self.is_rss_exact = _reset_rss_peak()

    def take(self) -> None:
        """See Sampler."""
        self.rss_bytes, self.pss_bytes = _rss_peak_bytes(), max(self.pss_bytes, read_pss().total_bytes)


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
