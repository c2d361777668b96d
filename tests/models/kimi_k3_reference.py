"""Kimi K3 from its formulas: whole sequences at once, in float64, token by token and head by head; and a small config.

Weights have their published names. Nothing here is shared with the model: no cache, no step, no fusing, no absorption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.specs.kimi_k3 import KimiK3Config

SIZES = KimiK3Config(
    hidden=64, vocab=96, num_layers=4, mla_layers=frozenset({2}), dense_layers=1, intermediate=96, heads=2, q_lora=32,
    kv_lora=32, qk_nope=16, qk_rope=16, v_head=16, kda_heads=2, kda_head=32, conv_taps=4, experts=6, top_k=2,
    expert_size=32, latent=32, shared=64,
)  # fmt: skip
SMALL = KimiK3ModelConfig(SIZES, dtype="float32")


def reference_logits(config: KimiK3ModelConfig, pieces: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits `[batch, t, vocab]` of the sequences `tokens` `[batch, t]`, float64."""
    weights = {name: tensor.double() for name, tensor in pieces.items()}
    return torch.stack([_Reference(config, weights).sequence(row) for row in tokens])


class _Reference:
    def __init__(self, config: KimiK3ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.c, self.s, self.all, self.prefix = config, config.sizes, weights, ""

    def w(self, name: str) -> Tensor:
        return self.all[self.prefix + name]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w(f"{name}.weight").T

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.c.norm_eps).sqrt() * self.w(f"{name}.weight")

    def situ(self, gate: Tensor, up: Tensor) -> Tensor:
        b, linear = self.c.situ_beta, self.c.situ_linear_beta
        return b * torch.tanh(gate / b) / (1 + torch.exp(-gate)) * linear * torch.tanh(up / linear)

    def sequence(self, tokens: Tensor) -> Tensor:
        x = self.all["model.embed_tokens.weight"][tokens]
        for layer in range(self.s.num_layers):
            self.prefix = f"model.layers.{layer}."
            normed = self.norm("input_layernorm", x)
            self.prefix = f"model.layers.{layer}.self_attn."
            x = x + (self.mla(normed) if layer in self.s.mla_layers else self.kda(normed))
            self.prefix = f"model.layers.{layer}."
            normed = self.norm("post_attention_layernorm", x)
            x = x + (self.mlp("mlp", normed) if layer < self.s.dense_layers else self.moe(normed))
        self.prefix = ""
        return self.linear("lm_head", self.norm("model.norm", x))

    def conv(self, name: str, x: Tensor) -> Tensor:
        taps = self.w(f"{name}_conv1d.weight")[:, 0]
        padded = torch.cat((torch.zeros(self.s.conv_taps - 1, x.shape[1], dtype=x.dtype), x))
        y = torch.stack([(padded[t : t + self.s.conv_taps] * taps.T).sum(0) for t in range(len(x))])
        return (y / (1 + torch.exp(-y))).view(len(x), self.s.kda_heads, self.s.kda_head)

    def kda(self, x: Tensor) -> Tensor:
        s = self.s
        q, k, v = (self.conv(name, self.linear(f"{name}_proj", x)) for name in "qkv")
        q = q / (q.square().sum(-1, keepdim=True) + 1e-6).sqrt() / math.sqrt(s.kda_head)
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        gate = (self.linear("f_b_proj", self.linear("f_a_proj", x)) + self.w("dt_bias")).view_as(q)
        alpha = torch.exp(self.c.gate_lower_bound * torch.sigmoid(self.w("A_log").exp()[:, None] * gate))
        beta = torch.sigmoid(self.linear("b_proj", x))
        out = torch.zeros_like(v)
        for head in range(s.kda_heads):
            state = torch.zeros(s.kda_head, s.kda_head, dtype=x.dtype)
            for t in range(len(x)):
                key = k[t, head]
                forget = torch.eye(s.kda_head, dtype=x.dtype) - beta[t, head] * torch.outer(key, key)
                state = forget @ torch.diag(alpha[t, head]) @ state + beta[t, head] * torch.outer(key, v[t, head])
                out[t, head] = state.T @ q[t, head]
        gated = self.norm("o_norm", out).flatten(1) * torch.sigmoid(self.linear("g_proj", x))
        return self.linear("o_proj", gated)

    def mla(self, x: Tensor) -> Tensor:
        s = self.s
        q = self.linear("q_b_proj", self.norm("q_a_layernorm", self.linear("q_a_proj", x)))
        q = q.view(len(x), s.heads, s.qk_nope + s.qk_rope)
        latent, shared = self.linear("kv_a_proj_with_mqa", x).split((s.kv_lora, s.qk_rope), -1)
        kv = self.linear("kv_b_proj", self.norm("kv_a_layernorm", latent)).view(len(x), s.heads, s.qk_nope + s.v_head)
        out = torch.zeros(len(x), s.heads, s.v_head, dtype=x.dtype)
        for head in range(s.heads):
            keys = torch.cat((kv[:, head, : s.qk_nope], shared), -1)
            scores = q[:, head] @ keys.T / math.sqrt(s.qk_nope + s.qk_rope)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            out[:, head] = scores.softmax(-1) @ kv[:, head, s.qk_nope :]
        return self.linear("o_proj", out.flatten(1) * torch.sigmoid(self.linear("g_proj", x)))

    def mlp(self, name: str, x: Tensor) -> Tensor:
        inner = self.situ(self.linear(f"{name}.gate_proj", x), self.linear(f"{name}.up_proj", x))
        return self.linear(f"{name}.down_proj", inner)

    def moe(self, x: Tensor) -> Tensor:
        self.prefix += "block_sparse_moe."
        scores = torch.sigmoid(self.linear("gate", x))
        latent = self.linear("routed_expert_down_proj", x)
        routed = torch.zeros_like(latent)
        for t, row in enumerate(scores + self.w("gate.e_score_correction_bias")):
            chosen = sorted(range(self.s.experts), key=lambda e: -float(row[e]))[: self.s.top_k]
            total = sum(float(scores[t, e]) for e in chosen) if self.s.top_k > 1 else 1.0
            for e in chosen:
                inner = self.situ(*(self.linear(f"experts.{e}.{name}", latent[t]) for name in ("w1", "w3")))
                share = self.c.routed_scale * float(scores[t, e]) / total
                routed[t] += share * self.linear(f"experts.{e}.w2", inner)
        up = self.linear("routed_expert_up_proj", self.norm("routed_expert_norm", routed))
        return up + self.mlp("shared_experts", x)
