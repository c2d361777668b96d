"""Kimi K3, from its config values: 69 KDA and 24 MLA layers, a latent MoE in all but the first.

Weights have the names and the fused shapes under which servers keep them, since those are what is sharded:

| layer | sharded                                         | kept, and why (`Part.keep`)                         |
|-------|-------------------------------------------------|-----------------------------------------------------|
| KDA   | qkv_proj, f_b_proj, o_proj, g_proj              | f_a and b (one merged buffer), convolutions, decays |
| MLA   | q_b_proj, o_proj, g_proj                        | fused q_a and kv_a, kv_b                            |
| MoE   | routed_expert_down/up_proj, shared gate_up/down | router; routed experts (MXFP4, spread over ep)      |
| 0     | its KDA                                         | its dense MLP                                       |

Published totals count the KDA of layer 0 (69 layers) but not its MLP. `WITHOUT_LAYER_0` is the range 1-92 that the
published implementation shards by default: it leaves 68 KDA layers. The few vectors of the residual attention and the
vision tower are left out; scales of FP8 weights (one a matrix) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphshard.core.specs import SegmentSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import LayerFact, PlanningModel, Role, Split
from graphshard.models.specs.assemble import ACTIVATION_BYTES, assemble
from graphshard.models.specs.config_file import ConfigFile, read_config_file
from graphshard.models.specs.formats import MXFP4, MXFP4_BLOCK, MXFP4_SCALE
from graphshard.models.specs.part import Part, Parts

CONFIG = Path(__file__).with_suffix(".json")
"""Package data: config.json's values, as far as sizes need them."""

WITHOUT_LAYER_0 = ("model.layers.0.*",)
"""Exclude patterns of the published default range, 1-92."""

STATE_BYTES = 4
"""float32."""

MERGED = "servers merge f_a and b into one buffer, and load it past the weight loader"
FUSED = "servers fuse q_a and kv_a, and load them past the weight loader"
ABSORBED = "kv_b is absorbed into two batched weights after loading, then freed"
DENSE = "layer 0's dense MLP is not among the published targets: include it if its bytes are wanted"
NOTES = ("residual-attention vectors, the vision tower and FP8 scales are left out",)


@dataclass(frozen=True, slots=True)
class KimiK3Config:
    """Sizes, as facts of the config say; layers are counted from 0 here, from 1 in the file."""

    hidden: int
    vocab: int
    num_layers: int
    mla_layers: frozenset[int]
    dense_layers: int
    intermediate: int
    heads: int
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    kda_heads: int
    kda_head: int
    conv_taps: int
    experts: int
    top_k: int
    expert_size: int
    latent: int
    shared: int


def is_kimi_k3(file: ConfigFile) -> bool:
    """Whether `file` is a config of this family, which transformers does not know."""
    return file.values.get("model_type") == "kimi_k3" or "routed_expert_hidden_size" in file.values


def kimi_k3(deployment: Deployment, file: ConfigFile | None = None) -> PlanningModel:
    """What one rank of `deployment` holds of Kimi K3; `file` is another config of its family.

    Raises:
        SpecError: the config lacks a key, or the deployment does not divide the model.
    """
    config = kimi_k3_config(file or read_config_file(CONFIG))
    parts = _Builder(config, deployment)
    return assemble(parts.build("kimi-k3" if file is None else Path(file.where).parent.name or "kimi-k3"), deployment)


def kimi_k3_config(file: ConfigFile) -> KimiK3Config:
    """The sizes in `file`.

    Raises:
        SpecError: naming the key that is missing or malformed.
    """
    text = file.inner("text_config") if "text_config" in file.values else file
    linear = text.inner("linear_attn_config")
    shared = text.count("num_shared_experts") * text.count("moe_intermediate_size")
    return KimiK3Config(
        hidden=text.count("hidden_size"),
        vocab=text.count("vocab_size"),
        num_layers=text.count("num_hidden_layers"),
        mla_layers=frozenset(layer - 1 for layer in linear.counts("full_attn_layers")),
        dense_layers=text.count("first_k_dense_replace"),
        intermediate=text.count("intermediate_size"),
        heads=text.count("num_attention_heads"),
        q_lora=text.count("q_lora_rank"),
        kv_lora=text.count("kv_lora_rank"),
        qk_nope=text.count("qk_nope_head_dim"),
        qk_rope=text.count("qk_rope_head_dim"),
        v_head=text.count("v_head_dim"),
        kda_heads=linear.count("num_heads"),
        kda_head=linear.count("head_dim"),
        conv_taps=linear.count("short_conv_kernel_size"),
        experts=text.count("num_experts"),
        top_k=text.count("num_experts_per_token"),
        expert_size=text.count("moe_intermediate_size"),
        latent=text.count("routed_expert_hidden_size"),
        shared=shared,
    )


class _Builder:
    """Parts and segments in the order in which a step runs them."""

    def __init__(self, config: KimiK3Config, deployment: Deployment) -> None:
        self._config = config
        self._deployment = deployment
        self._parts: list[Part] = []
        self._segments: list[SegmentSpec] = []
        self._waiting: list[str] = []  # small weights, read by the next segment
        self._layer: int | None = None
        self._block = ""
        self._role: Role = "attention"

    def build(self, name: str) -> Parts:
        c = self._config
        self._at(None, "model", "embedding")
        self._matrix("embed_tokens.weight", c.vocab, c.hidden, "column", is_large=False)
        for layer in range(c.num_layers):
            self._attention(layer)
            self._mlp(layer)
        self._at(None, "model", "head")
        self._small("norm.weight", (c.hidden,), "norm")
        self._block = ""
        self._matrix("lm_head.weight", c.vocab, c.hidden, "column", is_large=False)
        layers = [_layer_fact(c, layer, self._deployment) for layer in range(c.num_layers)]
        return Parts(name, self._parts, self._segments, layers, c.hidden, c.vocab, c.heads, NOTES)

    def _attention(self, layer: int) -> None:
        self._at(layer, f"model.layers.{layer}", "attention")
        self._small("input_layernorm.weight", (self._config.hidden,), "norm")
        self._block += ".self_attn"
        if layer in self._config.mla_layers:
            self._mla()
        else:
            self._kda()

    def _kda(self) -> None:
        c = self._config
        wide = c.kda_heads * c.kda_head
        self._matrix("qkv_proj.weight", 3 * wide, c.hidden, "column")
        for name in "qkv":
            self._small(f"{name}_conv1d.weight", (wide, 1, c.conv_taps), "other", "float32", "column")
        self._matrix("f_a_b_proj.weight", c.kda_head + c.kda_heads, c.hidden, "none", keep=MERGED, is_large=False)
        self._matrix("f_b_proj.weight", wide, c.kda_head, "column", is_large=False)  # BF16 also where the rest is FP8
        self._small("A_log", (c.kda_heads,), "other", "float32", "column")
        self._small("dt_bias", (wide,), "other", "float32", "column")
        self._matrix("g_proj.weight", wide, c.hidden, "column")
        self._small("o_norm.weight", (c.kda_head,), "norm")
        self._matrix("o_proj.weight", c.hidden, wide, "row")

    def _mla(self) -> None:
        c = self._config
        q_head, kv_head = c.qk_nope + c.qk_rope, c.qk_nope + c.v_head
        fused = c.q_lora + c.kv_lora + c.qk_rope
        self._matrix("fused_qkv_a_proj.weight", fused, c.hidden, "none", keep=FUSED)
        self._small("q_a_layernorm.weight", (c.q_lora,), "norm")
        self._matrix("q_b_proj.weight", c.heads * q_head, c.q_lora, "column")
        self._small("kv_a_layernorm.weight", (c.kv_lora,), "norm")
        self._matrix("kv_b_proj.weight", c.heads * kv_head, c.kv_lora, "column", keep=ABSORBED, is_large=False)
        self._matrix("g_proj.weight", c.heads * c.v_head, c.hidden, "column")
        self._matrix("o_proj.weight", c.hidden, c.heads * c.v_head, "row")

    def _mlp(self, layer: int) -> None:
        c = self._config
        self._at(layer, f"model.layers.{layer}", "mlp")
        self._small("post_attention_layernorm.weight", (c.hidden,), "norm")
        if layer < c.dense_layers:
            self._block += ".mlp"
            self._matrix("gate_up_proj.weight", 2 * c.intermediate, c.hidden, "column", keep=DENSE)
            self._matrix("down_proj.weight", c.hidden, c.intermediate, "row", keep=DENSE)
            return
        moe = self._block = f"{self._block}.block_sparse_moe"
        self._role = "router"
        self._small("gate.e_score_correction_bias", (c.experts,), "router", "float32")
        self._matrix("gate.weight", c.experts, c.hidden, "none", is_large=False)
        self._role = "latent"
        self._matrix("routed_expert_down_proj.weight", c.latent, c.hidden, "none")
        self._block, self._role = f"{moe}.experts", "routed_expert"
        self._experts("w13", 2 * c.expert_size, c.latent, "column")
        self._experts("w2", c.latent, c.expert_size, "row")
        self._block, self._role = moe, "latent"
        self._small("routed_expert_norm.weight", (c.latent,), "norm")  # of the experts' weighted sum
        self._matrix("routed_expert_up_proj.weight", c.hidden, c.latent, "none")
        self._block, self._role = f"{moe}.shared_experts", "shared_expert"
        self._matrix("gate_up_proj.weight", 2 * c.shared, c.hidden, "column")
        self._matrix("down_proj.weight", c.hidden, c.shared, "row")

    def _at(self, layer: int | None, block: str, role: Role) -> None:
        self._layer, self._block, self._role = layer, block, role

    def _matrix(self, name: str, n: int, k: int, split: Split, keep: str = "", is_large: bool = True) -> None:
        """A weight `[n, k]` and the segment that reads it, with the small weights before it."""
        full = f"{self._block}.{name}" if self._block else name
        axes = (-2, -1)
        part = Part(full, (n, k), "bfloat16", self._role, self._block, *axes, split, is_large=is_large, keep=keep)
        self._parts.append(part)
        self._segment(name.removesuffix(".weight"), (full,))

    def _experts(self, name: str, n: int, k: int, split: Split) -> None:
        """All routed experts' `[n, k]` in MXFP4, two values a byte, and their scales."""
        c, made = self._config, []
        for suffix, packed, dtype in (("weight", 2, MXFP4), ("weight_scale", MXFP4_BLOCK, MXFP4_SCALE)):
            full = f"{self._block}.{name}_{suffix}"
            shape = (c.experts, n, k // packed)
            part = Part(full, shape, dtype, self._role, self._block, -2, -1, split, packed, c.experts, c.top_k)
            self._parts.append(part)
            made.append(full)
        self._segment(name, tuple(made))

    def _small(
        self, name: str, shape: Sequence[int], role: Role, dtype: str = "bfloat16", split: Split = "none"
    ) -> None:
        """A weight that is read together with the next matrix; `column` cuts its first dimension."""
        full = f"{self._block}.{name}"
        axis = 0 if split == "column" else None
        self._parts.append(Part(full, tuple(shape), dtype, role, self._block, axis, None, split))
        self._waiting.append(full)

    def _segment(self, name: str, reads: tuple[str, ...]) -> None:
        where = self._block.removeprefix(f"model.layers.{self._layer}").removeprefix("model").strip(".")
        label = f"{where}.{name}" if where else name
        self._segments.append(SegmentSpec(label, self._layer, (*self._waiting, *reads)))
        self._waiting.clear()


def _layer_fact(c: KimiK3Config, layer: int, deployment: Deployment) -> LayerFact:
    routed = 0 if layer < c.dense_layers else c.top_k * c.latent * ACTIVATION_BYTES
    segment = f"layers.{layer}.self_attn.o_proj"
    if layer in c.mla_layers:
        heads = c.heads // deployment.tp
        return LayerFact(
            layer,
            "mla",
            segment,
            kv_bytes_per_token=(c.kv_lora + c.qk_rope) * deployment.cache_element_bytes,
            attention_flops=2 * heads * (2 * c.kv_lora + c.qk_rope),
            routed_bytes_per_token=routed,
        )
    heads = c.kda_heads // deployment.tp
    tail = 3 * heads * c.kda_head * (c.conv_taps - 1) * ACTIVATION_BYTES
    return LayerFact(
        layer,
        "kda",
        segment,
        state_bytes_per_request=heads * c.kda_head**2 * STATE_BYTES + tail,
        state_flops_per_token=7 * heads * c.kda_head**2,
        routed_bytes_per_token=routed,
    )
