"""What an op costs when it does nothing: eager issue beside captured replay, launch and synchronise included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from graphshard.bench.noop import c_noop_calls, noop_runtime
from graphshard.bench.stats import summarize
from graphshard.bench.trace import bound_of
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.plan import Executor
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import synthetic_model

OPS_PER_UNIT = 4
"""ag_launch, wait_once, gemm, record_gate."""
EXECUTORS: tuple[Executor, ...] = ("cooperative", "threaded")
SHAPE = StepShape(1)
NUM_WARMUPS = 3


@dataclass(frozen=True)
class DispatchRequest:
    """What to measure."""

    num_units: int = 200
    unit_bytes: int = 4096
    prefetch_depth: int = 1
    num_repeats: int = 50
    timeout_s: float = 30.0


def dispatch_model(num_units: int, unit_bytes: int) -> ModelSpec:
    """`num_units` layers of one weight of `unit_bytes` bytes, one segment each."""
    return synthetic_model(num_units, (("proj", (unit_bytes // 4,)),), dtype="float32")


class NoopStep:
    """A step of no-op segments on one rank, and three ways to run it. A context manager: it holds a runtime."""

    def __init__(self, runtime: Runtime, timeout_s: float) -> None:
        self._runtime, self._timeout_s = runtime, timeout_s
        bound = bound_of(runtime, SHAPE)
        calls = c_noop_calls(len(bound.computes))
        graph = bound.op_list.capture(calls, (), timeout_s)
        execs = {executor: graph.instantiate(executor) for executor in EXECUTORS}
        self._origin = bound.streams[0]
        self._launches: dict[str, Callable[[], None]] = {"eager": lambda: bound.op_list.issue(calls)}
        for executor, one in execs.items():
            self._launches[executor] = partial(one.launch, self._origin)
        self.num_bound_ops = len(bound.op_list)

    @property
    def variants(self) -> tuple[str, ...]:
        """`eager`, and one captured variant an executor."""
        return tuple(self._launches)

    def run(self, variant: str) -> None:
        """Launch and synchronise."""
        self._launches[variant]()
        if not self._origin.synchronize(self._timeout_s):
            raise CommError(f"a no-op step ({variant}) did not end within {self._timeout_s:.1f} s")

    def __enter__(self) -> NoopStep:
        return self

    def __exit__(self, *raised: object) -> None:
        self._launches.clear()
        self._runtime.close()


def noop_step(group: Group, request: DispatchRequest) -> NoopStep:
    """The step that `request` describes (collective)."""
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
    return NoopStep(noop_runtime(model, plan, group, request.timeout_s), request.timeout_s)


def measure_dispatch(group: Group, request: DispatchRequest) -> list[dict[str, object]]:
    """Rows `{run, executor, ns_per_op, ...}`. Collective to set up; then rank 0 steps alone, as `pull` allows."""
    with noop_step(group, request) as step:
        rows = _measure(step, request) if group.rank == 0 else []
        group.barrier("dispatch measured")
    return rows


def _measure(step: NoopStep, request: DispatchRequest) -> list[dict[str, object]]:
    """All variants in turn, `num_repeats` times: they see the same machine."""
    num_ops = OPS_PER_UNIT * request.num_units
    samples: dict[str, list[float]] = {variant: [] for variant in step.variants}
    for repeat in range(NUM_WARMUPS + request.num_repeats):
        for variant in step.variants:
            begin = time.perf_counter_ns()
            step.run(variant)
            if repeat >= NUM_WARMUPS:
                samples[variant].append((time.perf_counter_ns() - begin) / num_ops)
    return [
        {
            "run": "eager" if variant == "eager" else "graph",
            "executor": None if variant == "eager" else variant,
            "ns_per_op": summary.median,
            "p10_ns": summary.p10,
            "p90_ns": summary.p90,
            "n": summary.n,
            "num_ops": num_ops,
            "num_bound_ops": step.num_bound_ops,
            "samples_ns": samples[variant],
        }
        for variant in step.variants
        for summary in [summarize(samples[variant])]
    ]
