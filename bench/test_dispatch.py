"""An op that does nothing, eager and captured; `graphshard bench dispatch` interleaves the same variants."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from graphshard.bench.dispatch import OPS_PER_UNIT, DispatchRequest, NoopStep, noop_step
from graphshard.bench.threads import run_threads

NUM_UNITS = 200


@pytest.fixture(scope="module")
def step() -> Iterator[NoopStep]:
    request = DispatchRequest(num_units=NUM_UNITS)
    with run_threads(lambda group: noop_step(group, request), 1)[0] as made:
        yield made


@pytest.mark.parametrize("variant", ["eager", "cooperative", "threaded"])
def test_dispatch(benchmark: BenchmarkFixture, step: NoopStep, variant: str) -> None:
    benchmark(step.run, variant)
    benchmark.extra_info["ns_per_op"] = benchmark.stats.stats.median * 1e9 / (OPS_PER_UNIT * NUM_UNITS)
