"""Pairs from folders: what belongs together opens, what does not is refused by name."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import SMALL as DRAFT
from kimi_k3_reference import SMALL as KIMI
from safetensors.torch import load_file, save_file

import graphshard
from graphshard.comm.group import LocalGroup
from graphshard.core.errors import SpecError
from graphshard.models.config import load_llama_config
from graphshard.models.dflash.config import DFlashConfig
from graphshard.models.dflash.folder import random_dflash, save_dflash
from graphshard.models.kimi_k3.folder import random_pieces, save_kimi_k3
from graphshard.models.llama import random_llama
from graphshard.models.speculative.decoder import SpeculativeDecoder
from graphshard.models.speculative.open import open_pair
from graphshard.models.speculative.proposers import BlockProposer, TokenProposer
from graphshard.runtime.runtime import Runtime

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
KIMI_DRAFT = replace(DRAFT, vocab_size=96, hidden_size=64, taps=(1, 3))


def _llama(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def _draft(folder: Path, config: DFlashConfig = DRAFT) -> Path:
    save_dflash(folder, config, random_dflash(config)[1])
    return folder


def test_a_llama_with_its_own_first_layers(tmp_path: Path) -> None:
    pair = open_pair(_llama(tmp_path / "target"), draft_layers=2, block=5, max_batch_size=3, cache_length=16)
    assert pair.draft_folder == tmp_path / "target" and pair.block == 5
    assert pair.draft.model.spec().borrowed == ("model.embed_tokens.weight", "model.norm.weight")
    assert set(pair.draft.ignore) >= {"model.layers.2.*", *pair.draft.model.spec().borrowed}
    assert not {"model.layers.0.*", "model.layers.1.*"} & set(pair.draft.ignore)
    proposer = pair.proposer(3)
    assert isinstance(proposer, TokenProposer)
    assert (proposer.shapes, proposer.num_replays) == (((3, 2), (3, 1), (3, 1), (3, 1)), 4)


def test_a_llama_with_a_block_draft_whose_head_is_tied_as_its_own_is(tmp_path: Path) -> None:
    pair = open_pair(_llama(tmp_path / "target"), draft=_draft(tmp_path / "draft"), block=3)
    assert pair.draft.model.spec().borrowed == ("model.embed_tokens.weight",)
    proposer = pair.proposer(2)
    assert isinstance(proposer, BlockProposer)
    assert (proposer.shapes, proposer.num_replays, pair.block, pair.draft_folder) == (
        ((2, 3),),
        1,
        3,
        tmp_path / "draft",
    )
    assert open_pair(tmp_path / "target", draft=tmp_path / "draft").block == 4  # the draft's own


def test_a_llama_with_another_llama(tmp_path: Path) -> None:
    small = _llama(tmp_path / "small", num_hidden_layers=1, hidden_size=16)
    pair = open_pair(_llama(tmp_path / "target"), draft=small)
    assert (pair.draft.model.spec().borrowed, pair.draft_folder, pair.block) == ((), small, 4)
    with pytest.raises(SpecError, match="the draft's vocabulary has 60 tokens, the target's 61"):
        open_pair(tmp_path / "target", draft=_llama(small, vocab_size=60))


def test_a_kimi_k3_with_a_block_draft(tmp_path: Path) -> None:
    save_kimi_k3(tmp_path / "target", KIMI, random_pieces(KIMI))
    pair = open_pair(tmp_path / "target", draft=_draft(tmp_path / "draft", KIMI_DRAFT), max_batch_size=2)
    assert pair.draft.model.spec().borrowed == ("model.embed_tokens.weight", "lm_head.weight")
    assert pair.target.recipes and [fold.path for fold in pair.target.model.spec().folds] == ["commit_fold"]
    with pytest.raises(SpecError, match="only a llama's first layers are a draft"):
        open_pair(tmp_path / "target", draft_layers=1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
        ({"vocab_size": 64}, "vocab_size is 64, the target's is 61"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16, the target's is float32"),
        ({"taps": (0, 3)}, r"target_layer_ids \[0, 3\] are not all among the target's 3 layers"),
        ({"block": 2}, "a block of 3 for a draft that was made for 2 to 2"),
    ],
)
def test_a_draft_of_another_target_is_refused(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    draft = _draft(tmp_path / "draft", replace(DRAFT, **change))
    with pytest.raises(SpecError, match=error) as raised:
        open_pair(_llama(tmp_path / "target"), draft=draft, block=3)
    assert str(draft / "config.json") in str(raised.value)


@pytest.mark.parametrize("kind", ["truncated", "block", "other", "kimi_k3"])
def test_pairs_load_from_their_folders(tmp_path: Path, kind: str) -> None:
    """Checkpoints that hold more than a model reads: deeper layers, and what is borrowed."""
    target, draft = _saved_pair(tmp_path, kind)
    named = {"draft": draft} if draft else {"draft_layers": 2}
    pair = open_pair(target, **named, block=3, max_batch_size=2, cache_length=16)
    proposer, group = pair.proposer(2), LocalGroup(1)[0]
    with ExitStack() as stack:
        loaded: list[Runtime] = []
        shapes = list(dict.fromkeys(proposer.shapes))
        for opened, folder, sizes in ((pair.target, target, [(2, 3)]), (pair.draft, pair.draft_folder, shapes)):
            lends = loaded[0] if opened.model.spec().borrowed else None
            loading = {"recipes": opened.recipes, "ignore": opened.ignore, "capture_sizes": sizes, "borrow": lends}
            made = graphshard.compile(opened.model, group, checkpoint=folder, plan="replicated", **loading)
            loaded.append(stack.enter_context(made))
        tokens = [tokens for _, tokens in proposer.shapes]
        speculation = stack.enter_context(graphshard.speculate(*loaded, draft_tokens=tokens))
        step = speculation.graph(2, 3)
        decoders = [SpeculativeDecoder(step, one, num_positions=16) for one in (proposer, None)]
        made, reference = (decoder.decode([[3, 1, 4, 1, 5], [7]], 6) for decoder in decoders)
        assert made.tokens == reference.tokens and made.num_steps <= reference.num_steps


def _saved_pair(folder: Path, kind: str) -> tuple[Path, Path | None]:
    """A target with weights, and a draft that has some of its own; the block draft's folder has a head besides."""
    if kind == "kimi_k3":
        save_kimi_k3(folder / "target", KIMI, random_pieces(KIMI))
        return folder / "target", _draft(folder / "draft", KIMI_DRAFT)
    target = _with_weights(_llama(folder / "target", tie_word_embeddings=False))
    if kind == "other":
        return target, _with_weights(_llama(folder / "draft", num_hidden_layers=1))
    if kind == "truncated":
        return target, None
    draft = _draft(folder / "draft")
    file = draft / "model.safetensors"
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(61, 32)}, file)
    return target, draft


def _with_weights(folder: Path) -> Path:
    save_file(random_llama(load_llama_config(folder))[1], folder / "model.safetensors")
    return folder


def test_one_draft_is_to_be_named(tmp_path: Path) -> None:
    for named in ({}, {"draft": tmp_path, "draft_layers": 1}):
        with pytest.raises(SpecError, match="one of both"):
            open_pair(_llama(tmp_path / "target"), **named)
    with pytest.raises(SpecError, match="block is 1"):
        open_pair(tmp_path / "target", draft_layers=1, block=1)
