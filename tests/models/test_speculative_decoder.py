"""Decoding by blocks over plain states: whatever a draft proposes, the tokens are the reference's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from speculative_fakes import Oracle, PlainStep, plain_graphs
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import Llama, random_llama
from graphshard.models.speculative.acceptance import Row
from graphshard.models.speculative.compare import differences
from graphshard.models.speculative.decoder import Decoded, SpeculativeDecoder
from graphshard.models.speculative.plain import follow
from graphshard.models.speculative.proposers import BlockProposer, TokenProposer

SMALL = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [11, 13, 17, 19], [23, 29]]
BLOCK, NUM_TOKENS = 4, 14
LENGTH = 11 + NUM_TOKENS - 1 + BLOCK
WEIGHTS = random_llama(SMALL, seed=3)[1]


def _step(shapes: Sequence[tuple[int, int]] = (), block: int = BLOCK) -> PlainStep:
    """Caches end where the longest text does: a position more would be refused by them."""
    model = Llama(SMALL, len(PROMPTS), LENGTH - BLOCK + block)
    target = plain_graphs(model, WEIGHTS, [(len(PROMPTS), block)])[0]
    return PlainStep(target, plain_graphs(model, WEIGHTS, shapes))


@cache
def _reference(block: int = BLOCK) -> Decoded:
    return SpeculativeDecoder(_step(block=block), num_positions=LENGTH - BLOCK + block).decode(PROMPTS, NUM_TOKENS)


REFERENCE = _reference(BLOCK)
TEXTS = [prompt + made for prompt, made in zip(PROMPTS, REFERENCE.tokens, strict=True)]


def _oracle(seed: int = 0) -> Oracle:
    return Oracle(len(PROMPTS), BLOCK, TEXTS, SMALL.vocab_size, seed)


def test_the_reference_is_plain_decoding_but_for_near_ties() -> None:
    plain = _reference(block=1)
    assert plain.num_steps == max(map(len, PROMPTS)) + NUM_TOKENS - 1
    assert all(count == 1 for row in (*plain.gained, *REFERENCE.gained) for count in row)
    assert plain.acceptance_length == REFERENCE.acceptance_length == 1.0
    assert REFERENCE.num_steps == 3 + NUM_TOKENS - 1  # 11 tokens are three blocks, the last of which gives a token
    step = plain_graphs(Llama(SMALL, 1, LENGTH), WEIGHTS, [(1, 1)])[0]
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, REFERENCE.tokens, strict=True)):
        chosen, gaps = follow(step, prompt, tokens)
        assert len(chosen) == NUM_TOKENS and all(one.is_near_tie for one in differences(row, tokens, chosen, gaps))
        torch.testing.assert_close(REFERENCE.gaps[row], gaps, atol=1e-4, rtol=0)  # sums of another order


@pytest.mark.parametrize("right", list(product(range(BLOCK), repeat=2)))
def test_every_pattern_of_right_proposals(right: tuple[int, int]) -> None:
    """In every step the one row's first `right[0]` proposals are right, the other's first `right[1]`; by turns."""
    oracle = _oracle()
    oracle.plan = [[*right, *right[::-1]], [*right[::-1], *right]] * NUM_TOKENS
    made = SpeculativeDecoder(_step(), oracle, num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS)
    assert made.tokens == REFERENCE.tokens
    _check_gained(made, oracle)


@pytest.mark.parametrize("seed", range(10))
def test_random_patterns_give_the_reference(seed: int) -> None:
    step, oracle, told = _step(), _oracle(seed), []
    decoder = SpeculativeDecoder(step, oracle, num_positions=LENGTH)
    for _ in range(2):  # the second finds the caches as the first has left them
        made = decoder.decode(PROMPTS, NUM_TOKENS, lambda sequence, token: told.append((sequence, token)))
        assert made.tokens == REFERENCE.tokens
        assert [[token for at, token in told if at == row] for row in range(len(PROMPTS))] == REFERENCE.tokens
        _check_gained(made, oracle)
        assert 1.0 <= made.acceptance_length <= BLOCK
        told.clear()
    assert all(calls == ["verify", "commit"] for calls in step.steps)


def test_a_hook_comes_before_each_step() -> None:
    step, seen = _step(), []
    decoder = SpeculativeDecoder(step, num_positions=LENGTH)
    made = decoder.decode(PROMPTS, NUM_TOKENS, before_step=lambda: seen.append(len(step.steps)))
    assert seen == [*range(made.num_steps)] and len(made.step_s) == made.num_steps
    first = [sum(made.step_s[: -(-len(prompt) // BLOCK)]) for prompt in PROMPTS]
    assert all(mine >= steps > 0 for mine, steps in zip(made.first_token_s, first, strict=True))
    assert made.first_token_s[1] < made.first_token_s[0]  # its prompt is shorter than a block


def _check_gained(made: Decoded, oracle: Oracle) -> None:
    """Each verify step gained as many tokens as were right, and one; the last as many as were missing."""
    assert len(oracle.planned) == made.num_steps
    for row, gained in enumerate(made.gained):
        begin, gives = _reading(row, BLOCK)
        assert sum(gained) == NUM_TOKENS - gives
        counts = [oracle.planned[at][row] + 1 for at in range(begin, begin + len(gained))]
        assert gained[:-1] == counts[:-1] and gained[-1] <= counts[-1]


def _reading(row: int, block: int) -> tuple[int, int]:
    """Steps that read a prompt without a place for proposals, and the tokens that they give."""
    whole, left = divmod(len(PROMPTS[row]), block)
    return whole + (left > 1), int(left != 1)  # where one token is left, proposals stand behind it already


def test_rows_without_a_sequence_and_short_batches() -> None:
    made = SpeculativeDecoder(_step(), _oracle(), num_positions=LENGTH).decode(PROMPTS[:2], NUM_TOKENS)
    assert made.tokens == REFERENCE.tokens[:2] and len(made.gaps) == len(made.gained) == 2


def test_one_position_less_is_refused() -> None:
    decoder = SpeculativeDecoder(_step(), num_positions=LENGTH - 1)
    with pytest.raises(SpecError, match=f"needs {LENGTH} positions and the caches have {LENGTH - 1}"):
        decoder.decode(PROMPTS, NUM_TOKENS)


def test_a_proposer_of_another_shape_is_refused() -> None:
    for other in (TokenProposer(4, 3), TokenProposer(3, 4), BlockProposer(4, 5, 0)):
        with pytest.raises(SpecError, match="make both for one step shape"):
            SpeculativeDecoder(_step(), other, num_positions=LENGTH)
    with pytest.raises(SpecError, match="block is 1"):
        TokenProposer(4, 1)
    with pytest.raises(SpecError, match="block is 1"):
        BlockProposer(4, 1, 0)


class _Misled(TokenProposer):
    """Errs in random replays, and is fed its own errors."""

    def __init__(self, batch_size: int, block: int, seed: int) -> None:
        super().__init__(batch_size, block)
        self.random = Random(seed)
        self.wrong: list[list[int]] = []
        """The replay in which each row errs, by step; `block - 1`: in none."""

    def begin(self) -> None:
        super().begin()
        self.wrong = []

    def write(self, i: int, rows: Sequence[Row], inputs: Mapping[str, Tensor]) -> None:
        if i == 0:
            self.wrong.append([self.random.randrange(self.block) for _ in range(self.batch_size)])
        super().write(i, rows, inputs)

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        super().read(i, outputs)
        for row, at in enumerate(self.wrong[-1]):
            if at == i:
                self._proposed[-1][row] = (self._proposed[-1][row] + 1) % SMALL.vocab_size


@pytest.mark.parametrize("block", [2, 3, 4, 5])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_draft_that_is_the_target_is_right_until_it_is_misled(block: int, seed: int | None) -> None:
    """It proposes what the target chooses as long as its caches hold the text: after any prompt, after any error."""
    proposer = _Misled(len(PROMPTS), block, seed) if seed is not None else TokenProposer(len(PROMPTS), block)
    step = _step(proposer.shapes, block)
    decoder = SpeculativeDecoder(step, proposer, num_positions=LENGTH - BLOCK + block)
    for _ in range(2):
        made = decoder.decode(PROMPTS, NUM_TOKENS)
        reference = _reference(block)
        assert made.tokens == reference.tokens
        gaps = [gap for one in (made, reference) for row in one.gaps for gap in row]
        assert min(gaps) > 1e-4  # draft and target sum in other orders
        for row, gained in enumerate(made.gained):
            begin, _ = _reading(row, block)
            wrong = proposer.wrong if isinstance(proposer, _Misled) else [[block - 1] * 4] * made.num_steps
            assert gained[:-1] == [wrong[at][row] + 1 for at in range(begin, begin + len(gained) - 1)]
    assert all(calls == [*(f"propose {i}" for i in range(block - 1)), "verify", "commit"] for calls in step.steps)
