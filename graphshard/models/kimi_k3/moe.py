"""MLPs and the latent mixture of experts, and their segments.

    scores = sigmoid(gate x)      experts = top_k(scores + bias)      w = scale * scores[experts] / sum(scores[experts])
    hidden += up(RMSNorm(sum of w_i expert_i(down x)))                hidden += shared experts(x)

The router and the shared experts read the whole hidden width, the routed experts the latent one; the norm is of their
weighted sum. Every expert and MLP is `w2(SiTU(w1 x, w3 x))`. Source: KimiMoEGate and KimiSparseMoeBlock of the
published modeling_kimi_linear.py.

Routing stays on the device, so that a step can be captured: for each of a token's top_k places the weights of its
expert are gathered by `index_select`, and used in one batched gemm. That copies tokens * 3 * expert_size * latent
elements for each place: cheap for the few tokens of a step here, where a server has grouped kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphshard.core.specs import WeightSpec
from graphshard.models.blocks import MlpBlock
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.declare import Declarations, Pieces, Source, Work, buffer, normalise, rms_norm
from graphshard.models.kimi_k3.situ import situ
from graphshard.models.specs.kimi_k3 import DENSE
from graphshard.models.specs.replicated import SMALL
from graphshard.runtime.model import StepState

ROUTED = "routed experts are left to expert parallelism, which gives each rank experts of its own"


def declare_dense(d: Declarations, layer: int, post_norm: str) -> None:
    """The MLP of a layer without experts."""
    c, s = d.config, d.config.sizes
    d.at(layer, f"model.layers.{layer}.mlp")
    _declare_mlp(d, s.intermediate, "dense_gate_up", normalise(post_norm, c.norm_eps), DENSE)


def declare_moe(
    d: Declarations, layer: int, post_norm: str, *, is_dual: bool = False, after: Work | None = None
) -> None:
    """The experts of a layer: router, latent, routed experts, latent, shared experts; these as a block if `is_dual`.

    `after` is the work that ends a layer whose shared experts run as slices.
    """
    c, s = d.config, d.config.sizes
    block = f"model.layers.{layer}.block_sparse_moe"
    d.at(layer, block)
    d.activation("expert_ids", s.top_k, "int64")
    d.activation("expert_weights", s.top_k, "float32")
    d.activation("expert_hidden", s.top_k * s.expert_size)
    d.activation("routed", s.latent)
    bias = d.small("gate.e_score_correction_bias", (s.experts,), SMALL["router"], "float32")
    gate = d.name_of("gate.weight")
    d.read("gate", "gate.weight", (s.experts, s.hidden), _route(c, post_norm, gate, bias), keep=SMALL["router"])
    d.project("routed_expert_down_proj", {"routed_expert_down_proj": s.latent}, s.hidden, buffer("normed"), "latent")
    d.at(layer, f"{block}.experts")
    _declare_experts(d)
    d.at(layer, block)
    norm = d.norm("routed_expert_norm.weight", s.latent)
    d.add("routed_expert_up_proj", s.hidden, s.latent, _normed_routed(norm, c.norm_eps))
    d.at(layer, f"{block}.shared_experts")
    if is_dual:
        _declare_dual_mlp(d, layer, after)
    else:
        _declare_mlp(d, s.shared, "shared_gate_up", None, "")


def _declare_mlp(d: Declarations, width: int, target: str, before: Work | None, keep: str) -> None:
    c, hidden = d.config, d.config.sizes.hidden
    rows = {"gate_proj": width, "up_proj": width}
    d.project("gate_up_proj", rows, hidden, buffer("normed"), target, before=before, keep=keep)
    d.add("down_proj", hidden, width, _activated(c, target), keep=keep)


def _declare_dual_mlp(d: Declarations, layer: int, after: Work | None) -> None:
    """The shared experts as a block. Gate and up stay apart: of a fused weight a range of rows is no slice of both."""
    c, s, target = d.config, d.config.sizes, "shared_gate_up"
    begin, rows = len(d.segments), {"gate_proj": s.shared, "up_proj": s.shared}
    d.project("gate_up_proj", rows, s.hidden, buffer("normed"), target, is_apart=True)
    down = d.add_transposed("down_proj", s.hidden, s.shared, _activated(c, target))
    columns = tuple(d.name_of(f"{name}.weight") for name in rows)

    def activated(state: StepState, gathered: Tensor) -> Tensor:
        out = state.buffer(target).view(len(gathered), -1)  # fewer features of more tokens
        for name, part in zip(columns, out.chunk(2, dim=1), strict=True):
            torch.mm(gathered, state.weight(name).t(), out=part)
        return situ(out, c.situ_beta, c.situ_linear_beta)

    mlp = MlpBlock(
        name=f"layers.{layer}.shared_experts",
        layer=layer,
        begin=begin,
        end=len(d.segments),
        label=d.label,
        columns=columns,
        down=down,
        hidden_size=s.hidden,
        dtype=c.dtype,
        source=buffer("normed"),
        activated=activated,
        after=after,
    )
    d.blocks.append(mlp.block())


def _declare_experts(d: Declarations) -> None:
    s, block, dtype = d.config.sizes, d.name_of(""), d.config.dtype

    def pieces(*shapes: tuple[str, tuple[int, int]]) -> Pieces:
        """Each expert's `shapes`, by name."""
        experts = range(s.experts)
        return lambda: (WeightSpec(f"{block}{e}.{name}.weight", size, dtype) for e in experts for name, size in shapes)

    wide, tall = (s.expert_size, s.latent), (s.latent, s.expert_size)
    d.read(
        "w13",
        "w13_weight",
        (s.experts, 2 * s.expert_size, s.latent),
        _expert_up(d.config, d.name_of("w13_weight")),
        keep=ROUTED,
        pieces=pieces(("w1", wide), ("w3", wide)),
    )
    d.read(
        "w2",
        "w2_weight",
        (s.experts, s.latent, s.expert_size),
        _expert_down(d.config, d.name_of("w2_weight")),
        keep=ROUTED,
        pieces=pieces(("w2", tall)),
    )


def _route(c: KimiK3ModelConfig, norm: str, gate: str, bias: str) -> Work:
    """Norm; then the experts of each token and their weights, from float32 scores. The bias only chooses."""
    norm_work, top_k = normalise(norm, c.norm_eps), c.sizes.top_k

    def run(state: StepState) -> None:
        norm_work(state)
        scores = torch.sigmoid(torch.mm(state.buffer("normed").float(), state.weight(gate).float().t()))
        ids = (scores + state.weight(bias)).topk(top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if top_k > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        state.buffer("expert_ids").copy_(ids)
        state.buffer("expert_weights").copy_(weights * c.routed_scale)

    return run


def _expert_up(c: KimiK3ModelConfig, weight: str) -> Work:
    """`expert_hidden = SiTU(w1 latent, w3 latent)` of each token's experts, one beside the other."""
    size = c.sizes.expert_size

    def run(state: StepState) -> None:
        ids, latent, out = state.buffer("expert_ids"), state.buffer("latent"), state.buffer("expert_hidden")
        for place in range(ids.shape[1]):
            mine = torch.index_select(state.weight(weight), 0, ids[:, place])
            gate_up = torch.bmm(mine, latent[:, :, None])[:, :, 0]
            out[:, place * size : (place + 1) * size] = situ(gate_up, c.situ_beta, c.situ_linear_beta)

    return run


def _expert_down(c: KimiK3ModelConfig, weight: str) -> Work:
    """`routed`: the weighted sum, in float32, of what a token's experts give."""
    size = c.sizes.expert_size

    def run(state: StepState) -> None:
        ids, shares, hidden = state.buffer("expert_ids"), state.buffer("expert_weights"), state.buffer("expert_hidden")
        out = state.buffer("routed")
        total = torch.zeros_like(out, dtype=torch.float32)
        for place in range(ids.shape[1]):
            mine = torch.index_select(state.weight(weight), 0, ids[:, place])
            given = torch.bmm(mine, hidden[:, place * size : (place + 1) * size, None])[:, :, 0]
            total.addcmul_(given.float(), shares[:, place, None])
        out.copy_(total)

    return run


def _normed_routed(norm: str, eps: float) -> Source:
    return lambda state: rms_norm(state.buffer("routed"), state.weight(norm), eps)


def _activated(c: KimiK3ModelConfig, name: str) -> Source:
    def source(state: StepState) -> Tensor:
        return situ(state.buffer(name), c.situ_beta, c.situ_linear_beta)

    return source
