"""Greedy decoding by blocks: a draft proposes, the target verifies, and its tokens are those of plain greedy decoding.

Every step runs the same replays whatever the tokens are, so ranks that share weights may decode different texts.
Without a proposer the same steps gain one token each: the reference, computed at the same step shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphshard.core.errors import SpecError
from graphshard.models.speculative.acceptance import (
    Row,
    accept,
    acceptance_length,
    append,
    block_of,
    check_rows,
    rows_for,
)
from graphshard.models.speculative.proposers import Proposer
from graphshard.models.speculative.steps import SpeculativeStepLike, choices, write

OnToken = Callable[[int, int], None]
"""Called with (sequence, token) as soon as a token counts."""


@dataclass(frozen=True)
class Decoded:
    """What one run gave, by sequence."""

    tokens: list[list[int]]
    """Generated ones."""
    gaps: list[list[float]]
    """For each of them, by how much its logit exceeded the next largest."""
    num_steps: int
    """Verify steps."""
    gained: list[list[int]]
    """Tokens gained by each verify step of a sequence that had places for proposals, whether there were any or not."""
    step_s: list[float]
    """What each step took the host, from before the draft is fed until its tokens are entered."""
    first_token_s: list[float]
    """From the beginning to the end of the step that gave a sequence its first token."""

    @property
    def acceptance_length(self) -> float:
        """See `acceptance_length`, over all sequences."""
        return acceptance_length([count for row in self.gained for count in row])


class SpeculativeDecoder:
    """Drives one step shape. `decode` is a whole run; a server's own loop calls `advance` with rows of its own."""

    def __init__(self, step: SpeculativeStepLike, proposer: Proposer | None = None, *, num_positions: int) -> None:
        """`num_positions`: of the caches, the smaller of target and draft.

        Raises:
            SpecError: the proposer is for another batch or block.
        """
        self.batch_size, self.block = step.target.inputs["tokens"].shape
        if proposer is not None and (proposer.batch_size, proposer.block) != (self.batch_size, self.block):
            raise SpecError(
                f"the proposer is for {proposer.batch_size} sequences and blocks of {proposer.block}, the target's "
                f"step for {self.batch_size} and {self.block}: make both for one step shape"
            )
        self.num_positions = num_positions
        self._step, self._proposer = step, proposer

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        on_token: OnToken | None = None,
        before_step: Callable[[], object] | None = None,
    ) -> Decoded:
        """Generate `num_tokens` tokens for each prompt, all in one batch, from position 0; no token ends a text.

        `before_step` is called before each step, for ranks that have to agree on it.

        Raises:
            SpecError: see `rows_for`.
        """
        rows = self.rows(prompts, num_tokens)
        self.begin()
        began, used, step_s = time.perf_counter(), rows[: len(prompts)], []
        gained: list[list[int]] = [[] for _ in prompts]
        first_token_s = [0.0] * len(prompts)
        while not all(row.is_done for row in rows):
            if before_step is not None:
                before_step()
            begin = time.perf_counter()
            decoding = [row.is_decoding for row in rows]
            counts = self.advance(rows)
            step_s.append(time.perf_counter() - begin)
            for i, row in enumerate(used):
                if decoding[i]:
                    gained[i].append(counts[i])
                if counts[i] and len(row.generated) == counts[i]:
                    first_token_s[i] = time.perf_counter() - began
                if on_token is not None:
                    for token in row.tokens[len(row.tokens) - counts[i] :]:
                        on_token(i, token)
        tokens, gaps = [row.generated for row in used], [row.gaps for row in used]
        return Decoded(tokens, gaps, len(step_s), gained, step_s, first_token_s)

    def rows(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Row]:
        """Rows for `prompts`, as many as the batch has.

        Raises:
            SpecError: see `rows_for`.
        """
        vocab_size = self._step.target.outputs["logits"].shape[-1]
        return rows_for(prompts, num_tokens, self.batch_size, vocab_size, self.num_positions, self.block)

    def begin(self) -> None:
        """Rows that come next have nothing to do with those before."""
        if self._proposer is not None:
            self._proposer.begin()

    def advance(self, rows: Sequence[Row]) -> list[int]:
        """One step of all `rows`, as many as the batch has: the tokens that each gained.

        Order:   propose (each of the draft's replays), verify, commit.
        Blocks:  the host, as replays do, and until chosen tokens may be read.
        Capture: no.

        Raises:
            SpecError: see `check_rows`; nothing has been issued.
        """
        target = self._step.target
        check_rows(rows, self.batch_size, target.outputs["logits"].shape[-1], self.num_positions, self.block)
        proposals = self._propose(rows)
        blocks = [block_of(row, proposed, self.block) for row, proposed in zip(rows, proposals, strict=True)]
        write(target.inputs["tokens"], [block.tokens for block in blocks])
        write(target.inputs["positions"], [[*range(block.begin, block.begin + self.block)] for block in blocks])
        self._step.verify()
        chosen, gaps = choices(target.outputs["logits"])
        accepted = [accept(row, block, made) for row, block, made in zip(rows, blocks, chosen, strict=True)]
        counts = [one.num_tokens for one in accepted]
        if "accepted" in target.inputs:
            write(target.inputs["accepted"], counts)
        self._step.commit()
        if self._proposer is not None:
            self._proposer.note([block.begin for block in blocks], counts, target.outputs)
        return [append(*entered) for entered in zip(rows, blocks, accepted, gaps, strict=True)]

    def _propose(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        """The draft's replays; proposals by row, also for rows that have no place for any."""
        if self._proposer is None:
            return [()] * len(rows)
        for i in range(self._proposer.num_replays):
            self._proposer.write(i, rows, self._step.draft(i).inputs)
            self._step.propose(i)
            self._proposer.read(i, self._step.draft(i).outputs)
        return self._proposer.proposals(rows)
