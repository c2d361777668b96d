"""A launch of `graphshard bench step` on a small llama; its rows are in the extra info."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from small import CONFIG
from small_llama import write_small_llama

from graphshard.bench.step_rows import label_of, step_rows
from graphshard.comm.launch import raise_first_failure, run_ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "llama", CONFIG)


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
