"""Steps of `graphshard bench speculative` at a small size; its rows are in the extra info."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from graphshard.bench.speculative import SpeculativeRequest, alone, speculative_rows
from graphshard.comm.launch import raise_first_failure, run_ranks
from graphshard.core.plan import Transport

NUM_RANKS = 2


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_speculative(benchmark: BenchmarkFixture, transport: Transport) -> None:
    request = SpeculativeRequest(
        fold_ms=1.0,
        draft_bytes=2 * 2**20,
        target_bytes=4 * 2**20,
        num_samples=10,
        transport=transport,
        in_turn=transport == "pull",
    )

    def launch() -> list[dict[str, object]]:
        results = run_ranks("graphshard.bench.speculative:measure_speculative", NUM_RANKS, arguments=[asdict(request)])
        raise_first_failure(results)
        return [result.value for result in results]

    ranks = benchmark.pedantic(launch, rounds=1)
    rows = speculative_rows(ranks)
    assert all(row["n"] == request.num_samples * NUM_RANKS for row in rows)
    benchmark.extra_info.update({f"{row['setting']} share": row["overlap_share"] for row in rows})
    benchmark.extra_info.update({key: summary.median for key, summary in alone(ranks).items()})
