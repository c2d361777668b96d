"""A random llama folder as `transformers` would save one, small enough to decode in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama

CONFIG = LlamaConfig(
    vocab_size=320,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    tied_embeddings=True,
)


def write_small_llama(folder: Path, config: LlamaConfig = CONFIG) -> Path:
    """`folder` with config.json and model.safetensors; there is no tokenizer."""
    folder.mkdir()
    _, weights = random_llama(config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder
