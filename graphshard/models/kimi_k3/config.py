"""What a Kimi K3 computes by: the sizes that planning reads too, and the numbers that only maths needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.models.config import DTYPES
from graphshard.models.specs.config_file import ConfigFile, read_config_file
from graphshard.models.specs.kimi_k3 import KimiK3Config, is_kimi_k3, kimi_k3_config

_FIXED: dict[str, object] = {
    "hidden_act": "situ",
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
}
_FIXED_LINEAR: dict[str, object] = {"use_full_rank_gate": True}
_ABSENT = {
    "attn_res_block_size": "attention over earlier layers' residuals is not implemented, residuals are plain sums here",
    "quantization_config": "only unquantised checkpoints are supported",
}


@dataclass(frozen=True, slots=True)
class KimiK3ModelConfig:
    """A Kimi K3. Weights are `dtype`, but convolutions, decays and the router's bias float32."""

    sizes: KimiK3Config
    dtype: str = "bfloat16"
    norm_eps: float = 1e-5
    gate_lower_bound: float = -5.0
    """The least logarithm of a KDA channel's decay."""
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    routed_scale: float = 1.0
    max_positions: int = 4096
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        s = self.sizes
        if self.dtype not in DTYPES:
            raise SpecError(f"kimi_k3 config: dtype is {self.dtype}, a Kimi K3 computes in one of {', '.join(DTYPES)}")
        for name in ("norm_eps", "situ_beta", "situ_linear_beta", "routed_scale", "max_positions"):
            if getattr(self, name) <= 0:
                raise SpecError(f"kimi_k3 config: {name} is {getattr(self, name)}, must be above 0")
        if self.gate_lower_bound >= 0:
            raise SpecError(f"kimi_k3 config: gate_lower_bound is {self.gate_lower_bound}, must be below 0")
        for name, value in asdict(s).items():
            if name != "mla_layers" and value < 1:
                raise SpecError(f"kimi_k3 config: {name} is {value}, must be at least 1")
        if s.shared % s.expert_size:
            raise SpecError(
                f"kimi_k3 config: shared is {s.shared}, no whole number of experts that are {s.expert_size} wide"
            )
        if s.conv_taps < 2:
            raise SpecError("kimi_k3 config: conv_taps is 1, a convolution over time has at least 2")
        if s.top_k > s.experts:
            raise SpecError(f"kimi_k3 config: top_k is {s.top_k}, and there are {s.experts} experts")
        beyond = sorted(layer for layer in s.mla_layers if not 0 <= layer < s.num_layers)
        if beyond:
            raise SpecError(f"kimi_k3 config: MLA layers {beyond} are not among the {s.num_layers} layers")

    @property
    def vocab_size(self) -> int:
        """Tokens there are."""
        return self.sizes.vocab

    @property
    def kda_width(self) -> int:
        """Features of q, k, v and the gate of a KDA layer."""
        return self.sizes.kda_heads * self.sizes.kda_head

    @property
    def mla_width(self) -> int:
        """Features of the values and the gate of an MLA layer."""
        return self.sizes.heads * self.sizes.v_head

    @property
    def query_head(self) -> int:
        """Features of a head's queries in an MLA layer."""
        return self.sizes.qk_nope + self.sizes.qk_rope

    @property
    def cached_width(self) -> int:
        """Features that an MLA layer caches of a token: its latent, and the keys that all heads share."""
        return self.sizes.kv_lora + self.sizes.qk_rope

    def values(self) -> dict[str, Any]:
        """The config.json that reads as this config."""
        s = self.sizes
        text = {
            "model_type": "kimi_linear",
            "dtype": self.dtype,
            "hidden_size": s.hidden,
            "vocab_size": s.vocab,
            "num_hidden_layers": s.num_layers,
            "first_k_dense_replace": s.dense_layers,
            "intermediate_size": s.intermediate,
            "num_attention_heads": s.heads,
            "q_lora_rank": s.q_lora,
            "kv_lora_rank": s.kv_lora,
            "qk_nope_head_dim": s.qk_nope,
            "qk_rope_head_dim": s.qk_rope,
            "v_head_dim": s.v_head,
            "linear_attn_config": {
                "full_attn_layers": sorted(layer + 1 for layer in s.mla_layers),
                "gate_lower_bound": self.gate_lower_bound,
                "head_dim": s.kda_head,
                "num_heads": s.kda_heads,
                "short_conv_kernel_size": s.conv_taps,
                **_FIXED_LINEAR,
            },
            "num_experts": s.experts,
            "num_experts_per_token": s.top_k,
            "moe_intermediate_size": s.expert_size,
            "num_shared_experts": s.shared // s.expert_size,
            "routed_expert_hidden_size": s.latent,
            "routed_scaling_factor": self.routed_scale,
            "activation_situ_beta": self.situ_beta,
            "activation_situ_linear_beta": self.situ_linear_beta,
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "eos_token_id": list(self.eos_token_ids),
            **_FIXED,
        }
        return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}


def load_kimi_k3_config(path: Path) -> KimiK3ModelConfig:
    """The config in `path`, a model's folder or its config.json.

    Raises:
        SpecError: naming the file and the key that is missing, malformed or not supported.
    """
    return kimi_k3_model_config(read_config_file(path))


def kimi_k3_model_config(file: ConfigFile) -> KimiK3ModelConfig:
    """The config in `file`.

    Raises:
        SpecError: naming the key that is missing, malformed or not supported.
    """
    if not is_kimi_k3(file):
        raise file.error("model_type", f"is {file.values.get('model_type')!r}; it is kimi_k3 in this family")
    sizes = kimi_k3_config(file)
    text = file.inner("text_config") if "text_config" in file.values else file
    linear = text.inner("linear_attn_config")
    _refuse_others(text, _FIXED)
    _refuse_others(linear, _FIXED_LINEAR)
    for key, why in _ABSENT.items():
        if text.values.get(key):
            raise text.error(key, f"is {text.values[key]!r}: {why}; leave it out to run these sizes without")
    eos = text.values.get("eos_token_id")
    return KimiK3ModelConfig(
        sizes=sizes,
        dtype=text.text("dtype", text.text("torch_dtype", "bfloat16")),
        norm_eps=text.number("rms_norm_eps", 1e-5),
        gate_lower_bound=linear.number("gate_lower_bound", -5.0),
        situ_beta=text.number("activation_situ_beta", 4.0),
        situ_linear_beta=text.number("activation_situ_linear_beta", 25.0),
        routed_scale=text.number("routed_scaling_factor", 1.0),
        max_positions=text.count("max_position_embeddings") if "max_position_embeddings" in text.values else 4096,
        eos_token_ids=text.counts("eos_token_id") if isinstance(eos, list) else _one(text, "eos_token_id"),
    )


def _one(file: ConfigFile, key: str) -> tuple[int, ...]:
    """The number under `key`, if there is one."""
    number = file.number(key, -1)
    if number != int(number):
        raise file.error(key, f"is {number}: it is a token, or a list of tokens")
    return () if number < 0 else (int(number),)


def _refuse_others(file: ConfigFile, fixed: dict[str, object]) -> None:
    """SpecError for a key that would change the maths."""
    for key, wanted in fixed.items():
        value = file.values.get(key, wanted)
        if value is not None and value != wanted:
            raise file.error(key, f"is {value!r}; only {wanted!r} is supported")
