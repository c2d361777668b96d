"""The rows of a batch, the blocks that they are verified in, and how much of a block counts.

A row knows some tokens: its prompt, and what was generated. All but the last `num_known` of them are *committed*: the
target's caches hold them. A step verifies one block of each row, at positions from `committed` on:

    known tokens, at least the last one | proposals, if the last token is the only known one | unused places

Known tokens count whatever the target says. A proposal counts if it is what the target chose at the place before, and
all before it count. What the target chose at the last place that counts is the bonus token: it is appended, and is the
known token of the next step. So a step gains 1 to `block` tokens, and none while a prompt is longer than its block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphshard.core.errors import SpecError

DEFAULT_BLOCK = 4
"""Places of a step where the draft is a language model; a DFlash draft's config has its own."""


@dataclass
class Row:
    """One sequence of a batch."""

    tokens: list[int]
    """The prompt, and what was generated behind it."""
    num_prompt: int
    total: int
    """Tokens when it is done; a row that nobody asked for has as many from the beginning."""
    committed: int = 0
    """Tokens in the target's caches: the first ones."""
    gaps: list[float] = field(default_factory=list)
    """For each generated token, by how much its logit exceeded the next largest: 0 is a tie."""

    @property
    def is_done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) >= self.total

    @property
    def num_known(self) -> int:
        """Tokens that are not committed yet, at least one."""
        return len(self.tokens) - self.committed

    @property
    def is_decoding(self) -> bool:
        """Whether the next block holds one known token, and so has places for proposals."""
        return not self.is_done and self.num_known == 1

    @property
    def generated(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self.num_prompt :]


class Block(NamedTuple):
    """What a row feeds the target in one step."""

    tokens: list[int]
    begin: int
    """The position of the first."""
    num_known: int
    num_proposed: int


class Accepted(NamedTuple):
    """What of a block counts."""

    num_tokens: int
    """The block's first tokens, which are committed now."""
    bonus: int | None
    """The token behind them, chosen by the target; None while more of the prompt is known."""


def empty_row() -> Row:
    """A row of the batch that no sequence uses: done, with a token to feed."""
    return Row([0], 1, 1)


def block_of(row: Row, proposals: Sequence[int], size: int) -> Block:
    """The `size` places of `row`'s next block; unused ones repeat the last token that is known."""
    known = row.tokens[row.committed : row.committed + size]
    proposed = list(proposals[: size - 1]) if row.is_decoding else []
    tokens = known + proposed
    return Block(tokens + [known[-1]] * (size - len(tokens)), row.committed, len(known), len(proposed))


def accept(row: Row, block: Block, chosen: Sequence[int]) -> Accepted:
    """How much of `block` counts, where the target chose `chosen` at each of its places. A row that is done: nothing.

    Never more than makes the row complete. Changes nothing.
    """
    if row.is_done:
        return Accepted(0, None)
    if block.num_known < row.num_known:
        return Accepted(block.num_known, None)
    room = row.total - len(row.tokens) - 1  # the bonus token is one
    num_tokens, end = block.num_known, block.num_known + min(block.num_proposed, room)
    while num_tokens < end and block.tokens[num_tokens] == chosen[num_tokens - 1]:
        num_tokens += 1
    return Accepted(num_tokens, chosen[num_tokens - 1])


def append(row: Row, block: Block, accepted: Accepted, gaps: Sequence[float]) -> int:
    """Enter what counts into `row`: how many tokens it gained. `gaps` are the target's at each place of the block."""
    row.committed += accepted.num_tokens
    if accepted.bonus is None:
        return 0
    row.tokens += [*block.tokens[block.num_known : accepted.num_tokens], accepted.bonus]
    row.gaps += gaps[block.num_known - 1 : accepted.num_tokens]
    return accepted.num_tokens - block.num_known + 1


def acceptance_length(gained: Sequence[int]) -> float:
    """Mean tokens that a verify step gained a sequence, 1.0 to the block's size; 0.0 if there was no step.

    `gained` counts steps that had places for proposals.
    """
    return sum(gained) / len(gained) if gained else 0.0


def rows_for(
    prompts: Sequence[Sequence[int]], num_tokens: int, batch_size: int, vocab_size: int, num_positions: int, block: int
) -> list[Row]:
    """A row for each prompt, to generate `num_tokens` each, and empty ones up to `batch_size`.

    Raises:
        SpecError: a prompt is empty or has a token outside the vocabulary, there are more prompts than rows, or the
            caches have too few positions.
    """
    if not 1 <= len(prompts) <= batch_size or not all(prompts):
        raise SpecError(f"{len(prompts)} prompts for {batch_size} sequences; give 1 to as many, of >= 1 token each")
    if num_tokens < 1:
        raise SpecError(f"num_tokens is {num_tokens}: generate at least one")
    for index, prompt in enumerate(prompts):
        _check_tokens(f"prompt {index}", prompt, vocab_size)
    needed = needed_positions(prompts, num_tokens, block)
    if needed > num_positions:
        raise SpecError(
            f"decoding by blocks of {block} needs {needed} positions and the caches have {num_positions}: make the "
            "models with a larger cache_length, or generate fewer tokens"
        )
    rows = [Row(list(prompt), len(prompt), len(prompt) + num_tokens) for prompt in prompts]
    return rows + [empty_row() for _ in range(batch_size - len(rows))]


def check_rows(rows: Sequence[Row], batch_size: int, vocab_size: int, num_positions: int, block: int) -> None:
    """SpecError if a step of `batch_size` sequences cannot take `rows`, naming the row and what is wrong with it."""
    if len(rows) != batch_size:
        raise SpecError(f"{len(rows)} rows for a step of {batch_size} sequences: fill up with empty_row()")
    for index, row in enumerate(rows):
        if not 0 <= row.committed < len(row.tokens):
            raise SpecError(
                f"row {index}: {row.committed} of its {len(row.tokens)} tokens are committed; a step begins at a token "
                "that is known and not committed, at the latest the last one"
            )
        if row.committed + block > num_positions:
            raise SpecError(
                f"row {index}: its block of {block} begins at position {row.committed}, and the caches have "
                f"{num_positions}: end the sequence, or make the models with a larger cache_length"
            )
        _check_tokens(f"row {index}", row.tokens[max(row.committed - 1, 0) : row.committed + block], vocab_size)


def _check_tokens(where: str, tokens: Sequence[int], vocab_size: int) -> None:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise SpecError(
            f"{where} has token {wrong}, outside the vocabulary of {vocab_size}: use the tokenizer that belongs to the "
            "model"
        )


def needed_positions(prompts: Sequence[Sequence[int]], num_tokens: int, block: int) -> int:
    """The cache length that decoding needs: a block begins at the last token, and is written whole."""
    return max(len(prompt) for prompt in prompts) + num_tokens - 1 + block
