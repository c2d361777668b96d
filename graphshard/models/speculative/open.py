"""A target and its draft from folders, and who feeds the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from graphshard.core.errors import SpecError
from graphshard.models.caches import DEFAULT_CACHE_LENGTH
from graphshard.models.config import LlamaConfig, llama_config
from graphshard.models.dflash.config import DFlashConfig, dflash_config, is_dflash
from graphshard.models.dflash.model import EMBEDDING, HEAD, DFlash
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.llama import Llama
from graphshard.models.open import OpenedModel, load_config, open_model
from graphshard.models.specs.config_file import read_config_file
from graphshard.models.speculative.acceptance import DEFAULT_BLOCK
from graphshard.models.speculative.proposers import BlockProposer, TokenProposer, check_block
from graphshard.models.speculative.truncated import TruncatedLlama

TargetConfig = LlamaConfig | KimiK3ModelConfig


@dataclass(frozen=True)
class OpenedPair:
    """Both models, to be compiled one after the other, the draft with `borrow=` the target's runtime."""

    target: OpenedModel
    draft: OpenedModel
    draft_folder: Path
    """Whose checkpoint holds the draft's own weights."""
    block: int
    """Tokens per sequence of the target's step."""
    proposer: Callable[[int], BlockProposer | TokenProposer]
    """For a batch size: who feeds the draft. It knows the draft's step shapes and how many replays a step has."""


def open_pair(
    folder: str | Path,
    *,
    draft: str | Path | None = None,
    draft_layers: int | None = None,
    block: int | None = None,
    max_batch_size: int = 1,
    cache_length: int = DEFAULT_CACHE_LENGTH,
) -> OpenedPair:
    """The target in `folder`, made to be verified by blocks, and a draft for it.

    Args:
        folder: the target's.
        draft: a folder with a DFlash draft for this target, or with a llama of the same vocabulary.
        draft_layers: instead of `draft`: so many first layers of the target, which is a llama then.
        block: tokens that a step verifies, at least 2; by default what the draft was made for.
        max_batch_size: of both.
        cache_length: of both, see `needed_positions`.

    Raises:
        SpecError: a config is missing, malformed or not supported; both or none of `draft` and `draft_layers` are
            given; or the two do not belong together.
        LoadError: a Kimi K3's checkpoint cannot be read, or has other tensors.
    """
    folder, config = Path(folder), load_config(folder)
    if (draft is None) == (draft_layers is None):
        raise SpecError("give a draft's folder, or a number of the target's own layers: one of both")
    if block is not None:
        check_block(block)
    if draft_layers is not None:
        return _open_truncated(folder, config, draft_layers, block or DEFAULT_BLOCK, max_batch_size, cache_length)
    assert draft is not None
    file, sizes = read_config_file(Path(draft)), (max_batch_size, cache_length)
    if is_dflash(file):
        block_config = _fitting(dflash_config(file), config, file.where, block)
        target = open_model(folder, *sizes, ring=block_config.block, taps=block_config.taps)
        opened = OpenedModel(DFlash(block_config, *sizes), {}, (EMBEDDING, HEAD))
        return OpenedPair(target, opened, Path(draft), block_config.block, _block_proposer(block_config))
    one = llama_config(file.values, file.where)
    if one.vocab_size != config.vocab_size:
        raise SpecError(
            f"{file.where}: the draft's vocabulary has {one.vocab_size} tokens, the target's {config.vocab_size}: "
            "give a draft with the target's tokenizer"
        )
    llama, block = Llama(one, *sizes), block or DEFAULT_BLOCK
    target = open_model(folder, *sizes, ring=block)
    return OpenedPair(target, OpenedModel(llama, {}, llama.redundant_tensors), Path(draft), block, _by_tokens(block))


def _open_truncated(
    folder: Path, config: TargetConfig, num_layers: int, block: int, max_batch_size: int, cache_length: int
) -> OpenedPair:
    if not isinstance(config, LlamaConfig):
        raise SpecError(f"{folder}: only a llama's first layers are a draft; give a draft's folder")
    draft = TruncatedLlama(config, num_layers, max_batch_size, cache_length)
    target = open_model(folder, max_batch_size, cache_length)
    return OpenedPair(target, OpenedModel(draft, {}, draft.redundant_tensors), folder, block, _by_tokens(block))


def _by_tokens(block: int) -> Callable[[int], TokenProposer]:
    return lambda batch_size: TokenProposer(batch_size, block)


def _block_proposer(config: DFlashConfig) -> Callable[[int], BlockProposer]:
    return lambda batch_size: BlockProposer(batch_size, config.block, config.mask_token)


def _fitting(draft: DFlashConfig, target: TargetConfig, where: str, block: int | None) -> DFlashConfig:
    """`draft` with `block` places, for `target`, whose head it borrows.

    Raises:
        SpecError: they do not belong together; it names what differs.
    """
    if isinstance(target, LlamaConfig):
        hidden, num_layers, tied = target.hidden_size, target.num_layers, target.tied_embeddings
    else:
        hidden, num_layers, tied = target.sizes.hidden, target.sizes.num_layers, False
    pairs = {
        "hidden_size": (draft.hidden_size, hidden),
        "vocab_size": (draft.vocab_size, target.vocab_size),
        "dtype": (draft.dtype, target.dtype),
    }
    for key, (mine, wanted) in pairs.items():
        if mine != wanted:
            raise SpecError(f"{where}: {key} is {mine}, the target's is {wanted}: give a draft made for this target")
    if max(draft.taps) >= num_layers:
        raise SpecError(
            f"{where}: target_layer_ids {list(draft.taps)} are not all among the target's {num_layers} layers: give a "
            "draft made for this target"
        )
    if block is not None and not 2 <= block <= draft.block:
        raise SpecError(
            f"{where}: a block of {block} for a draft that was made for 2 to {draft.block}: use one of those"
        )
    return replace(draft, block=block or draft.block, tied_embeddings=tied)
