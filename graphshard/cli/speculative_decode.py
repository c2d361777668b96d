"""What a rank of `generate --speculative` decodes: its prompts with a draft, without, and one token a step, plainly.

Ranks whose gathers need all of them (transport nccl) agree before each step on whether anybody has a row left; one that
is done takes part in the others' steps with nothing of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphshard.bench.decode import Step, clear_state
from graphshard.core.specs import StepShape
from graphshard.models.speculative.acceptance import Row, rows_for
from graphshard.models.speculative.decoder import SpeculativeDecoder
from graphshard.models.speculative.steps import choices, write
from graphshard.runtime.speculative import Speculation

OnToken = Callable[[int, int], None]
"""Called with (prompt's number, token) as soon as a token counts."""


@dataclass
class Phase:
    """What one way of decoding gave on this rank."""

    batches: list[dict[str, Any]] = field(default_factory=list)
    """`prompts` (numbers) and by prompt: `tokens`, `first_token_s`, `gained` by step; `step_s` and `num_steps`."""
    exchange_s: list[float] = field(default_factory=list)
    """Of each agreement over ranks; empty where none is needed."""
    num_idle: int = 0
    """Steps for other ranks alone."""

    @property
    def tokens(self) -> dict[int, list[int]]:
        """By prompt."""
        return {n: made for one in self.batches for n, made in zip(one["prompts"], one["tokens"], strict=True)}


class Blocks:
    """Decoding by blocks on one rank, whatever the others do."""

    def __init__(
        self, speculation: Speculation, decoder: SpeculativeDecoder, num_tokens: int, *, skips_draft: bool
    ) -> None:
        """`skips_draft`: as the decoder does."""
        self._speculation, self._decoder, self._skips_draft = speculation, decoder, skips_draft
        self._num_tokens = num_tokens
        self._shape = StepShape(decoder.batch_size, decoder.block)
        self._phase = Phase()

    def run(self, batches: Sequence[dict[int, list[int]]], on_token: OnToken) -> Phase:
        """Decode `batches` of prompts by number, one after the other; then step along, where gathers need all ranks."""
        for prompts in batches:
            self._batch(prompts, on_token)
        while self._agree(0):
            shape = self._shape
            self._speculation.idle(shape.batch_size, shape.tokens_per_sequence, skip=self._skips_draft)
            self._phase.num_idle += 1
        return self._phase

    def _agree(self, batch_size: int) -> bool:
        """Whether there is a step to take, on any rank."""
        agreed = self._speculation.agree(batch_size)
        if self._speculation.is_collective:
            self._phase.exchange_s.append(agreed.seconds)
        return not agreed.is_over

    def _batch(self, prompts: dict[int, list[int]], on_token: OnToken) -> None:
        vocab_size = self._speculation.target.buffers(self._shape, "output")["logits"].shape[-1]
        sizes = (self._decoder.batch_size, vocab_size, self._decoder.num_positions, self._decoder.block)
        rows = rows_for(list(prompts.values()), self._num_tokens, *sizes)
        clear_state(self._speculation.target, self._shape)
        self._decoder.begin()
        numbers, began, step_s = list(prompts), time.perf_counter(), []
        gained: list[list[int]] = [[] for _ in numbers]
        first_token_s = [0.0] * len(numbers)
        while not all(row.is_done for row in rows):
            self._agree(self._decoder.batch_size)
            begin = time.perf_counter()
            decoding = [row.is_decoding for row in rows]
            counts = self._decoder.advance(rows)
            step_s.append(time.perf_counter() - begin)
            for i, (number, row) in enumerate(zip(numbers, rows, strict=False)):
                if decoding[i]:
                    gained[i].append(counts[i])
                if counts[i] and first_token_s[i] == 0:
                    first_token_s[i] = time.perf_counter() - began
                for token in _last(row, counts[i]):
                    on_token(number, token)
        made = [row.generated for row in rows[: len(numbers)]]
        told = {"prompts": numbers, "tokens": made, "gained": gained, "first_token_s": first_token_s}
        self._phase.batches.append({**told, "step_s": step_s, "num_steps": len(step_s)})


def _last(row: Row, count: int) -> list[int]:
    return row.tokens[len(row.tokens) - count :]


def follow(step: Step, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[float]]:
    """What plain decoding, a token a step, chooses behind `prompt` and each beginning of `tokens`.

    Where a choice differs the text goes on with that of `tokens`, so what comes behind is compared as well.

    Returns:
        Its choices, as many as `tokens`; and by how much each one's logit exceeded the next largest.
    """
    text = [*prompt, *tokens]
    chosen, gaps = [], []
    for position in range(len(text) - 1):
        write(step.inputs["tokens"], [[text[position]]])
        write(step.inputs["positions"], [[position]])
        step.replay()
        if position >= len(prompt) - 1:
            [[token]], [[gap]] = choices(step.outputs["logits"])
            chosen.append(token)
            gaps.append(gap)
    return chosen, gaps
