"""Samples and their summary. Medians with tenth and ninetieth percentiles: spread is part of a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """Of `n` samples, in their own unit."""

    median: float
    p10: float
    p90: float
    n: int

    def text(self, unit: str) -> str:
        """`512 us (p10 509, p90 530, n=50)`, three digits each."""
        return f"{self.median:.3g} {unit} (p10 {self.p10:.3g}, p90 {self.p90:.3g}, n={self.n})"


def summarize(samples: Sequence[float]) -> Summary:
    """The summary of at least one sample."""
    ordered = sorted(samples)
    assert ordered, "no samples"
    return Summary(quantile(ordered, 0.5), quantile(ordered, 0.1), quantile(ordered, 0.9), len(ordered))


def quantile(ordered: Sequence[float], q: float) -> float:
    """The `q` quantile of ascending samples, linear between neighbours."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
