"""Kimi K3 in a folder, config.json and model.safetensors, and with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.specs import WeightSpec
from graphshard.load.writer import write_safetensors
from graphshard.models.caches import DEFAULT_CACHE_LENGTH
from graphshard.models.kimi_k3.config import KimiK3ModelConfig, load_kimi_k3_config
from graphshard.models.kimi_k3.model import KimiK3


def load_kimi_k3(
    path: str | Path,
    max_batch_size: int,
    cache_length: int = DEFAULT_CACHE_LENGTH,
    *,
    fused: bool = True,
    ring: int = 0,
    compact_ring: bool = False,
    taps: Sequence[int] = (),
    dual: bool = False,
) -> KimiK3:
    """The model whose config.json lies in the folder `path`; its weights are not read (see `kimi_k3_recipes`).

    Raises:
        SpecError: the config is missing, malformed or not supported.
    """
    config = load_kimi_k3_config(Path(path))
    return KimiK3(
        config, max_batch_size, cache_length, fused=fused, ring=ring, compact_ring=compact_ring, taps=taps, dual=dual
    )


def random_kimi_k3(
    config: KimiK3ModelConfig,
    seed: int = 0,
    max_batch_size: int = 4,
    cache_length: int = DEFAULT_CACHE_LENGTH,
    *,
    fused: bool = True,
    ring: int = 0,
    compact_ring: bool = False,
    taps: Sequence[int] = (),
    dual: bool = False,
) -> tuple[KimiK3, dict[str, Tensor]]:
    """A model and random weights for it: the same for the same seed on every machine, fused or not, dual or not."""
    model = KimiK3(
        config, max_batch_size, cache_length, fused=fused, ring=ring, compact_ring=compact_ring, taps=taps, dual=dual
    )
    return model, joined_tensors(model, random_pieces(config, seed))


def random_pieces(config: KimiK3ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors under their published names."""
    generator = torch.Generator().manual_seed(seed)
    pieces = {}
    for specs in KimiK3(config, 1, 1, fused=False).pieces.values():
        for spec in specs:
            values = torch.randn(spec.shape, generator=generator, dtype=torch.float32, device="cpu")
            pieces[spec.name] = _scaled(spec, values).to(getattr(torch, spec.dtype))
    return pieces


def joined_tensors(model: KimiK3, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of `model` from tensors under their published names."""
    made_of, transposed = model.pieces, model.transposed

    def whole(weight: WeightSpec) -> Tensor:
        rows = torch.cat([pieces[piece.name] for piece in made_of[weight.name]])
        return (rows.t().contiguous() if weight.name in transposed else rows).view(weight.shape)

    return {weight.name: whole(weight) for weight in model.spec().weights}


def published_tensors(config: KimiK3ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under their published names, whether they are a fused model's, an unfused one's, or published already.

    Raises:
        SpecError: they are in none of these forms: it names one that is missing or unknown; or of another shape or
            dtype.
    """
    models = [KimiK3(config, 1, 1, fused=fused) for fused in (True, False)]
    forms: list[Mapping[str, tuple[WeightSpec, ...]]] = [model.pieces for model in models]
    for model, made_of in zip(models, forms, strict=True):
        if set(tensors) == set(made_of):
            _check(model.spec().weights, tensors)
            return {name: part for weight in made_of for name, part in _parts(made_of[weight], tensors[weight])}
    published = {spec.name: spec for made in forms[0].values() for spec in made}
    if set(tensors) == set(published):
        _check(published.values(), tensors)
        return dict(tensors)
    differing = min((set(tensors) ^ set(form) for form in (*forms, published)), key=len)
    raise SpecError(
        f"{len(differing)} names are not both among the tensors and in this kimi_k3, {min(differing)} for one: give "
        "all weights of one form, as random_kimi_k3 or random_pieces make them"
    )


def save_kimi_k3(
    folder: str | Path, config: KimiK3ModelConfig, tensors: Mapping[str, Tensor], *, fused: bool = False
) -> None:
    """Write config.json and model.safetensors into `folder`, which is made if it is not there.

    Args:
        folder: where.
        config: of the model.
        tensors: its weights, in any form that `published_tensors` knows (a dual model's are in none of them: give the
            pieces that they were made of).
        fused: write weights as servers hold them, instead of as published.

    Raises:
        SpecError: as `published_tensors`.
    """
    folder, pieces = Path(folder), published_tensors(config, tensors)
    model = KimiK3(config, 1, 1, fused=True)
    specs = list(model.spec().weights) if fused else [spec for made in model.pieces.values() for spec in made]
    tensors = joined_tensors(model, pieces) if fused else pieces
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.values(), indent=2) + "\n", encoding="utf-8")
    write_safetensors(folder / "model.safetensors", specs, (_bytes(tensors[spec.name]) for spec in specs))


def _check(specs: Iterable[WeightSpec], tensors: Mapping[str, Tensor]) -> None:
    for spec in specs:
        found = tensors[spec.name]
        if (tuple(found.shape), found.dtype) != (spec.shape, getattr(torch, spec.dtype)):
            raise SpecError(
                f"{spec.name} is {str(found.dtype).removeprefix('torch.')}{list(found.shape)}, this kimi_k3 has "
                f"{spec.dtype}{list(spec.shape)}; give the config that the tensors were made for"
            )


def _parts(specs: Sequence[WeightSpec], weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The published tensors inside a weight, by name."""
    rows = weight.reshape(-1, *specs[0].shape[1:])
    begin = 0
    for spec in specs:
        yield spec.name, rows[begin : begin + spec.shape[0]]
        begin += spec.shape[0]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def _scaled(spec: WeightSpec, values: Tensor) -> Tensor:
    """Standard normal `values` brought to the size that keeps a deep model's activations in bounds."""
    if spec.name.endswith("norm.weight"):
        return 1 + values / 10
    if len(spec.shape) == 1:
        return values / 4  # decays and the router's bias
    return values / float(spec.shape[-1] ** 0.5)
