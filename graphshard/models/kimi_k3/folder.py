"""Kimi K3 in a folder, config.json and model.safetensors, and with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.specs import WeightSpec
from graphshard.load.writer import write_safetensors
from graphshard.models.kimi_k3.config import KimiK3ModelConfig, load_kimi_k3_config
from graphshard.models.kimi_k3.model import DEFAULT_CACHE_LENGTH, KimiK3


def load_kimi_k3(
    path: str | Path, max_batch_size: int, cache_length: int = DEFAULT_CACHE_LENGTH, *, fused: bool = True
) -> KimiK3:
    """The model whose config.json lies in the folder `path`; its weights are not read (see `kimi_k3_recipes`).

    Raises:
        SpecError: the config is missing, malformed or not supported.
    """
    return KimiK3(load_kimi_k3_config(Path(path)), max_batch_size, cache_length, fused=fused)


def random_kimi_k3(
    config: KimiK3ModelConfig,
    seed: int = 0,
    max_batch_size: int = 4,
    cache_length: int = DEFAULT_CACHE_LENGTH,
    *,
    fused: bool = True,
) -> tuple[KimiK3, dict[str, Tensor]]:
    """A model and random weights for it: the same for the same seed on every machine, fused or not."""
    model = KimiK3(config, max_batch_size, cache_length, fused=fused)
    return model, joined_tensors(model, random_pieces(config, seed))


def random_pieces(config: KimiK3ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under their published names."""
    generator = torch.Generator().manual_seed(seed)
    pieces = {}
    for specs in KimiK3(config, 1, 1, fused=False).pieces.values():
        for spec in specs:
            values = torch.randn(spec.shape, generator=generator)
            pieces[spec.name] = _scaled(spec, values).to(getattr(torch, spec.dtype))
    return pieces


def joined_tensors(model: KimiK3, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `model` from tensors under their published names."""
    made_of = model.pieces
    return {
        weight.name: torch.cat([pieces[piece.name] for piece in made_of[weight.name]]).view(weight.shape)
        for weight in model.spec().weights
    }


def save_kimi_k3(folder: Path, config: KimiK3ModelConfig, pieces: Mapping[str, Tensor], *, fused: bool = False) -> None:
    """Write config.json and model.safetensors into `folder`; `pieces` are the tensors under their published names.

    Args:
        folder: is made if it is not there.
        config: of the model.
        pieces: as `random_pieces` makes them.
        fused: write weights as servers hold them, instead of as published.

    Raises:
        SpecError: a tensor is missing, or one is not of this model.
    """
    model = KimiK3(config, 1, 1, fused=True)
    published = [spec for specs in model.pieces.values() for spec in specs]
    differing = {spec.name for spec in published} ^ set(pieces)
    if differing:
        raise SpecError(
            f"{len(differing)} names are not both in the model and among the tensors, {sorted(differing)[0]} for one: "
            "give all tensors under their published names, as random_pieces does"
        )
    specs = list(model.spec().weights) if fused else published
    tensors = joined_tensors(model, pieces) if fused else pieces
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.values(), indent=2) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", specs, (_bytes(tensors[spec.name]) for spec in specs))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _scaled(spec: WeightSpec, values: Tensor) -> Tensor:
    """Standard normal `values` brought to the size that keeps a deep model's activations in bounds."""
    if spec.name.endswith("norm.weight"):
        return 1 + values / 10
    if len(spec.shape) == 1:
        return values / 4  # decays and the router's bias
    return values / float(spec.shape[-1] ** 0.5)
