"""What a rank of `trace` runs: it decodes its prompts, and then looks at one more step."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from graphshard.bench.decode import num_steps
from graphshard.bench.side_by_side import NUM_WARMUPS, Workload, run_workload
from graphshard.bench.trace import trace_timeline
from graphshard.cli.loading import compile_shown
from graphshard.comm.group import Group
from graphshard.models.llama import load_llama
from graphshard.runtime.graphs import StepGraph

TIMEOUT_S = 60.0
NUM_REPLAYS = 20


def trace(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """The timeline of a traced step on this rank, beside the times of untraced ones."""
    torch.set_num_threads(1)
    folder, batch_size = Path(values["model"]), values["batch_size"]
    prompts = values["prompts"][:1] * batch_size
    workload = Workload(prompts, values["num_tokens"], num_steps(prompts, values["num_tokens"]))
    length = max(values["cache_length"], workload.num_steps)
    model = load_llama(folder, batch_size, length)
    with compile_shown(
        model,
        group,
        checkpoint=folder,
        ignore=model.redundant_tensors,
        capture_sizes=[batch_size],
        timeout_s=TIMEOUT_S,
        **values["choices"],
    ) as runtime:
        run_workload(runtime, workload, "graph")  # so that inputs and caches hold what they do in use
        group.barrier("before the timed steps")
        timed_ms = _timed_ms(runtime.graph(batch_size))
        timeline = trace_timeline(runtime, workload.shape, before_last=group.barrier)
        group.barrier("after the traced step")
        plan = runtime.plan
        return {
            "timeline": asdict(timeline),
            "step_ms": timed_ms,
            "unit_names": [unit.name for unit in plan.units],
            "plan": {
                "units": plan.unit_policy,
                "prefetch_depth": plan.prefetch_depth,
                "head": plan.head,
                "executor": plan.executor,
            },
        }


def _timed_ms(graph: StepGraph) -> list[float]:
    """Times of the real graph's replays, one right after the other as the traced one is replayed."""
    times_ms = []
    for _ in range(NUM_WARMUPS + NUM_REPLAYS):
        begin = time.perf_counter()
        graph.replay()
        times_ms.append((time.perf_counter() - begin) * 1e3)
    return times_ms[NUM_WARMUPS:]
