"""Decoding by blocks where tokens leave a state behind: a Kimi K3 with a ring, under drafts that are wrong anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from dflash_reference import SMALL as DRAFT
from dflash_reference import reference_logits
from executor import Executor
from kimi_k3_reference import SIZES, SMALL
from speculative_fakes import Oracle, PlainStep, Watched, plain_graphs
from torch import Tensor

from graphshard.core.specs import StepShape
from graphshard.models.dflash.folder import random_dflash
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.models.speculative.compare import differences
from graphshard.models.speculative.decoder import Decoded, SpeculativeDecoder
from graphshard.models.speculative.plain import follow

PROMPTS = [[3, 1, 4, 1, 5, 9], [7], [11, 13, 17, 19]]
BLOCK, NUM_TOKENS, LENGTH = 4, 10, 19
VARIANTS = {
    "KDA and MLA": SMALL,
    "KDA alone": replace(SMALL, sizes=replace(SIZES, num_layers=2, mla_layers=frozenset(), conv_taps=6)),
    "bfloat16": replace(SMALL, dtype="bfloat16"),
}
TAPPED = replace(DRAFT, vocab_size=SIZES.vocab, hidden_size=SIZES.hidden, mask_token=95, taps=(1, 3))


@cache
def _weights(variant: str) -> dict[str, Tensor]:
    return random_kimi_k3(VARIANTS[variant], 6)[1]


def _step(variant: str, block: int = BLOCK, *, length: int = LENGTH, compact_ring: bool = False) -> PlainStep:
    model = KimiK3(VARIANTS[variant], 3, length, ring=block, compact_ring=compact_ring)
    return PlainStep(plain_graphs(model, _weights(variant), [(3, block)])[0])


@cache
def _decoded(variant: str, block: int = BLOCK) -> Decoded:
    decoder = SpeculativeDecoder(_step(variant, block), num_positions=LENGTH)
    return decoder.decode(PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("compact", [False, True])
def test_random_patterns_give_the_reference(variant: str, compact: bool) -> None:
    reference = _decoded(variant)
    texts = [prompt + made for prompt, made in zip(PROMPTS, reference.tokens, strict=True)]
    oracle = Oracle(3, BLOCK, texts, SIZES.vocab, seed=0)
    decoder = SpeculativeDecoder(_step(variant, compact_ring=compact), oracle, num_positions=LENGTH)
    for _ in range(2):  # the second finds states as the first has left them
        made = decoder.decode(PROMPTS, NUM_TOKENS)
        assert made.tokens == reference.tokens
        assert {count for row in made.gained for count in row} >= {1, 2, 3, 4}


def test_every_pair_of_steps_with_0_to_3_right_proposals() -> None:
    """In every row each number of right proposals comes after each."""
    num_tokens, length = 48, 6 + 48 - 1 + BLOCK
    counts = [0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0, 0, 1, 0]
    assert len(set(pairwise(counts[:17]))) == BLOCK**2
    step = _step("KDA and MLA", length=length)
    reference = SpeculativeDecoder(step, num_positions=length).decode(PROMPTS, num_tokens)
    texts = [prompt + made for prompt, made in zip(PROMPTS, reference.tokens, strict=True)]
    oracle = Oracle(3, BLOCK, texts, SIZES.vocab, seed=0)
    oracle.plan = [[right, right, right] for right in (*counts[:2], *counts)]  # two blocks read the longest prompt
    made = SpeculativeDecoder(step, oracle, num_positions=length).decode(PROMPTS, num_tokens)
    assert made.tokens == reference.tokens
    assert made.gained[0][:17] == [count + 1 for count in counts[:17]]


@pytest.mark.parametrize("variant", ["KDA and MLA", "KDA alone"])
def test_the_reference_is_plain_decoding_but_for_near_ties(variant: str) -> None:
    """Along the same texts, a token a step, by a model without a ring."""
    step = plain_graphs(KimiK3(VARIANTS[variant], 1, LENGTH), _weights(variant), [(1, 1)])[0]
    for row, (prompt, tokens) in enumerate(zip(PROMPTS, _decoded(variant).tokens, strict=True)):
        chosen, gaps = follow(step, prompt, tokens)
        assert len(chosen) == NUM_TOKENS and all(one.is_near_tie for one in differences(row, tokens, chosen, gaps))


def test_rows_that_are_done_keep_their_state() -> None:
    """A row that has all its tokens is fed on in the others' steps, and none of it counts."""
    step = _step("KDA alone")
    decoder = SpeculativeDecoder(step, num_positions=LENGTH)
    rows = decoder.rows(PROMPTS, NUM_TOKENS)
    rows[1].total = 2
    while not rows[1].is_done:
        decoder.advance(rows)
    caches = {n: t for n, t in step.target.state._buffers.items() if n.endswith(("kda_state", "conv_tail"))}
    before = {name: cache[1].clone() for name, cache in caches.items()}
    while not rows[0].is_done:
        decoder.advance(rows)
    assert len(before) == 4 and all(torch.equal(cache[1], before[name]) for name, cache in caches.items())


def test_a_block_draft_has_seen_every_committed_token_and_nothing_else() -> None:
    """In each step its logits are those of the formulas, given the taps of one plain pass over the text."""
    reference, weights = _decoded("KDA and MLA"), _weights("KDA and MLA")
    texts = [prompt + made for prompt, made in zip(PROMPTS, reference.tokens, strict=True)]
    model, own = random_dflash(TAPPED, 4, 3, LENGTH)
    proposer = Watched(Oracle(3, BLOCK, texts, SIZES.vocab, seed=0), TAPPED.mask_token)
    target = KimiK3(SMALL, 3, LENGTH, ring=BLOCK, taps=TAPPED.taps)
    step = PlainStep(
        plain_graphs(target, weights, [(3, BLOCK)])[0], plain_graphs(model, weights | own, proposer.shapes)
    )
    made = SpeculativeDecoder(step, proposer, num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS)
    assert made.tokens == reference.tokens
    taps = [_taps(text, weights) for text in texts]
    for rows in proposer.seen:
        for row, (text, committed, got) in enumerate(rows):
            block = [text[committed], *[TAPPED.mask_token] * (BLOCK - 1)]
            want = reference_logits(TAPPED, weights | own, block, committed, dict(enumerate(taps[row][:committed])))
            # float32 against float64, and taps of steps of another shape
            torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)


def _taps(text: Sequence[int], weights: Mapping[str, Tensor]) -> Tensor:
    executor = Executor(KimiK3(SMALL, 1, LENGTH, taps=TAPPED.taps), weights)
    executor.step(torch.tensor([text]), torch.arange(len(text))[None])
    return executor.state(StepShape(1, len(text))).buffer("taps")[0].clone()
