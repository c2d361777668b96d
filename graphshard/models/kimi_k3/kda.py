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
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from graphshard.models.kimi_k3.declare import Declarations, Source, Work, buffer, normalise, rms_norm
from graphshard.models.specs.kimi_k3 import MERGED
from graphshard.models.specs.replicated import SMALL
from graphshard.runtime.model import StepState

UNIT_EPS = 1e-6


def declare_kda(d: Declarations, input_norm: str, max_batch_size: int) -> None:
    """The attention of a KDA layer, from the norm before it to the residual."""
    c, s, wide = d.config, d.config.sizes, d.config.kda_width
    tail = d.cache("conv_tail", (max_batch_size, s.conv_taps - 1, 3 * wide))
    memory = d.cache("kda_state", (max_batch_size, s.kda_heads, s.kda_head, s.kda_head), "float32")
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
    convs = [
        d.small(f"{name}_conv1d.weight", (wide, 1, s.conv_taps), SMALL["other"], "float32") for name in ("q", "k", "v")
    ]
    d.project(
        "f_a_b_proj",
        {"f_a_proj": s.kda_head, "b_proj": s.kda_heads},
        s.hidden,
        buffer("normed"),
        "kda_f_a_b",
        before=_convolve(tuple(convs), tail),
        keep=MERGED,
    )
    d.project("f_b_proj", {"f_b_proj": wide}, s.kda_head, _low_rank_decay(s.kda_head), "kda_f")
    a_log = d.small("A_log", (s.kda_heads,), SMALL["other"], "float32")
    dt_bias = d.small("dt_bias", (wide,), SMALL["other"], "float32")
    decay = _decay(a_log, dt_bias, s.kda_heads, c.gate_lower_bound)
    d.project("g_proj", {"g_proj": wide}, s.hidden, buffer("normed"), "kda_gate", before=decay)
    o_norm = d.norm("o_norm.weight", s.kda_head)
    d.add("o_proj", s.hidden, wide, _attend(o_norm, memory, s.kda_heads, c.norm_eps))


def advance(memory: Tensor, queries: Tensor, keys: Tensor, values: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The delta rule over the tokens of a step; `memory` `[batch, heads, key, value]` is changed in place.

    Args:
        memory: S before the first token; afterwards, after the last.
        queries: `[batch, t, heads, key]`, as `keys` and `decay`.
        keys: of length 1, or zero for what is no token.
        values: `[batch, t, heads, value]`.
        decay: alpha.
        beta: `[batch, t, heads]`.

    Returns:
        `[batch, t, heads, value]`, S_t^T q_t.
    """
    found = torch.empty_like(values)
    for at in range(keys.shape[1]):
        key = keys[:, at, :, None]  # [batch, heads, 1, key]
        memory.mul_(decay[:, at, :, :, None])
        missing = values[:, at, :, None] - torch.matmul(key, memory)
        memory.addcmul_(key.transpose(2, 3), missing * beta[:, at, :, None, None])
        found[:, at] = torch.matmul(queries[:, at, :, None], memory)[:, :, 0]
    return found


def _convolve(weights: tuple[str, ...], tail: str) -> Work:
    """`kda_mixed = SiLU(convolution over time)` of q, k and v; zero for what is no token. The tail moves on."""

    def run(state: StepState) -> None:
        positions, past = state.buffer("positions"), state.buffer(tail)
        (batch, t), num_past = positions.shape, past.shape[1]
        taps = torch.cat([state.weight(name) for name in weights])[:, 0]  # [q, k and v, taps], the newest tap last
        inputs = torch.cat((past, state.buffer("kda_qkv").view(batch, t, -1)), dim=1)
        mixed = state.buffer("kda_mixed").view(batch, t, -1).zero_()
        for back in range(num_past + 1):
            begin = num_past - back
            is_unseen = (positions < back)[..., None]  # before the sequence began, or no token
            mixed.addcmul_(inputs[:, begin : begin + t].float().masked_fill(is_unseen, 0), taps[:, begin])
        F.silu(mixed, inplace=True)
        num_tokens = (positions >= 0).sum(dim=-1, keepdim=True)
        newest = num_tokens + torch.arange(num_past, device=positions.device)
        past.copy_(inputs.gather(1, newest[..., None].expand(-1, -1, inputs.shape[-1])))

    return run


def _low_rank_decay(width: int) -> Source:
    return lambda state: state.buffer("kda_f_a_b")[:, :width]


def _decay(a_log: str, dt_bias: str, heads: int, lower_bound: float) -> Work:
    """`kda_decay = alpha`: 0 where a sequence begins, 1 for what is no token."""

    def run(state: StepState) -> None:
        positions = state.buffer("positions").view(-1, 1)
        gate = (state.buffer("kda_f").float() + state.weight(dt_bias)).view(len(positions), heads, -1)
        slope = state.weight(a_log).exp()[:, None]
        decay = torch.sigmoid(gate * slope).mul_(lower_bound).exp_().flatten(1)
        state.buffer("kda_decay").copy_(decay.masked_fill(positions == 0, 0).masked_fill(positions < 0, 1))

    return run


def _attend(norm: str, memory: str, heads: int, eps: float) -> Source:
    """What o_proj reads: the rule's output, normed and gated."""

    def source(state: StepState) -> Tensor:
        positions, gate = state.buffer("positions"), state.buffer("kda_gate")
        batch, t = positions.shape
        mixed = state.buffer("kda_mixed").view(batch, t, 3, heads, -1)
        queries, keys, values = mixed.unbind(2)
        width = values.shape[-1]
        beta = torch.sigmoid(state.buffer("kda_f_a_b")[:, width:].float()).view(batch, t, heads)
        states = state.buffer(memory)
        begins = (positions == 0).any(dim=-1)[:, None, None, None]
        states.masked_fill_(begins, 0)  # a decay of 0 is not enough: what was left there may not be finite
        decay = state.buffer("kda_decay").view(batch, t, heads, width)
        found = advance(states, _unit(queries) * width**-0.5, _unit(keys), values, decay, beta)
        found = rms_norm(found, state.weight(norm), eps).view(batch * t, -1)
        return (found * torch.sigmoid(gate.float())).to(gate.dtype)

    return source


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + UNIT_EPS)
