"""A Llama-family model's dimensions, read from the `config.json` that Hugging Face writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graphshard.core.errors import SpecError

MODEL_TYPES = ("llama", "mistral")
ROPE_TYPES = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16", "float64")
MAX_LAYERS = 10_000
"""More is a mistake in the file: each layer is seven segments."""


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise SpecError(f"llama config: {name} is {value!r}, must be a finite number above 0")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding; the last four fields matter to the scaled kinds only, as `transformers` names them."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            _check_positive(f"rope {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions of a decoder of the Llama family. Weights are `dtype` throughout."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str = "float32"
    max_positions: int = 2048
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SpecError(f"llama config: dtype is {self.dtype}, a llama computes in one of {', '.join(DTYPES)}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise SpecError(f"llama config: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_layers > MAX_LAYERS:
            raise SpecError(f"llama config: num_layers is {self.num_layers}, more than the {MAX_LAYERS} of any model")
        _check_positive("norm_eps", self.norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"llama config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise SpecError(f"llama config: head_dim {self.head_dim} is not even, and rotary embeddings turn pairs")


def load_llama_config(path: Path) -> LlamaConfig:
    """The config in `path`, a model's folder or its config.json.

    Raises:
        SpecError: naming the file and the key that is missing, malformed or not supported.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"no model config: {file} cannot be read ({error.strerror}); give a model's folder") from None
    except ValueError as error:
        raise SpecError(f"{file} is not JSON: {error}") from None
    except RecursionError:
        raise SpecError(f"{file} is nested deeper than any config: give a model's folder") from None
    if not isinstance(values, dict):
        raise SpecError(f"{file} holds a {type(values).__name__}, not an object of settings")
    try:
        return llama_config(values, str(file))
    except SpecError as error:
        raise SpecError(str(error).replace("llama config", str(file), 1)) from None


def llama_config(values: Mapping[str, Any], where: str = "config") -> LlamaConfig:
    """The config behind the JSON object `values`; `where` is named by errors.

    Raises:
        SpecError: naming the key that is missing, malformed or not supported.
    """
    keys = _Keys(values, where)
    _refuse_unsupported(keys)
    num_heads = keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    if "head_dim" not in keys and num_heads > 0 and hidden_size % num_heads:
        raise keys.wrong(
            "head_dim", f"is not given, and hidden_size {hidden_size} is not a multiple of {num_heads} heads"
        )
    return LlamaConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", hidden_size // max(num_heads, 1)),
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys),
        tied_embeddings=keys.boolean("tie_word_embeddings", False),
        attention_bias=keys.boolean("attention_bias", False),
        mlp_bias=keys.boolean("mlp_bias", False),
        dtype=keys.text("dtype", keys.text("torch_dtype", "float32")),
        max_positions=keys.integer("max_position_embeddings", 2048),
        eos_token_ids=keys.integers("eos_token_id"),
    )


def _refuse_unsupported(keys: _Keys) -> None:
    """Raise for settings that would silently change the maths."""
    model_type = keys.text("model_type")
    if model_type not in MODEL_TYPES:
        raise keys.wrong("model_type", f"is {model_type!r}; supported are {', '.join(MODEL_TYPES)}")
    act = keys.text("hidden_act", "silu")
    if act != "silu":
        raise keys.wrong("hidden_act", f"is {act!r}; only silu is supported")
    if keys.values.get("sliding_window") is not None and keys.values.get("use_sliding_window", True):
        raise keys.wrong(
            "sliding_window", f"is {keys.values['sliding_window']}; only full attention is supported (null)"
        )
    if keys.values.get("quantization_config") is not None:
        raise keys.wrong("quantization_config", "is set; only unquantised checkpoints are supported")


def _rope(keys: _Keys) -> RopeConfig:
    """Version 5 of transformers nests everything in `rope_parameters`; before, theta stood outside `rope_scaling`."""
    for name in ("rope_parameters", "rope_scaling"):
        values = keys.values.get(name)
        if values is None:
            continue
        if not isinstance(values, dict):
            raise keys.wrong(name, f"is {values!r}, not an object")
        nested = _Keys(values, f"{keys.where}, {name}")
        kind = nested.text("rope_type", nested.text("type", "default"))
        if kind not in ROPE_TYPES:
            raise nested.wrong("rope_type", f"is {kind!r}; supported are {', '.join(ROPE_TYPES)}")
        scaled, llama3 = kind != "default", kind == "llama3"
        return RopeConfig(
            theta=nested.number("rope_theta", keys.number("rope_theta", 10_000.0)),
            kind=kind,  # type: ignore[arg-type]  # one of ROPE_TYPES
            factor=nested.number("factor") if scaled else 1.0,
            low_freq_factor=nested.number("low_freq_factor") if llama3 else 1.0,
            high_freq_factor=nested.number("high_freq_factor") if llama3 else 4.0,
            original_max_positions=nested.integer("original_max_position_embeddings") if llama3 else 8192,
        )
    return RopeConfig(theta=keys.number("rope_theta", 10_000.0))


class _Keys:
    """A JSON object whose missing or malformed keys become SpecErrors. A null counts as missing."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def wrong(self, key: str, what: str) -> SpecError:
        return SpecError(f"{self.where}: {key} {what}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, f"is {value!r}, not an integer")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Of a list, or one; none if it is missing."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            return (self.integer(key),)
        wrong = [one for one in value if isinstance(one, bool) or not isinstance(one, int)]
        if wrong:
            raise self.wrong(key, f"holds {wrong[0]!r}, not an integer")
        return tuple(value)

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0: all that this file has are."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, f"is {value!r}, not a number")
        if not 0 < value < math.inf:
            raise self.wrong(key, f"is {value!r}, not a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, f"is {value!r}, not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, f"is {value!r}, not a text")
        return value

    def _value(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(key, "is missing")
        return default
