"""The small llama that benchmarks of whole steps decode with."""

from __future__ import annotations

from graphshard.models.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
