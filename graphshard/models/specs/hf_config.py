"""Any Hugging Face config.json, through `transformers` on the meta device: modules without weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphshard.core.errors import SpecError
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import PlanningModel
from graphshard.models.specs.config_file import ConfigFile
from graphshard.models.specs.formats import WIDE, stored_format
from graphshard.models.specs.meta_module import module_spec_on_meta

LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
"""A config that leaves these to its class's defaults describes another model than the one meant."""
COUNT_KEYS = ("vocab_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "n_head")
"""If they are there, they count something."""
MAX_LAYERS = 1000
"""More is a mistake in the file."""
IGNORED_KEYS = ("quantization_config", "auto_map")
"""Weights are made plain here, and no code of a checkpoint is run."""
INSTEAD = "make the module under torch.device('meta') and give it to module_spec_on_meta"
DTYPE_KEYS = ("dtype", "torch_dtype")
TEXT_KEYS = ("text_config", "llm_config", "language_config")


def hf_model(file: ConfigFile, name: str, deployment: Deployment) -> PlanningModel:
    """What one rank of `deployment` holds of the model that `file` describes.

    Of a model with several parts (vision, audio) the text decoder is planned; its notes say so.

    Raises:
        SpecError: naming the key that cannot be read and what to do.
    """
    text = next((file.inner(key) for key in TEXT_KEYS if key in file.values), file)
    notes = () if text is file else ("the text decoder alone: encoders of other inputs are left out",)
    stored = stored_format({**text.values, **file.values}, deployment.weights, file.where)
    module = meta_module(text, _dtype(file, text))
    return module_spec_on_meta(module, deployment, name, stored, notes)


def meta_module(file: ConfigFile, dtype: str) -> nn.Module:
    """The decoder that `file` describes, with parameters of `dtype` on the meta device.

    Raises:
        SpecError: the model type is unknown or no decoder, or transformers refuses the config.
    """
    transformers = _transformers()
    _check_keys(file)
    made = _config_class(file)
    if made not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise file.error(
            "model_type",
            f"is {file.values['model_type']!r}, which transformers {transformers.__version__} has no causal language "
            f"model for: {INSTEAD}",
        )
    try:
        config = made.from_dict({key: value for key, value in file.values.items() if key not in IGNORED_KEYS})
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # each model validates its config in its own way
        raise _refusal(file, error) from error
    assert isinstance(module, nn.Module), f"from_config made a {type(module).__name__}"
    return module


def _refusal(file: ConfigFile, error: Exception) -> SpecError:
    """What a model's class found wrong, with the key if its error tells."""
    reason = f"is refused by transformers ({_reason(error)}): correct it in the file, or {INSTEAD}"
    return file.error(_named_key(file.values, error) or f"this {file.values['model_type']} config", reason)


def _config_class(file: ConfigFile) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = file.values["model_type"]
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    near = ", ".join(difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), 3)) or "none"
    raise file.error(
        "model_type",
        f"is {kind!r}, which transformers {_transformers().__version__} does not know (near it: {near}): "
        f"use a newer transformers, or {INSTEAD}",
    )


def _check_keys(file: ConfigFile) -> None:
    """SpecError unless the keys are there without which the class's defaults would stand for another model."""
    kind = file.values.get("model_type")
    if not isinstance(kind, str):
        raise file.error("model_type", f"is {kind!r}: add the name that the checkpoint's config.json has")
    for keys in (LAYER_KEYS, SIZE_KEYS):
        key = next((key for key in keys if file.values.get(key) is not None), None)
        if key is None:
            raise file.error(keys[0], "is missing: add it, else transformers' default size would be planned for")
        file.count(key)
    for key in COUNT_KEYS:
        if isinstance(file.values.get(key), int):
            file.count(key)
    layers = next(file.count(key) for key in LAYER_KEYS if file.values.get(key) is not None)
    if layers > MAX_LAYERS:
        raise file.error("num_hidden_layers", f"is {layers}, more than the {MAX_LAYERS} of any model: correct it")


def _dtype(file: ConfigFile, text: ConfigFile) -> str:
    """The parameters' dtype: the config's, float32 where it says none, as transformers has it."""
    for values in (text.values, file.values):
        for key in DTYPE_KEYS:
            dtype = values.get(key)
            if dtype in WIDE:
                return str(dtype)
            if dtype is not None and dtype != "auto":
                raise file.error(key, f"is {dtype!r}: known are {', '.join(WIDE)}")
    return "float32"


def _named_key(values: Mapping[str, Any], error: Exception) -> str:
    """The first key that the error quotes, or whose value it is about, with that value; empty if none."""
    text = str(error)
    for key, value in values.items():
        if f"'{key}'" in text or f"`{key}`" in text or (isinstance(value, str) and text == repr(value)):
            return f"{key} is {value!r}, which"
        if isinstance(value, dict) and (inner := _named_key(value, error)):
            return f"{key}.{inner}"
    return ""


def _reason(error: Exception) -> str:
    """The error on one line: validators put the reason below a headline."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = (lines[-1] if len(lines) <= 2 else lines[0]) if lines else ""
    return f"{type(error).__name__}: {reason}" if reason and len(lines) == 1 else reason or type(error).__name__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SpecError(
            f"reading a config.json needs transformers, which is not installed ({error}): "
            "pip install 'graphshard[demo]'"
        ) from None
    return transformers
