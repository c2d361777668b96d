"""What plain decoding chooses along a text that was decoded otherwise: where it differs, and how near a tie that was.

Steps of different shapes sum in different orders, so their logits differ in the last bits; where two tokens are nearly
equal, the other may win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 1e-3
"""The largest gap between the two largest logits that another order of sums may turn."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where plain decoding chooses another token."""

    sequence: int
    index: int
    """Among its generated tokens."""
    token: int
    plain_token: int
    gap: float
    """By how much plain decoding's largest logit there exceeds the next."""

    @property
    def is_near_tie(self) -> bool:
        """Whether the order of sums may be why."""
        return self.gap < NEAR_TIE


def differences(
    sequence: int, tokens: Sequence[int], plain_tokens: Sequence[int], gaps: Sequence[float]
) -> list[Difference]:
    """Where `tokens` of `sequence` are not those of plain decoding, which `plain.follow` gives with its gaps."""
    rows = enumerate(zip(tokens, plain_tokens, gaps, strict=True))
    return [Difference(sequence, index, a, b, gap) for index, (a, b, gap) in rows if a != b]
