"""A DFlash draft from its formulas, in float64: one row, token by token and head by head; and a small config.

Nothing here is shared with the model: no cache, no batch, no mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from graphshard.models.dflash.config import DFlashConfig

SMALL = DFlashConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    taps=(0, 2), mask_token=60, block=4,
)  # fmt: skip


def reference_logits(
    config: DFlashConfig,
    weights: Mapping[str, Tensor],
    block: Sequence[int],
    begin: int,
    features: Mapping[int, Tensor],
) -> Tensor:
    """Logits `[t, vocab]` of `block` at positions from `begin` on; `features` of all tokens before it, by position."""
    return _Reference(config, {name: tensor.double() for name, tensor in weights.items()}).block(
        block, begin, {position: feature.double() for position, feature in features.items()}
    )


class _Reference:
    def __init__(self, config: DFlashConfig, weights: Mapping[str, Tensor]) -> None:
        self.c, self.w = config, weights

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean() + self.c.norm_eps).sqrt() * self.w[f"{name}.weight"]

    def rotated(self, head: Tensor, position: int) -> Tensor:
        """Pairs (i, i + half) turned by position / theta^(2 i / head_dim)."""
        half = self.c.head_dim // 2
        angles = torch.tensor([position / self.c.rope_theta ** (2 * i / self.c.head_dim) for i in range(half)])
        turned = torch.complex(head[:half], head[half:]) * torch.exp(1j * angles.double())
        return torch.cat((turned.real, turned.imag))

    def heads(self, x: Tensor, name: str, norm: str, position: int) -> list[Tensor]:
        parts = (self.w[f"{name}.weight"] @ x).split(self.c.head_dim)
        return [self.rotated(self.norm(part, norm), position) for part in parts]

    def block(self, tokens: Sequence[int], begin: int, features: Mapping[int, Tensor]) -> Tensor:
        context = {at: self.norm(self.w["fc.weight"] @ feature, "hidden_norm") for at, feature in features.items()}
        hidden = [self.w["model.embed_tokens.weight"][token] for token in tokens]
        for layer in range(self.c.num_layers):
            hidden = self.layer(f"layers.{layer}", hidden, begin, context)
        head = "model.embed_tokens.weight" if self.c.tied_embeddings else "lm_head.weight"
        return torch.stack([self.w[head] @ self.norm(x, "norm") for x in hidden])

    def layer(self, path: str, hidden: list[Tensor], begin: int, context: Mapping[int, Tensor]) -> list[Tensor]:
        attn = f"{path}.self_attn"
        normed = [self.norm(x, f"{path}.input_layernorm") for x in hidden]
        seen = [*sorted(context.items()), *enumerate(normed, begin)]
        keys = [self.heads(x, f"{attn}.k_proj", f"{attn}.k_norm", at) for at, x in seen]
        values = [(self.w[f"{attn}.v_proj.weight"] @ x).split(self.c.head_dim) for _, x in seen]
        group, found = self.c.num_heads // self.c.num_kv_heads, []
        for j, x in enumerate(hidden):
            queries, outs = self.heads(normed[j], f"{attn}.q_proj", f"{attn}.q_norm", begin + j), []
            for head, query in enumerate(queries):
                scores = torch.stack([query @ key[head // group] for key in keys]) / math.sqrt(self.c.head_dim)
                shares = scores.exp() / scores.exp().sum()
                outs.append(sum(share * value[head // group] for share, value in zip(shares, values, strict=True)))
            found.append(self.mlp(path, x + self.w[f"{attn}.o_proj.weight"] @ torch.cat(outs)))
        return found

    def mlp(self, path: str, x: Tensor) -> Tensor:
        normed = self.norm(x, f"{path}.post_attention_layernorm")
        gate, up = (self.w[f"{path}.mlp.{name}.weight"] @ normed for name in ("gate_proj", "up_proj"))
        return x + self.w[f"{path}.mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
