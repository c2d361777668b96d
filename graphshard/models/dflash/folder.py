"""DFlash drafts in a folder, config.json and model.safetensors, and with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.load.writer import write_safetensors
from graphshard.models.caches import DEFAULT_CACHE_LENGTH
from graphshard.models.dflash.config import DFlashConfig
from graphshard.models.dflash.model import DFlash


def random_dflash(
    config: DFlashConfig, seed: int = 0, max_batch_size: int = 4, cache_length: int = DEFAULT_CACHE_LENGTH
) -> tuple[DFlash, dict[str, Tensor]]:
    """A draft and random weights for it, without those that it borrows: the same for the same seed everywhere."""
    model = DFlash(config, max_batch_size, cache_length)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in model.spec().owned:
        values = torch.randn(spec.shape, generator=generator)
        scaled = 1 + values / 10 if spec.name.endswith("norm.weight") else values / spec.shape[-1] ** 0.5
        weights[spec.name] = scaled.to(getattr(torch, spec.dtype))
    return model, weights


def save_dflash(folder: str | Path, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors into `folder`, which is made if it is not there.

    Raises:
        SpecError: `tensors` are not the draft's own weights, all of them and no more, in its shapes and dtype.
    """
    folder, specs = Path(folder), DFlash(config, 1, 1).spec().owned
    differing = sorted(set(tensors) ^ {spec.name for spec in specs})
    if differing:
        raise SpecError(
            f"{len(differing)} names are not both among the tensors and this draft's own weights, {differing[0]} for "
            "one: give what random_dflash makes; embedding and head are the target's"
        )
    for spec in specs:
        found = tensors[spec.name]
        if (tuple(found.shape), found.dtype) != (spec.shape, getattr(torch, spec.dtype)):
            raise SpecError(
                f"{spec.name} is {str(found.dtype).removeprefix('torch.')}{list(found.shape)}, this draft has "
                f"{spec.dtype}{list(spec.shape)}; give the config that the tensors were made for"
            )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.values(), indent=2) + "\n", encoding="utf-8")
    data = (tensors[spec.name].contiguous().view(-1).view(torch.uint8).numpy().data for spec in specs)
    write_safetensors(folder / "model.safetensors", specs, data)
