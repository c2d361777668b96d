"""Decoding by blocks on a rank of `generate --speculative`, with a draft or without.

Ranks whose gathers need all of them (transport nccl) agree before each step on whether anybody has a row left; one that
is done takes part in the others' steps with nothing of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphshard.bench.decode import clear_state
from graphshard.core.specs import StepShape
from graphshard.models.speculative.decoder import OnToken, SpeculativeDecoder
from graphshard.runtime.speculative import Speculation


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
        """Decode `batches` of prompts by number, one after the other; then step along, where gathers need all ranks.

        `on_token` is called with a prompt's number.
        """
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
        clear_state(self._speculation.target, self._shape)
        numbers = list(prompts)
        made = self._decoder.decode(
            list(prompts.values()),
            self._num_tokens,
            lambda row, token: on_token(numbers[row], token),
            before_step=lambda: self._agree(self._decoder.batch_size),
        )
        keys = ("tokens", "gained", "first_token_s", "step_s", "num_steps")
        self._phase.batches.append({"prompts": numbers, **{key: getattr(made, key) for key in keys}})
