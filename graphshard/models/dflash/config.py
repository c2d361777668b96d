"""A DFlash draft's dimensions, as its config.json has them.

Names of keys are those of the published drafts (`block_size`, `dflash_config` with `mask_token_id` and
`target_layer_ids`); the rest of the file is that of a dense decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.models.config import DTYPES
from graphshard.models.specs.config_file import ConfigFile, read_config_file

ARCHITECTURE = "DFlashDraftModel"
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "max_positions"
)  # fmt: skip
_FIXED: dict[str, object] = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Dimensions of a draft. Weights are `dtype` throughout; `hidden_size` and `vocab_size` are the target's too."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    """The target's layers after which its residual stream is read, from 0."""
    mask_token: int
    """Stands where a token is to be proposed."""
    block: int = 8
    """Places of a step: one for the last token, the others for proposals."""
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied_embeddings: bool = False
    """Whether the target's head is its embedding."""
    dtype: str = "float32"
    max_positions: int = 2048

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.dtype not in DTYPES:
            raise SpecError(f"dflash config: dtype is {self.dtype}, a draft computes in one of {', '.join(DTYPES)}")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"dflash config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise SpecError(f"dflash config: head_dim {self.head_dim} is not even, and rotary embeddings turn pairs")
        if not self.taps or len(set(self.taps)) != len(self.taps) or min(self.taps) < 0:
            raise SpecError(f"dflash config: taps {self.taps} are not one or more layers of the target, each once")
        if self.block < 2:
            raise SpecError(f"dflash config: block is {self.block}; it has a place for a proposal from 2 on")
        if not 0 <= self.mask_token < self.vocab_size:
            raise SpecError(
                f"dflash config: mask_token {self.mask_token} is outside the vocabulary of {self.vocab_size}"
            )

    def _check_numbers(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise SpecError(f"dflash config: {name} is {getattr(self, name)}, must be at least 1")
        for name in ("norm_eps", "rope_theta"):
            if getattr(self, name) <= 0:
                raise SpecError(f"dflash config: {name} is {getattr(self, name)}, must be above 0")

    @property
    def features_width(self) -> int:
        """Features that the target gives of each token."""
        return len(self.taps) * self.hidden_size

    def values(self) -> dict[str, Any]:
        """The config.json that reads as this config."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
            "block_size": self.block,
            "dflash_config": {"mask_token_id": self.mask_token, "target_layer_ids": list(self.taps)},
            **_FIXED,
        }


def is_dflash(file: ConfigFile) -> bool:
    """Whether it is a DFlash draft's config."""
    return "dflash_config" in file.values


def load_dflash_config(path: Path) -> DFlashConfig:
    """The config in `path`, a draft's folder or its config.json.

    Raises:
        SpecError: naming the file and the key that is missing, malformed or not supported.
    """
    return dflash_config(read_config_file(path))


def dflash_config(file: ConfigFile) -> DFlashConfig:
    """The config in `file`.

    Raises:
        SpecError: naming the key that is missing, malformed or not supported.
    """
    for key, wanted in _FIXED.items():
        if file.values.get(key, wanted) not in (wanted, None):
            raise file.error(key, f"is {file.values[key]!r}; only {wanted!r} is supported")
    for key in ("rope_scaling", "quantization_config"):
        if file.values.get(key) is not None:
            raise file.error(key, "is set; only plain rotary embeddings and unquantised drafts are supported")
    if set(file.values.get("layer_types") or ()) - {"full_attention"}:
        raise file.error("layer_types", f"is {file.values['layer_types']}; only full_attention is supported")
    inner = file.inner("dflash_config")
    tied = file.values.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise file.error("tie_word_embeddings", f"is {tied!r}, not true or false")
    return DFlashConfig(
        vocab_size=file.count("vocab_size"),
        hidden_size=file.count("hidden_size"),
        intermediate_size=file.count("intermediate_size"),
        num_layers=file.count("num_hidden_layers"),
        num_heads=file.count("num_attention_heads"),
        num_kv_heads=file.count("num_key_value_heads"),
        head_dim=file.count("head_dim"),
        taps=inner.counts("target_layer_ids"),
        mask_token=_token(inner, "mask_token_id"),
        block=file.count("block_size"),
        norm_eps=file.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(file),
        tied_embeddings=tied,
        dtype=file.text("dtype", file.text("torch_dtype", "float32")),
        max_positions=file.count("max_position_embeddings") if "max_position_embeddings" in file.values else 2048,
    )


def _rope_theta(file: ConfigFile) -> float:
    """Version 5 of transformers nests theta in `rope_parameters`."""
    nested = file.inner("rope_parameters") if "rope_parameters" in file.values else file
    if nested is not file and nested.text("rope_type", "default") != "default":
        raise nested.error("rope_type", f"is {nested.values['rope_type']!r}; only 'default' is supported")
    return nested.number("rope_theta", 10_000.0)


def _token(file: ConfigFile, key: str) -> int:
    value = file.values.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise file.error(key, f"is {value!r}: it is a token of the target's vocabulary")
    return value
