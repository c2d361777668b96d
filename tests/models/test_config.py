from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graphshard.core.errors import SpecError
from graphshard.models.config import LlamaConfig, RopeConfig, llama_config, load_llama_config

SETTINGS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_defaults_are_those_of_transformers() -> None:
    config = llama_config(SETTINGS)
    assert config == LlamaConfig(100, 64, 96, 2, 4, num_kv_heads=4, head_dim=16)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaConfig(**{key: value for key, value in SETTINGS.items() if key != "model_type"})
    assert (config.norm_eps, config.head_dim, config.num_kv_heads, config.max_positions, config.tied_embeddings) == (
        theirs.rms_norm_eps, theirs.head_dim, theirs.num_key_value_heads, theirs.max_position_embeddings,
        theirs.tie_word_embeddings,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "rope"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(5e5, "linear", 2.0)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
        ),
    ],
)  # fmt: skip
def test_rope_of_either_generation(more: dict[str, Any], rope: RopeConfig) -> None:
    assert llama_config(SETTINGS | more).rope == rope


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "64"}, "hidden_size is '64', not an integer"),
        ({"hidden_size": 65}, "head_dim is not given, and hidden_size 65 is not a multiple of 4 heads"),
        ({"num_attention_heads": 0}, "num_heads is 0, must be at least 1"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is not even"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', not a number"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported are llama, mistral"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window is 4096; only full attention"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only silu"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling: rope_type is 'yarn'; supported are default"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": 2}, "rope_scaling is 2, not an object"),
        ({"dtype": "float33"}, "dtype is float33, a llama computes in one of"),
        ({"eos_token_id": "x"}, "eos_token_id is 'x', not an integer"),
        ({"eos_token_id": [1, "x"]}, "eos_token_id holds 'x', not an integer"),
        ({"eos_token_id": [True]}, "eos_token_id holds True, not an integer"),
        ({"dtype": "int8"}, "dtype is int8, a llama computes in one of float32, bfloat16, float16, float64"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06, not a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a finite number above 0"),
        ({"rope_theta": float("inf")}, "rope_theta is inf, not a finite number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0, not a finite number above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "rope_scaling: factor is 0.0, not a finite number"),
        ({"max_position_embeddings": 0}, "max_positions is 0, must be at least 1"),
        ({"num_hidden_layers": 10_001}, "num_layers is 10001, more than the 10000"),
    ],
)
def test_what_cannot_be_read_names_the_key(more: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        llama_config(SETTINGS | more)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"no model config: .*config\.json cannot be read \(No such file"):
        load_llama_config(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(SpecError, match=r"config\.json is not JSON"):
        load_llama_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(SpecError, match="holds a list"):
        load_llama_config(file)
    file.write_text(json.dumps(SETTINGS | {"eos_token_id": [2, 3]}))
    assert load_llama_config(tmp_path).eos_token_ids == (2, 3)
    file.write_text(json.dumps({}))
    with pytest.raises(SpecError, match=r"config\.json: model_type is missing"):
        load_llama_config(tmp_path)
    for change, says in (
        ({"num_attention_heads": 6, "head_dim": 16, "num_key_value_heads": 4}, "num_heads 6 is not a multiple"),
        ({"head_dim": 0}, "head_dim is 0, must be at least 1"),
    ):
        file.write_text(json.dumps(SETTINGS | change))
        with pytest.raises(SpecError, match=rf"config\.json: {says}"):
            load_llama_config(tmp_path)
    file.write_text('{"a": ' + "[" * 200_000)
    with pytest.raises(SpecError, match=r"config\.json is nested deeper than any config"):
        load_llama_config(tmp_path)
