"""What an op costs when it does nothing: eager issue beside captured replay, launch and synchronise included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from graphshard._core import Stream
from graphshard.bench.noop import c_noop_calls, noop_runtime
from graphshard.bench.stats import summarize
from graphshard.bench.trace import bound_of
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.plan import Executor
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import synthetic_model

OPS_PER_UNIT = 4
"""ag_launch, wait_once, gemm, record_gate."""
EXECUTORS: tuple[Executor, ...] = ("cooperative", "threaded")
SHAPE = StepShape(1)


@dataclass(frozen=True)
class DispatchRequest:
    """What to measure."""

    num_units: int = 200
    unit_bytes: int = 4096
    prefetch_depth: int = 0
    num_repeats: int = 50
    timeout_s: float = 30.0


def dispatch_model(num_units: int, unit_bytes: int) -> ModelSpec:
    """`num_units` layers of one weight of `unit_bytes` bytes, one segment each."""
    return synthetic_model(num_units, (("proj", (unit_bytes // 4,)),), dtype="float32")


def measure_dispatch(group: Group, request: DispatchRequest) -> list[dict[str, object]]:
    """Rows `{run, executor, ns_per_op, ...}`. Collective to set up; then rank 0 steps alone, as `pull` allows."""
    model = dispatch_model(request.num_units, request.unit_bytes)
    device = DeviceSpec(kind="host", name="bench", memory_bytes=2**40)
    plan = make_plan(
        model,
        group.world_size,
        device,
        units="layer",
        prefetch_depth=request.prefetch_depth,
        executor="cooperative",
        step_shapes=(SHAPE,),
        min_shard_bytes=0,
    )
    with noop_runtime(model, plan, group, request.timeout_s) as runtime:
        rows = _measure(bound_of(runtime, SHAPE), request) if group.rank == 0 else []
        group.barrier("dispatch measured")
    return rows


def _measure(bound: BoundProgram, request: DispatchRequest) -> list[dict[str, object]]:
    """All variants in turn, `num_repeats` times: they see the same machine."""
    origin = bound.streams[0]
    calls = c_noop_calls(len(bound.computes))
    graph = bound.op_list.capture(calls)
    execs = {executor: graph.instantiate(executor) for executor in EXECUTORS}
    variants: dict[tuple[str, str | None], Callable[[], None]] = {
        ("eager", None): lambda: bound.op_list.issue(calls),
        **{("graph", name): (lambda e=one: e.launch(origin)) for name, one in execs.items()},  # type: ignore[misc]
    }
    samples: dict[tuple[str, str | None], list[float]] = {key: [] for key in variants}
    for repeat in range(request.num_repeats + 3):  # the first three warm up
        for key, launch in variants.items():
            begin = time.perf_counter_ns()
            launch()
            _finish(origin, request.timeout_s)
            if repeat >= 3:
                samples[key].append((time.perf_counter_ns() - begin) / (OPS_PER_UNIT * request.num_units))
    calls.check()
    num_ops = OPS_PER_UNIT * request.num_units
    return [
        {
            "run": run,
            "executor": executor,
            "ns_per_op": summary.median,
            "p10_ns": summary.p10,
            "p90_ns": summary.p90,
            "n": summary.n,
            "num_ops": num_ops,
            "num_bound_ops": len(bound.op_list),
            "samples_ns": samples[run, executor],
        }
        for (run, executor) in variants
        for summary in [summarize(samples[run, executor])]
    ]


def _finish(stream: Stream, timeout_s: float) -> None:
    if not stream.synchronize(timeout_s):
        raise CommError(f"no-op steps did not end within {timeout_s:.1f} s")
