"""What a rank decodes in the sharded tests: a pair of models, compiled and speculated with, against plain states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from dflash_reference import SMALL as DRAFT
from kimi_k3_reference import SIZES, SMALL
from speculative_fakes import PlainStep, plain_graphs
from torch import Tensor

import graphshard
from graphshard.bench.decode import bytes_hash
from graphshard.comm.group import Group
from graphshard.models.config import LlamaConfig
from graphshard.models.dflash.folder import random_dflash
from graphshard.models.kimi_k3.folder import random_kimi_k3
from graphshard.models.llama import random_llama
from graphshard.models.speculative.decoder import SpeculativeDecoder
from graphshard.models.speculative.proposers import BlockProposer, TokenProposer
from graphshard.models.speculative.steps import SpeculativeStepLike
from graphshard.models.speculative.truncated import TruncatedLlama
from graphshard.runtime.model import SegmentedModel

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [7, 5]]
BATCH, BLOCK, NUM_TOKENS, LENGTH = 2, 3, 8, 17
LLAMA = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8
)
KIMI = replace(SMALL, sizes=replace(SIZES, num_layers=3))  # KDA and a dense MLP, KDA and experts, MLA and experts
DFLASH = replace(DRAFT, vocab_size=SIZES.vocab, hidden_size=SIZES.hidden, mask_token=95, block=BLOCK)

Proposer = BlockProposer | TokenProposer


class Pair(NamedTuple):
    target: SegmentedModel
    weights: Mapping[str, Tensor]
    draft: SegmentedModel
    draft_weights: Mapping[str, Tensor]
    """Its own."""
    ignore: tuple[str, ...]
    """Of those, what it does not read."""

    def proposer(self) -> Proposer:
        """Keeps a hash of every proposal's logits."""
        if isinstance(self.draft, TruncatedLlama):
            return _Tokens(BATCH, BLOCK)
        return _Block(BATCH, BLOCK, DFLASH.mask_token)


def pair_of(kind: str) -> Pair:
    """`llama` with its own first layer, or `kimi_k3` with a DFlash."""
    if kind == "llama":
        target, weights = random_llama(LLAMA, 8, BATCH, LENGTH)
        draft = TruncatedLlama(LLAMA, 1, BATCH, LENGTH)
        return Pair(target, weights, draft, weights, draft.redundant_tensors)
    kimi, made = random_kimi_k3(KIMI, 6, BATCH, LENGTH, ring=BLOCK, taps=DFLASH.taps)
    return Pair(kimi, made, *random_dflash(DFLASH, 4, BATCH, LENGTH), ())


class _Hashing:
    hashes: list[str]

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        self.hashes.append(bytes_hash(outputs["logits"]))
        super().read(i, outputs)  # type: ignore[misc]  # of the proposer that this is mixed into


class _Block(_Hashing, BlockProposer):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.hashes = []


class _Tokens(_Hashing, TokenProposer):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.hashes = []


def decoded(step: SpeculativeStepLike, proposer: Proposer) -> list[Any]:
    """Everything that can be told of two runs with the draft, and one without: tokens, gaps, hashes of proposals."""
    told: list[Any] = []
    for one in (proposer, None, proposer):
        made = SpeculativeDecoder(step, one, num_positions=LENGTH).decode(PROMPTS, NUM_TOKENS)
        told.append([made.tokens, made.gaps, made.gained, made.num_steps, proposer.hashes.copy()])  # type: ignore[union-attr]
        proposer.hashes.clear()  # type: ignore[union-attr]
    return told


@cache
def plainly(kind: str) -> list[Any]:
    """As `decoded`, over plain states."""
    pair = pair_of(kind)
    proposer = pair.proposer()
    drafts = plain_graphs(pair.draft, {**pair.weights, **pair.draft_weights}, proposer.shapes)
    return decoded(PlainStep(plain_graphs(pair.target, pair.weights, [(BATCH, BLOCK)])[0], drafts), proposer)


def on_rank(group: Group, kind: str, run: str, choices: dict[str, Any]) -> dict[str, Any]:
    """`decoded` by two runtimes; and what they gathered."""
    torch.set_num_threads(1)
    pair = pair_of(kind)
    proposer = pair.proposer()
    with ExitStack() as stack:
        shapes = list(dict.fromkeys(proposer.shapes))
        target = stack.enter_context(
            graphshard.compile(
                pair.target, group, checkpoint=pair.weights, capture_sizes=[(BATCH, BLOCK)], **_capped(choices)
            )
        )
        draft = stack.enter_context(
            graphshard.compile(
                pair.draft, group, checkpoint=pair.draft_weights, ignore=pair.ignore, capture_sizes=shapes,
                borrow=target, **_capped(choices | {"head": "outside"}),
            )
        )  # fmt: skip
        tokens: Sequence[int] = [tokens for _, tokens in proposer.shapes]
        speculation = stack.enter_context(graphshard.speculate(target, draft, draft_tokens=tokens, run=run))
        told = decoded(speculation.graph(BATCH, BLOCK), proposer)
        return {"told": told, "units": [len(target.plan.units), len(draft.plan.units)], "primes": draft.num_primes}


def _capped(choices: dict[str, Any]) -> dict[str, Any]:
    return {"min_shard_bytes": 0, "units": "layer", "prefetch_depth": 1, **choices}
