"""Who proposes: what each draft is fed, step by step, and what of its outputs are proposals.

A proposer never looks at what it proposed to decide how often it runs: `num_replays` is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.models.speculative.acceptance import Row
from graphshard.models.speculative.steps import write


class Proposer(Protocol):
    """Feeds a draft. A step calls `write` and `read` for each replay, `proposals`, and after verification `note`."""

    batch_size: int
    block: int
    """Places of the target's step: one for the last token, the others for proposals."""

    @property
    def num_replays(self) -> int:
        """Draft replays in every step."""

    def begin(self) -> None:
        """The rows of the next step have nothing to do with those before."""

    def write(self, i: int, rows: Sequence[Row], inputs: Mapping[str, Tensor]) -> None:
        """Fill the inputs of replay `i`."""

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        """Take what replay `i` gave."""

    def proposals(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """Up to `block - 1` tokens for each row, to follow its last token."""

    def note(self, begins: Sequence[int], counts: Sequence[int], outputs: Mapping[str, Tensor]) -> None:
        """The target has run: of each row's block, which began at `begins`, the first `counts` places count."""


class BlockProposer:
    """A draft that fills a block in one forward, from hidden states that the target left (DFlash).

    Its block lies where the target's does. What it knows of a text are the `taps` of tokens that count, which it is
    given in the replay after the step in which they came to count; so it runs while prompts are read, too.
    """

    num_replays = 1

    def __init__(self, batch_size: int, block: int, mask_token: int) -> None:
        """`mask_token` stands for a token that is to be proposed.

        Raises:
            SpecError: a block of one token has no place for proposals.
        """
        check_block(block)
        self.batch_size, self.block = batch_size, block
        self._mask_token = mask_token
        self._proposed: Tensor | None = None
        self.begin()

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The draft's step shape in each replay."""
        return ((self.batch_size, self.block),)

    def begin(self) -> None:
        """See `Proposer`."""
        self._taps: Tensor | None = None
        self._tapped = [[-1] * self.block] * self.batch_size

    def write(self, i: int, rows: Sequence[Row], inputs: Mapping[str, Tensor]) -> None:
        """See `Proposer`."""
        masks = [self._mask_token] * (self.block - 1)
        write(inputs["tokens"], [[row.tokens[row.committed], *masks] for row in rows])
        write(inputs["positions"], [[*range(row.committed, row.committed + self.block)] for row in rows])
        if self._taps is not None:
            inputs["features"].copy_(self._taps)
        write(inputs["feature_positions"], self._tapped)

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        """See `Proposer`."""
        self._proposed = outputs["logits"][:, 1:].argmax(dim=-1)

    def proposals(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """See `Proposer`."""
        return _listed(self._proposed)

    def note(self, begins: Sequence[int], counts: Sequence[int], outputs: Mapping[str, Tensor]) -> None:
        """See `Proposer`."""
        self._taps = outputs["taps"]
        self._tapped = [
            [begin + j if j < count else -1 for j in range(self.block)]
            for begin, count in zip(begins, counts, strict=True)
        ]


class TokenProposer:
    """A draft that is a language model itself, one token a replay: `block - 1` replays, of which the first feeds two.

    Its caches have to hold every token before the last. When all proposals counted, the last of them was never fed, so
    the first replay feeds it and the token behind it; when fewer did, it feeds a token again. While more tokens are
    known, replays feed those, `block` in a step, as many as the target takes.
    """

    def __init__(self, batch_size: int, block: int) -> None:
        """For steps of `block` places.

        Raises:
            SpecError: a block of one token has no place for proposals.
        """
        check_block(block)
        self.batch_size, self.block = batch_size, block
        self._proposed: list[Tensor] = []

    @property
    def num_replays(self) -> int:
        """See `Proposer`."""
        return self.block - 1

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """The draft's step shape in each replay."""
        return ((self.batch_size, 2), *[(self.batch_size, 1)] * (self.block - 2))

    def begin(self) -> None:
        """See `Proposer`."""
        self._proposed = []

    def write(self, i: int, rows: Sequence[Row], inputs: Mapping[str, Tensor]) -> None:
        """See `Proposer`."""
        tokens, positions = inputs["tokens"], inputs["positions"]
        if i == 0:
            self._proposed = []
            firsts = [self._first(row) for row in rows]
            write(tokens, [[row.tokens[at] for at in pair] for row, pair in zip(rows, firsts, strict=True)])
            write(positions, firsts)
            return
        write(positions, [[row.committed + i + (row.num_known > 1)] for row in rows])
        tokens.copy_(self._proposed[-1][:, None])
        known = [self._known(row, i) for row in rows]
        if any(token is not None for token in known):
            given = torch.tensor([[-1 if token is None else token] for token in known], device=tokens.device)
            tokens.copy_(torch.where(given < 0, tokens, given))

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        """See `Proposer`. Stays on the device: the next replay's input is made of it there."""
        self._proposed.append(outputs["logits"][:, -1].argmax(dim=-1))

    def proposals(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """See `Proposer`."""
        return _listed(torch.stack(self._proposed, dim=1))

    def note(self, begins: Sequence[int], counts: Sequence[int], outputs: Mapping[str, Tensor]) -> None:
        """See `Proposer`: all that this draft needs to know are the tokens."""

    @staticmethod
    def _first(row: Row) -> list[int]:
        """Which tokens of `row` the first replay feeds: those that are known, or the last and the one before it.

        A text of one token feeds it twice, which writes the same keys and values twice.
        """
        begin = row.committed if row.num_known > 1 else max(row.committed - 1, 0)
        return [begin, min(begin + 1, len(row.tokens) - 1)]

    @staticmethod
    def _known(row: Row, i: int) -> int | None:
        """The token that replay `i` > 0 feeds, where it is known already."""
        at = row.committed + i + 1
        if row.num_known == 1:
            return None
        return row.tokens[min(at, len(row.tokens) - 1)]


def check_block(block: int) -> None:
    """SpecError for a block that has no place for proposals."""
    if block < 2:
        raise SpecError(f"block is {block}: a step with proposals has at least 2 places")


def _listed(proposed: Tensor | None) -> list[list[int]]:
    assert proposed is not None, "the draft has not run in this step"
    listed: list[list[int]] = proposed.tolist()
    return listed
