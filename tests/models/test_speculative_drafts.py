"""Drafts inside the decoder, over plain states: what they are fed, and that what they propose is of that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dflash_reference import SMALL, reference_logits
from executor import Executor
from speculative_fakes import Oracle, PlainStep, Watched, plain_graphs
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.dflash.folder import random_dflash
from graphshard.models.llama import Llama, random_llama
from graphshard.models.speculative.decoder import SpeculativeDecoder
from graphshard.models.speculative.proposers import BlockProposer, TokenProposer
from graphshard.models.speculative.truncated import TruncatedLlama

TARGET = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [11, 13, 17]]
BLOCK, NUM_TOKENS, LENGTH = 4, 9, 24
WEIGHTS = random_llama(TARGET, seed=8)[1]


def _reference() -> list[list[int]]:
    step = PlainStep(plain_graphs(Llama(TARGET, 3, LENGTH), WEIGHTS, [(3, BLOCK)])[0])
    return SpeculativeDecoder(step, num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS).tokens


@pytest.mark.parametrize("seed", range(4))
def test_a_block_draft_has_seen_every_committed_token_and_nothing_else(seed: int) -> None:
    """In each step its logits are those of the formulas, given the taps of one plain pass over the text."""
    model, own = random_dflash(SMALL, 4, 3, LENGTH)
    target = Llama(TARGET, 3, LENGTH, taps=SMALL.taps)
    weights = WEIGHTS | own
    texts = [prompt + made for prompt, made in zip(PROMPTS, _reference(), strict=True)]
    proposer = Watched(Oracle(3, BLOCK, texts, TARGET.vocab_size, seed), SMALL.mask_token)
    step = PlainStep(plain_graphs(target, WEIGHTS, [(3, BLOCK)])[0], plain_graphs(model, weights, proposer.shapes))
    made = SpeculativeDecoder(step, proposer, num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS)
    assert made.tokens == _reference()
    assert {count for row in made.gained for count in row} >= {1, 2, 3, 4}
    taps = [_taps(text) for text in texts]
    for rows in proposer.seen:
        for row, (text, committed, got) in enumerate(rows):
            block = [text[committed], *[SMALL.mask_token] * (BLOCK - 1)]
            want = reference_logits(SMALL, weights, block, committed, dict(enumerate(taps[row][:committed])))
            # float32 against float64, and taps of steps of another shape
            torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def _taps(text: list[int]) -> Tensor:
    executor = Executor(Llama(TARGET, 1, LENGTH, taps=SMALL.taps), WEIGHTS)
    executor.step(torch.tensor([text]), torch.arange(len(text))[None])
    return executor.state(StepShape(1, len(text))).buffer("taps")[0].clone()


def test_its_own_proposals_give_the_reference_too() -> None:
    model, own = random_dflash(SMALL, 4, 3, LENGTH)
    proposer = BlockProposer(3, BLOCK, SMALL.mask_token)
    target = plain_graphs(Llama(TARGET, 3, LENGTH, taps=SMALL.taps), WEIGHTS, [(3, BLOCK)])[0]
    step = PlainStep(target, plain_graphs(model, WEIGHTS | own, proposer.shapes))
    decoder = SpeculativeDecoder(step, proposer, num_positions=LENGTH)
    for _ in range(2):
        assert decoder.decode(PROMPTS, NUM_TOKENS).tokens == _reference()


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_truncated_target_proposes_and_shares_what_is_outside_its_layers(num_layers: int, tied: bool) -> None:
    config = replace(TARGET, tied_embeddings=tied)
    weights = random_llama(config, seed=8)[1]
    draft = TruncatedLlama(config, num_layers, 3, LENGTH)
    outside = [] if tied else ["lm_head.weight"]
    assert draft.spec().borrowed == ("model.embed_tokens.weight", "model.norm.weight", *outside)
    assert {weight.name.split(".")[2] for weight in draft.spec().owned} == {str(n) for n in range(num_layers)}
    proposer = TokenProposer(3, BLOCK)
    target = plain_graphs(Llama(config, 3, LENGTH), weights, [(3, BLOCK)])[0]
    step = PlainStep(target, plain_graphs(draft, weights, proposer.shapes))
    made = SpeculativeDecoder(step, proposer, num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS)
    assert made.tokens == SpeculativeDecoder(PlainStep(target), num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS).tokens
    if num_layers == config.num_layers:
        assert all(gained[:-1] == [BLOCK] * (len(gained) - 1) for gained in made.gained)


def test_a_truncated_target_has_the_layers_that_it_says() -> None:
    """After its last layer its residual stream is the target's tap there, bit for bit."""
    tokens, positions = torch.tensor([PROMPTS[0]]), torch.arange(9)[None]
    target = Executor(Llama(TARGET, 1, LENGTH, taps=(1, 0)), WEIGHTS)
    plain = Executor(Llama(TARGET, 1, LENGTH), WEIGHTS)
    assert torch.equal(target.step(tokens, positions), plain.step(tokens, positions))
    taps = target.state(StepShape(1, 9)).buffer("taps")
    for num_layers, tap in ((2, taps[..., :32]), (1, taps[..., 32:])):
        draft = Executor(TruncatedLlama(TARGET, num_layers, 1, LENGTH), WEIGHTS)
        draft.step(tokens, positions)
        assert torch.equal(draft.state(StepShape(1, 9)).buffer("hidden"), tap[0])


def test_layers_that_are_not_there_are_refused() -> None:
    for num_layers in (0, 4):
        with pytest.raises(SpecError, match=f"a draft of {num_layers} layers of a llama that has 3"):
            TruncatedLlama(TARGET, num_layers, 1)
    for taps in ((3,), (-1,), (0, 0)):
        with pytest.raises(SpecError, match="are not layers from 0 to 2, each once"):
            Llama(TARGET, 1, taps=taps)
