"""A launch of `graphshard bench step` on a small llama; its rows are in the extra info."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from safetensors.torch import save_file

from graphshard.bench.step_rows import label_of, step_rows
from graphshard.comm.launch import raise_first_failure, run_ranks
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
AS_SAVED = {
    "model_type": "llama",
    "vocab_size": CONFIG.vocab_size,
    "hidden_size": CONFIG.hidden_size,
    "intermediate_size": CONFIG.intermediate_size,
    "num_hidden_layers": CONFIG.num_layers,
    "num_attention_heads": CONFIG.num_heads,
    "num_key_value_heads": CONFIG.num_kv_heads,
    "head_dim": CONFIG.head_dim,
    "rms_norm_eps": CONFIG.norm_eps,
    "rope_theta": CONFIG.rope.theta,
    "max_position_embeddings": CONFIG.max_positions,
    "tie_word_embeddings": CONFIG.tied_embeddings,
    "hidden_act": "silu",
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_file(random_llama(CONFIG)[1], folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(AS_SAVED))
    return folder


@pytest.mark.parametrize("batch_size", [1, 4])
def test_step(benchmark: BenchmarkFixture, model: Path, batch_size: int) -> None:
    request = {
        "model": str(model),
        "batch_sizes": [batch_size],
        "num_steps": 20,
        "cache_length": 64,
        "peers": ["replicated", "fsdp2"],
        "plans": [["layer", 0, "cooperative"]],
        "title": "",
    }

    def launch() -> list[dict[str, object]]:
        results = run_ranks("graphshard.cli.step_ranks:step", 2, arguments=[request])
        raise_first_failure(results)
        return step_rows([[result.value for result in results]])

    rows = benchmark.pedantic(launch, rounds=1)
    assert all(row["agrees"] for row in rows)
    benchmark.extra_info.update({f"{label_of(row)} ms": row["median_ms"] for row in rows})
