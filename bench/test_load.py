"""Loads of a small checkpoint by two processes; a round is the whole command, its rows are in the extra info."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from graphshard.bench.load_rows import load_row
from graphshard.bench.synthetic import SyntheticModel, write_checkpoint
from graphshard.comm.launch import raise_first_failure, run_ranks


@pytest.mark.parametrize("num_bytes", [64 * 2**20, 256 * 2**20])
def test_load(benchmark: BenchmarkFixture, tmp_path: Path, num_bytes: int) -> None:
    model = SyntheticModel.of_size(num_bytes)
    write_checkpoint(tmp_path, model, num_files=2)
    request = {"folder": str(tmp_path), "width": model.width, "num_layers": model.num_layers, "num_repeats": 3}

    def measure() -> list[dict[str, object]]:
        results = run_ranks("graphshard.cli.load_ranks:load", 2, arguments=[request])
        raise_first_failure(results)
        ranks = [result.value for result in results]
        return [load_row(run, ranks, run) for run in ("load", "read", "private", "again")]

    rows = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update({f"{row['what']}_s": row["seconds"] for row in rows})
    benchmark.extra_info.update({f"{row['what']}_GBps": row["GBps"] for row in rows})
