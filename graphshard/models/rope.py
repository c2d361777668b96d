"""Rotary position embeddings, computed on the device inside the step: no table, no constant from the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphshard.models.config import RopeConfig


def rotations(positions: Tensor, head_dim: int, rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines `[n, head_dim]` (float32) for `positions` `[n]`, to be used by `rotate_`."""
    angles = positions.float()[:, None] * _frequencies(head_dim, rope, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turn `heads` `[n, num_heads, head_dim]` in place; `cos` and signed `sin` are `[n, 1, head_dim]`.

    Exchanging the halves brings each feature's partner to its place, and the sine carries the sign.
    """
    first, second = heads.chunk(2, dim=-1)
    partners = torch.cat((second, first), dim=-1)  # not `roll`: it has no out variant of its own, cat has
    heads.mul_(cos).addcmul_(partners, sin)


def _frequencies(head_dim: int, rope: RopeConfig, device: torch.device) -> Tensor:
    """Inverse frequencies `[head_dim / 2]`, as `transformers` computes them."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended.

    Source: `transformers`, modeling_rope_utils, _compute_llama3_parameters.
    """
    low, high, context = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / rope.factor, frequencies)
    smooth = (context / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, blended, stretched)
