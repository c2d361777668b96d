"""Time to plan, lay out, emit and verify; `graphshard bench compile` prints the parts."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from graphshard.bench.compile import CompileRequest, measure_compile


@pytest.mark.parametrize("units", ["layer", "weight"])
@pytest.mark.parametrize("head", ["inside", "tail"])
def test_compile(benchmark: BenchmarkFixture, units: str, head: str) -> None:
    row = benchmark(measure_compile, CompileRequest(num_layers=93, num_shapes=16, units=units, head=head))
    benchmark.extra_info.update({key: row[key] for key in ("num_units", "num_ops")})
