"""Gathers between two processes; a round is the whole command, its rows are in the extra info."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from graphshard.comm.launch import raise_first_failure, run_ranks


@pytest.mark.parametrize("num_bytes", [2**20, 4 * 2**20])
def test_gather(benchmark: BenchmarkFixture, num_bytes: int) -> None:
    request = {"sizes": [num_bytes], "peers": ["memcpy"], "num_repeats": 5, "cold_bytes": 32 * 2**20}

    def measure() -> list[dict[str, object]]:
        results = run_ranks("graphshard.cli.ranks:gather", 2, arguments=[request])
        raise_first_failure(results)
        return list(results[0].value)

    rows = benchmark.pedantic(measure, rounds=1)
    benchmark.extra_info.update({f"{row['what']}_us": row["us"] for row in rows})
    benchmark.extra_info.update({f"{row['what']}_GBps": row["GBps"] for row in rows})
