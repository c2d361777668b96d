"""Multi-head latent attention without positions (NoPE), with an output gate, and its segments.

A token is cached as its latent `kv_a_layernorm(kv_a(x))` and `qk_rope` more features that all heads share as keys; they
keep their name but are not rotated. kv_b is absorbed: queries are brought to the latent, attention runs over latents,
and its result is brought to values. `o_proj(attention * sigmoid(g(x)))`, scaled by 1 / sqrt(qk_nope + qk_rope).

Caches have one position more than the model: what is no token is written there, and nobody reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.declare import Declarations, Source, Work, buffer, normalise, rms_norm
from graphshard.models.specs.kimi_k3 import ABSORBED, FUSED
from graphshard.runtime.model import StepState


def declare_mla(d: Declarations, input_norm: str, max_batch_size: int, cache_length: int) -> None:
    """The attention of an MLA layer, from the norm before it to the residual."""
    c, s = d.config, d.config.sizes
    cache = d.cache("latent_cache", (max_batch_size, cache_length + 1, c.cached_width))
    d.activation("mla_attended", c.mla_width)
    d.project(
        "fused_qkv_a_proj",
        {"q_a_proj": s.q_lora, "kv_a_proj_with_mqa": c.cached_width},
        s.hidden,
        buffer("normed"),
        "mla_a",
        before=normalise(input_norm, c.norm_eps),
        keep=FUSED,
    )
    q_norm = d.norm("q_a_layernorm.weight", s.q_lora)
    d.project("q_b_proj", {"q_b_proj": s.heads * c.query_head}, s.q_lora, _low_rank_queries(c, q_norm), "mla_queries")
    kv_norm = d.norm("kv_a_layernorm.weight", s.kv_lora)
    height = s.heads * (s.qk_nope + s.v_head)
    name = "kv_b_proj.weight"
    d.read("kv_b_proj", name, (height, s.kv_lora), _attend(c, d.name_of(name), kv_norm, cache), keep=ABSORBED)
    d.project("g_proj", {"g_proj": c.mla_width}, s.hidden, buffer("normed"), "mla_gate")
    d.add("o_proj", s.hidden, c.mla_width, _gated)


def _low_rank_queries(c: KimiK3ModelConfig, norm: str) -> Source:
    return lambda state: rms_norm(state.buffer("mla_a")[:, : c.sizes.q_lora], state.weight(norm), c.norm_eps)


def _gated(state: StepState) -> Tensor:
    """What o_proj reads."""
    attended = state.buffer("mla_attended")
    return (attended.float() * torch.sigmoid(state.buffer("mla_gate").float())).to(attended.dtype)


def _attend(c: KimiK3ModelConfig, kv_b: str, norm: str, cache_name: str) -> Work:
    """Write the cache, then attend over all of it under the mask, all heads against the one latent of a token."""
    s = c.sizes

    def run(state: StepState) -> None:
        positions, cache = state.buffer("positions"), state.buffer(cache_name)
        (batch, t), length = positions.shape, cache.shape[1] - 1
        _write(cache, positions, _cached(c, state.buffer("mla_a"), state.weight(norm)))
        up = state.weight(kv_b).view(s.heads, s.qk_nope + s.v_head, s.kv_lora)
        queries = state.buffer("mla_queries").view(batch * t, s.heads, c.query_head).transpose(0, 1)
        absorbed = torch.bmm(queries[..., : s.qk_nope], up[:, : s.qk_nope])  # [heads, tokens, kv_lora]
        queries = torch.cat((absorbed, queries[..., s.qk_nope :]), dim=-1)
        queries = queries.view(s.heads, batch, t, -1).transpose(0, 1).reshape(batch, s.heads * t, -1)
        keys = cache[:, :length]
        scores = torch.bmm(queries, keys.transpose(1, 2)).float().view(batch, s.heads, t, length)
        scores = scores.mul_(c.query_head**-0.5) + state.buffer("mask")[:, None]
        weights = scores.softmax(dim=-1).to(cache.dtype).view(batch, s.heads * t, length)
        latents = torch.bmm(weights, keys[..., : s.kv_lora]).view(batch, s.heads, t, s.kv_lora)
        latents = latents.transpose(0, 1).reshape(s.heads, batch * t, s.kv_lora)
        values = torch.bmm(latents, up[:, s.qk_nope :].transpose(1, 2))  # [heads, tokens, v_head]
        state.buffer("mla_attended").view(batch * t, s.heads, s.v_head).copy_(values.transpose(0, 1))

    return run


def _cached(c: KimiK3ModelConfig, projected: Tensor, norm: Tensor) -> Tensor:
    """What is cached of each token."""
    own = projected[:, c.sizes.q_lora :]
    latent, shared_keys = own[:, : c.sizes.kv_lora], own[:, c.sizes.kv_lora :]
    return torch.cat((rms_norm(latent, norm, c.norm_eps), shared_keys), dim=-1)


def _write(cache: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """Put `tokens` at their positions; what is no token, at the position that nobody reads."""
    rows = torch.arange(len(positions), device=positions.device)[:, None]
    where = positions.masked_fill(positions < 0, cache.shape[1] - 1)
    cache.index_put_((rows, where), tokens.view(*positions.shape, -1))
