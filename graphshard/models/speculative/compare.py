"""Two decodings of the same prompts: where they part, and how near a tie that was.

Steps of different shapes sum in different orders, so their logits differ in the last bits; where two tokens are nearly
equal, the other may win. From there on a sequence is another text, and comparing further says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.errors import SpecError

NEAR_TIE = 1e-3
"""The largest gap between the two largest logits that another order of sums may turn."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a sequence."""

    sequence: int
    index: int
    """Among its generated tokens."""
    token: int
    plain_token: int
    gap: float
    """The plain decoding's there."""

    @property
    def is_near_tie(self) -> bool:
        """Whether the order of sums may be why."""
        return self.gap < NEAR_TIE


@dataclass(frozen=True, slots=True)
class Differences:
    """Of a decoding from plain decoding; no `firsts`: none."""

    firsts: tuple[Difference, ...]
    num_compared: int
    """Tokens up to the first difference of each sequence, itself included."""

    @property
    def count(self) -> int:
        """Sequences that differ."""
        return len(self.firsts)

    @property
    def all_near_ties(self) -> bool:
        """Whether every difference is one that the order of sums may explain; so it is where there is none."""
        return all(first.is_near_tie for first in self.firsts)


def compare_with_plain(
    tokens: Sequence[Sequence[int]], plain_tokens: Sequence[Sequence[int]], gaps: Sequence[Sequence[float]]
) -> Differences:
    """Where `tokens` part from `plain_tokens`; `gaps` are the plain decoding's. All by sequence, and equally long.

    Raises:
        SpecError: they are not.
    """
    if not [len(row) for row in tokens] == [len(row) for row in plain_tokens] == [len(row) for row in gaps]:
        raise SpecError("tokens, plain tokens and gaps are of different lengths: decode the same prompts as far")
    firsts, num_compared = [], 0
    for sequence, (row, plain, near) in enumerate(zip(tokens, plain_tokens, gaps, strict=True)):
        index = next((i for i, pair in enumerate(zip(row, plain, strict=True)) if pair[0] != pair[1]), None)
        num_compared += len(row) if index is None else index + 1
        if index is not None:
            firsts.append(Difference(sequence, index, row[index], plain[index], near[index]))
    return Differences(tuple(firsts), num_compared)
