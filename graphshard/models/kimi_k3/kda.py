"""Kimi Delta Attention: a gated delta rule with a decay for each channel, and its segments.

For each head, with q and k of length 1 after a short causal convolution and SiLU, and v after the same:

    S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T      o_t = S_t^T q_t / sqrt(head)
    alpha_t = exp(lower_bound * sigmoid(exp(A_log) * (f_b(f_a(x)) + dt_bias)))  beta_t = sigmoid(b(x))

and then `o_proj(RMSNorm(o) * sigmoid(g(x)))`. Source: Kimi Linear (arXiv 2510.26692) for the rule, and
flash-linear-attention's `fla.ops.kda` for the gate with a lower bound and for q and k, `x / sqrt(sum(x * x) + 1e-6)`.

What a sequence leaves behind: the state S `[heads, key, value]` in float32, and the last inputs of the convolution.
A token at position 0 begins anew: it sees neither. A token at a negative position is none: it changes neither.
Tokens of a step are taken one after the other, so a step of t tokens runs the very operations of t steps here; a prompt
of many tokens is slow for the same reason (kernels take such prompts in chunks).

A model with a ring (`ring.py`) leaves both as they are in a step, which computes on a copy; a fold takes them past the
tokens that are accepted later, by the same functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.declare import Declarations, Source, Work, buffer, normalise, rms_norm
from graphshard.models.specs.kimi_k3 import MERGED
from graphshard.models.specs.replicated import SMALL
from graphshard.runtime.model import StepState

UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KdaLayer:
    """What one layer's rule goes by: names of weights and caches."""

    config: KimiK3ModelConfig
    convs: tuple[str, ...]
    f_b: str
    a_log: str
    dt_bias: str
    tail: str
    memory: str


def declare_kda(d: Declarations, input_norm: str, max_batch_size: int, *, is_kept: bool = False) -> KdaLayer:
    """The attention of a KDA layer, from the norm before it to the residual. `is_kept`: a step changes no state."""
    c, s, wide = d.config, d.config.sizes, d.config.kda_width
    layer = KdaLayer(
        c,
        convs=tuple(d.name_of(f"{name}_conv1d.weight") for name in ("q", "k", "v")),
        f_b=d.name_of("f_b_proj.weight"),
        a_log=d.name_of("A_log"),
        dt_bias=d.name_of("dt_bias"),
        tail=d.cache("conv_tail", (max_batch_size, s.conv_taps - 1, 3 * wide)),
        memory=d.cache("kda_state", (max_batch_size, s.kda_heads, s.kda_head, s.kda_head), "float32"),
    )
    d.activation("kda_mixed", 3 * wide, "float32")
    d.activation("kda_decay", wide, "float32")
    d.project(
        "qkv_proj",
        dict.fromkeys(("q_proj", "k_proj", "v_proj"), wide),
        s.hidden,
        buffer("normed"),
        "kda_qkv",
        before=normalise(input_norm, c.norm_eps),
    )
    for name in ("q", "k", "v"):
        d.small(f"{name}_conv1d.weight", (wide, 1, s.conv_taps), SMALL["other"], "float32")
    d.project(
        "f_a_b_proj",
        {"f_a_proj": s.kda_head, "b_proj": s.kda_heads},
        s.hidden,
        buffer("normed"),
        "kda_f_a_b",
        before=lambda state: convolve(state, layer, state.buffer("positions"), is_kept=is_kept),
        keep=MERGED,
    )
    d.project("f_b_proj", {"f_b_proj": wide}, s.kda_head, low_rank_decay(c), "kda_f")
    d.small("A_log", (s.kda_heads,), SMALL["other"], "float32")
    d.small("dt_bias", (wide,), SMALL["other"], "float32")
    d.project("g_proj", {"g_proj": wide}, s.hidden, buffer("normed"), "kda_gate", before=_decay(layer))
    o_norm = d.norm("o_norm.weight", s.kda_head)
    d.add("o_proj", s.hidden, wide, _attend(layer, o_norm, is_kept))
    return layer


@dataclass(frozen=True, slots=True)
class Delta:
    """What the rule does to a state with the tokens of a step, one after the other."""

    keys: Tensor
    """`[batch, t, heads, key]`, of length 1, or zero for what is no token."""
    values: Tensor
    """`[batch, t, heads, value]`."""
    decay: Tensor
    """alpha, `[batch, t, heads, key]`."""
    beta: Tensor
    """`[batch, t, heads]`."""

    def apply(self, memory: Tensor, at: int) -> None:
        """Take S, `memory` `[batch, heads, key, value]`, past token `at`, in place."""
        key = self.keys[:, at, :, None]  # [batch, heads, 1, key]
        memory.mul_(self.decay[:, at, :, :, None])
        missing = self.values[:, at, :, None] - torch.matmul(key, memory)
        memory.addcmul_(key.transpose(2, 3), missing * self.beta[:, at, :, None, None])


def convolve(state: StepState, layer: KdaLayer, positions: Tensor, *, is_kept: bool) -> None:
    """`kda_mixed = SiLU(convolution over time)` of q, k and v; zero for what is no token.

    The tail moves on, unless it `is_kept`.
    """
    past = state.buffer(layer.tail)
    (batch, t), num_past = positions.shape, past.shape[1]
    taps = torch.cat([state.weight(name) for name in layer.convs])[:, 0]  # [q, k and v, taps], the newest tap last
    inputs = torch.cat((past, state.buffer("kda_qkv").view(batch, t, -1)), dim=1)
    mixed = state.buffer("kda_mixed").view(batch, t, -1).zero_()
    for back in range(num_past + 1):
        begin = num_past - back
        is_unseen = (positions < back)[..., None]  # before the sequence began, or no token
        mixed.addcmul_(inputs[:, begin : begin + t].float().masked_fill(is_unseen, 0), taps[:, begin])
    F.silu(mixed, inplace=True)
    if not is_kept:
        num_tokens = (positions >= 0).sum(dim=-1, keepdim=True)
        newest = num_tokens + torch.arange(num_past, device=positions.device)
        past.copy_(inputs.gather(1, newest[..., None].expand(-1, -1, inputs.shape[-1])))


def low_rank_decay(c: KimiK3ModelConfig) -> Source:
    """What f_b_proj reads: f_a's columns."""
    return lambda state: state.buffer("kda_f_a_b")[:, : c.sizes.kda_head]


def set_decay(state: StepState, layer: KdaLayer, positions: Tensor) -> None:
    """`kda_decay = alpha`: 0 where a sequence begins, 1 for what is no token."""
    where = positions.view(-1, 1)
    gate = (state.buffer("kda_f").float() + state.weight(layer.dt_bias)).view(
        len(where), layer.config.sizes.kda_heads, -1
    )
    slope = state.weight(layer.a_log).exp()[:, None]
    decay = torch.sigmoid(gate * slope).mul_(layer.config.gate_lower_bound).exp_().flatten(1)
    state.buffer("kda_decay").copy_(decay.masked_fill(where == 0, 0).masked_fill(where < 0, 1))


def delta_of(state: StepState, layer: KdaLayer) -> Delta:
    """The tokens of this step, after `convolve` and `set_decay`."""
    _, keys, values = _mixed(state, layer)
    batch, t, heads, width = values.shape
    beta = torch.sigmoid(state.buffer("kda_f_a_b")[:, width:].float()).view(batch, t, heads)
    return Delta(_unit(keys), values, state.buffer("kda_decay").view(batch, t, heads, width), beta)


def begins_anew(positions: Tensor) -> Tensor:
    """Rows whose states are to be emptied first, as `[batch, 1, 1, 1]`: what was left there may not be finite."""
    return (positions == 0).any(dim=-1)[:, None, None, None]


def _decay(layer: KdaLayer) -> Work:
    return lambda state: set_decay(state, layer, state.buffer("positions"))


def _attend(layer: KdaLayer, norm: str, is_kept: bool) -> Source:
    """What o_proj reads: the rule's output S_t^T q_t, normed and gated."""

    def source(state: StepState) -> Tensor:
        gate, memory = state.buffer("kda_gate"), state.buffer(layer.memory)
        queries, delta = _mixed(state, layer)[0], delta_of(state, layer)
        queries = _unit(queries) * queries.shape[-1] ** -0.5
        begins = begins_anew(state.buffer("positions"))
        memory = memory.masked_fill(begins, 0) if is_kept else memory.masked_fill_(begins, 0)
        found = torch.empty_like(delta.values)
        for at in range(found.shape[1]):
            delta.apply(memory, at)
            found[:, at] = torch.matmul(queries[:, at, :, None], memory)[:, :, 0]
        found = rms_norm(found, state.weight(norm), layer.config.norm_eps).view(len(gate), -1)
        return (found * torch.sigmoid(gate.float())).to(gate.dtype)

    return source


def _mixed(state: StepState, layer: KdaLayer) -> tuple[Tensor, ...]:
    """q, k and v, `[batch, t, heads, width]`, not yet of length 1."""
    batch, t = state.shape.batch_size, state.shape.tokens_per_sequence
    return state.buffer("kda_mixed").view(batch, t, 3, layer.config.sizes.kda_heads, -1).unbind(2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + UNIT_EPS)
