"""Which draft `generate --speculative` decodes with: what was asked for, or a default, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.models.config import LlamaConfig
from graphshard.models.dflash.config import DFlashConfig, is_dflash, load_dflash_config
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.open import load_config
from graphshard.models.specs.config_file import read_config_file
from graphshard.models.speculative.acceptance import DEFAULT_BLOCK

RANDOM = "random"
RANDOM_LAYERS = 5
RANDOM_BLOCK = 8
MAX_TAPS = 4
REPLAYS = f"the default: {DEFAULT_BLOCK - 1} runs of the draft before each of the target"
"""Why a step has so many places whose draft is a language model."""


@dataclass(frozen=True)
class DraftAsked:
    """What the options said; None: nothing."""

    draft: str | None
    draft_layers: int | None
    block: int | None


@dataclass(frozen=True)
class DraftChoice:
    """The draft that ranks open."""

    what: str
    """In words."""
    folder: str | None
    layers: int | None
    """So many first layers of the target; None: the folder's."""
    block: int
    reasons: tuple[str, ...]

    def request(self) -> dict[str, Any]:
        """As ranks are told."""
        return {"draft": self.folder, "draft_layers": self.layers, "block": self.block}

    def told(self) -> dict[str, Any]:
        """As the answer says it."""
        return {"what": self.what, "layers": self.layers, "block": self.block, "reasons": list(self.reasons)}


@contextmanager
def chosen_draft(folder: Path, asked: DraftAsked) -> Iterator[DraftChoice]:
    """The draft for the model in `folder`; one with random weights lies in a folder that goes afterwards.

    Raises:
        SpecError: there is none of this kind for this model, and what there is.
    """
    config = load_config(folder)
    if asked.draft == RANDOM:
        with tempfile.TemporaryDirectory(prefix="graphshard-draft-") as place:
            made = random_draft_config(config, asked.block)
            _save_random(Path(place), made)
            reasons = (_block_reason(asked.block, made.block, "the default of a draft that fills a block"),)
            what = f"a DFlash of {made.num_layers} layers with random weights: it shows the steps, and guesses nothing"
            yield DraftChoice(what, place, None, made.block, reasons)
    elif asked.draft is not None:
        yield _of_folder(Path(asked.draft), asked.block)
    else:
        yield _of_target(folder, config, asked)


def random_draft_config(target: LlamaConfig | KimiK3ModelConfig, block: int | None) -> DFlashConfig:
    """A DFlash for `target`, as large as a layer of it is wide, that reads up to four of its layers, evenly spread."""
    if isinstance(target, LlamaConfig):
        hidden, intermediate, num_layers = target.hidden_size, target.intermediate_size, target.num_layers
        heads, head = target.num_heads, target.head_dim
    else:
        sizes = target.sizes
        hidden, intermediate, num_layers = sizes.hidden, sizes.intermediate, sizes.num_layers
        heads, head = sizes.heads, sizes.v_head + sizes.v_head % 2  # rotary embeddings turn pairs
    num_taps = min(MAX_TAPS, num_layers)
    return DFlashConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=RANDOM_LAYERS,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head,
        taps=tuple(num_layers * (i + 1) // num_taps - 1 for i in range(num_taps)),
        mask_token=target.vocab_size - 1,
        block=block or RANDOM_BLOCK,
        dtype=target.dtype,
        max_positions=target.max_positions,
    )


def _of_folder(folder: Path, block: int | None) -> DraftChoice:
    file = read_config_file(folder)
    if is_dflash(file):
        made = load_dflash_config(folder)
        size, reason = block or made.block, _block_reason(block, made.block, "what the draft was made for")
        what = f"the DFlash in {folder}, {made.num_layers} layers"
    else:
        size, reason = block or DEFAULT_BLOCK, _block_reason(block, DEFAULT_BLOCK, REPLAYS)
        what = f"the model in {folder}"
    return DraftChoice(what, str(folder), None, size, (reason,))


def _of_target(folder: Path, config: LlamaConfig | KimiK3ModelConfig, asked: DraftAsked) -> DraftChoice:
    """The target's own first layers."""
    if not isinstance(config, LlamaConfig):
        raise SpecError(
            f"{folder} is a kimi_k3, whose own first layers are no draft for it: give --draft FOLDER of a DFlash made "
            "for it (graphshard.models.dflash.folder.save_dflash writes one from its weights), or --draft random to "
            "see the steps with one that guesses nothing"
        )
    layers, why = asked.draft_layers, "asked for"
    if layers is None:
        layers, why = default_layers(config.num_layers)
    if not 1 <= layers < config.num_layers:
        raise SpecError(
            f"a draft of {layers} layers of a model of {config.num_layers}: that would be the model itself, or more; "
            f"use --draft-layers 1 to {config.num_layers - 1}"
        )
    reasons = (f"draft layers {layers}: {why}", _block_reason(asked.block, DEFAULT_BLOCK, REPLAYS))
    what = f"the model's own first {layers} of {config.num_layers} layers"
    return DraftChoice(what, None, layers, asked.block or DEFAULT_BLOCK, reasons)


def default_layers(num_layers: int) -> tuple[int, str]:
    """How many first layers make a draft, and why. Figures: SmolLM2-135M, the built-in prompts, blocks of 4."""
    why = (
        "the default, 7 of 8: a cut that nobody trained guesses little (SmolLM2: 1.1 tokens a step with half of its "
        "layers, 1.6 with 26 of 30), so this shows the steps and saves no time"
    )
    return max(1, num_layers * 7 // 8), why


def _block_reason(asked: int | None, default: int, why: str) -> str:
    return f"block {default}: {why}" if asked is None else f"block {asked}: asked for"


def _save_random(folder: Path, config: DFlashConfig) -> None:
    from graphshard.models.dflash.folder import random_dflash, save_dflash  # imports torch

    save_dflash(folder, config, random_dflash(config)[1])
