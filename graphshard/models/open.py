"""A model from its folder, whichever family its config.json says it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from graphshard.load.checkpoint import Checkpoint
from graphshard.load.recipe import Recipe
from graphshard.models.caches import DEFAULT_CACHE_LENGTH
from graphshard.models.config import MODEL_TYPES, LlamaConfig, llama_config
from graphshard.models.kimi_k3.config import KimiK3ModelConfig, kimi_k3_model_config
from graphshard.models.specs.config_file import read_config_file
from graphshard.models.specs.kimi_k3 import is_kimi_k3

if TYPE_CHECKING:
    from graphshard.runtime.model import SegmentedModel  # imports torch


class OpenedModel(NamedTuple):
    """A model, and how its weights are made of its folder's tensors; no recipe for those that are read as they are.

    `ignore` are patterns of tensors that the folder may hold beside.
    """

    model: SegmentedModel
    recipes: Mapping[str, Recipe]
    ignore: tuple[str, ...]


def load_config(folder: str | Path) -> LlamaConfig | KimiK3ModelConfig:
    """The config in `folder`; both kinds know their `vocab_size` and `max_positions`.

    Raises:
        SpecError: naming the file and the key that is missing, malformed or not supported.
    """
    file = read_config_file(Path(folder))
    if is_kimi_k3(file):
        return kimi_k3_model_config(file)
    kind = file.values.get("model_type")
    if isinstance(kind, str) and kind not in MODEL_TYPES:
        raise file.error("model_type", f"is {kind!r}; supported are {', '.join(MODEL_TYPES)} and kimi_k3")
    return llama_config(file.values, file.where)


def open_model(
    folder: str | Path,
    max_batch_size: int,
    cache_length: int = DEFAULT_CACHE_LENGTH,
    *,
    ring: int = 0,
    compact_ring: bool = False,
    taps: Sequence[int] = (),
    dual: bool = False,
) -> OpenedModel:
    """The model in `folder`; of its checkpoint only the names are read, and those of a Kimi K3 alone.

    `ring`: tokens of a step that may be taken back, see `KimiK3`. A Llama's caches take back any number as they are: it
    has neither ring nor fold, whatever is asked for. `taps`: layers after which the residual stream is an output.
    `dual`: the MLPs of a Llama, the shared experts of a Kimi K3 are blocks, and the recipes turn their down_proj round.

    Raises:
        SpecError: the config is missing, malformed or not supported; `cache_length`, `ring` or `taps` do not fit it.
        LoadError: a Kimi K3's checkpoint cannot be read, or has other tensors.
    """
    config = load_config(folder)
    if isinstance(config, LlamaConfig):
        from graphshard.models.llama import Llama  # imports torch

        llama = Llama(config, max_batch_size, cache_length, taps=taps, dual=dual)
        return OpenedModel(llama, llama.recipes, llama.redundant_tensors)
    from graphshard.models.kimi_k3.model import KimiK3  # imports torch
    from graphshard.models.kimi_k3.recipes import kimi_k3_recipes

    model = KimiK3(config, max_batch_size, cache_length, ring=ring, compact_ring=compact_ring, taps=taps, dual=dual)
    return OpenedModel(model, kimi_k3_recipes(model, Checkpoint(Path(folder)).entries), ())


def open_spec_model(folder: str | Path, *, dual: bool = False) -> SegmentedModel:
    """The model in `folder` for one sequence, to be looked at: nothing but its config is read.

    Raises:
        SpecError: as `open_model`.
    """
    config = load_config(folder)
    if isinstance(config, LlamaConfig):
        from graphshard.models.llama import Llama  # imports torch

        return Llama(config, max_batch_size=1, dual=dual)
    from graphshard.models.kimi_k3.model import KimiK3  # imports torch

    return KimiK3(config, max_batch_size=1, dual=dual)
