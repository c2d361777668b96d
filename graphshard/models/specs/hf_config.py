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
        SpecError: the model type is unknown, or transformers refuses the config.
    """
    config = _config(file)
    transformers = _transformers()
    try:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    except Exception as error:  # whatever a model's constructor raises is about this config
        raise SpecError(
            f"{file.where}: transformers {transformers.__version__} makes no causal language model of model_type "
            f"{file.values['model_type']!r}: {_first_line(error)}; check the sizes, or make the module under "
            "torch.device('meta') yourself and give it to module_spec_on_meta"
        ) from error
    assert isinstance(module, nn.Module), f"from_config made a {type(module).__name__}"
    return module


def _config(file: ConfigFile) -> Any:
    """The config object of transformers."""
    _check_keys(file)
    values = {key: value for key, value in file.values.items() if key not in ("quantization_config", "auto_map")}
    made = _config_class(file)
    try:
        return made.from_dict(values)
    except Exception as error:  # transformers validates each field in its own way
        found = _named_key(file.values, error)
        key = f"{found} is {file.values[found]!r}" if found else "the config"
        raise file.error(key, f"is refused by transformers: {_first_line(error)}; correct it in the file") from error


def _config_class(file: ConfigFile) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = file.values["model_type"]
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    near = ", ".join(difflib.get_close_matches(str(kind), list(CONFIG_MAPPING), 3)) or "none"
    raise file.error(
        "model_type",
        f"is {kind!r}, which transformers {_transformers().__version__} does not know (near it: {near}): "
        "use a newer transformers, or make the module under torch.device('meta') and give it to module_spec_on_meta",
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
    """The first key of the config that the error's text quotes; empty if none."""
    text = str(error)
    return next((key for key in values if f"'{key}'" in text or f"`{key}`" in text), "")


def _first_line(error: Exception) -> str:
    """The error's last sentence on one line: validators put the reason below a headline."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if len(lines) <= 2 else lines[0]) if lines else type(error).__name__


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise SpecError(
            f"reading a config.json needs transformers, which is not installed ({error}): "
            "pip install 'graphshard[demo]'"
        ) from None
    return transformers
