"""A step of a small random llama on one rank: replicated beside sharded, eager and captured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from small import CONFIG

import graphshard
from graphshard.bench.decode import EagerStep
from graphshard.core.specs import StepShape
from graphshard.models.llama import random_llama

BATCH_SIZE = 4


@pytest.fixture(scope="module", params=["replicated", "auto"])
def runtime(request: pytest.FixtureRequest) -> Iterator[graphshard.Runtime]:
    torch.set_num_threads(1)
    model, weights = random_llama(CONFIG)
    group = graphshard.LocalGroup(1)[0]
    with graphshard.compile(model, group, checkpoint=weights, plan=request.param, capture_sizes=[BATCH_SIZE]) as made:
        yield made
    group.close()


@pytest.mark.parametrize("run", ["eager", "graph"])
def test_step(benchmark: BenchmarkFixture, runtime: graphshard.Runtime, run: str) -> None:
    shape = StepShape(BATCH_SIZE)
    step = runtime.graph(BATCH_SIZE) if run == "graph" else EagerStep(runtime, shape)
    benchmark(step.replay)
    benchmark.extra_info["num_units"] = len(runtime.plan.units)
