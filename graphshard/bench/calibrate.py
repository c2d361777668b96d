"""What a machine's ranks can do, measured on all of them at once: copies, launches, gemms, and each beside the other.

Everything is repeated in turns, so that other programs disturb all alike.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from graphshard._core import memcpy
from graphshard.bench.dispatch import DispatchRequest, noop_step
from graphshard.bench.gather import GatherRequest, measure_gather
from graphshard.bench.noop import c_noop_calls, noop_runtime
from graphshard.bench.stats import quantile
from graphshard.bench.trace import bound_of
from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.runtime.memory import torch_dtype
from graphshard.schedule.auto import make_plan
from graphshard.schedule.synthetic import synthetic_model

COPY_SIZES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20, 14 * 2**20)
FAN_OUTS = (1, 2)
FAN_OUT_BYTES = 14 * 2**20
NUM_UNITS = 200
COLD_BYTES = 96 * 2**20
"""Weights that are read before one is read again."""
WINDOW_S = 0.15
"""Compute and copies are counted for so long, alone and beside each other."""
NUM_WINDOWS = 5
BLOCK_BYTES = 2**20
TIMEOUT_S = 60.0

Key = TypeVar("Key")
GemmShape = tuple[int, int, int, str]
"""m, n, k, dtype."""


def copy_us(group: Group, num_repeats: int) -> dict[int, float]:
    """Microseconds of a gather by bytes, its memory cold."""
    rows = measure_gather(group, GatherRequest(COPY_SIZES, ("memcpy",), num_repeats, COLD_BYTES))
    return {int(str(row["num_bytes"])): float(str(row["us"])) for row in rows if row["what"] == "pull"}


def fan_out_us(group: Group, num_repeats: int) -> dict[int, float]:
    """Microseconds of a gather of FAN_OUT_BYTES by the number of copy streams it is spread over, a thread each."""
    model = synthetic_model(max(2, COLD_BYTES // FAN_OUT_BYTES), (("proj", (FAN_OUT_BYTES,)),), dtype="uint8")
    device = DeviceSpec(kind="host", name="bench", memory_bytes=2**40)
    runs: dict[int, Callable[[], None]] = {}
    runtimes = []
    for streams in FAN_OUTS:
        plan = make_plan(
            model, group.world_size, device, units="layer", prefetch_depth=0, executor="threaded",
            num_copy_streams=streams, step_shapes=(StepShape(1),),
        )  # fmt: skip
        runtime = noop_runtime(model, plan, group, TIMEOUT_S)
        runtimes.append(runtime)
        bound = bound_of(runtime, StepShape(1))
        launcher = bound.op_list.capture(c_noop_calls(len(bound.computes)), (), TIMEOUT_S).instantiate("threaded")
        origin = bound.streams[0]

        def run(launcher=launcher, origin=origin) -> None:  # type: ignore[no-untyped-def]  # binds the loop's own
            launcher.launch(origin)
            if not origin.synchronize(TIMEOUT_S):
                raise CommError(f"a fanned-out gather did not end within {TIMEOUT_S:.1f} s")

        runs[streams] = run
    found = _in_turns(group, runs, num_repeats)
    count = len(model.weights)
    runs.clear()
    group.barrier("fan-out measured")
    for runtime in runtimes:
        runtime.close()
    return {streams: us / count for streams, us in found.items()}


@dataclass(frozen=True)
class LaunchCost:
    """us; of a step of NUM_UNITS units that move almost nothing, and of one with a single unit."""

    one_us: dict[str, float]
    """A step of one unit, by how it is run: eager, cooperative, threaded."""
    per_unit_us: dict[str, float]
    num_ops: int
    """Bound ops of a unit."""


def launch_cost(group: Group, num_repeats: int) -> LaunchCost:
    """What launching and passing ops on costs while all ranks do it."""
    one, many = (
        noop_step(group, DispatchRequest(num_units=count, prefetch_depth=1, timeout_s=TIMEOUT_S))
        for count in (1, NUM_UNITS)
    )
    with one, many:
        runs: dict[tuple[str, int], Callable[[], None]] = {}
        for variant in many.variants:
            runs[variant, 1] = lambda variant=variant: one.run(variant)  # type: ignore[misc]
            runs[variant, NUM_UNITS] = lambda variant=variant: many.run(variant)  # type: ignore[misc]
        found = _in_turns(group, runs, num_repeats)
        num_ops = max(1, round(many.num_bound_ops / NUM_UNITS))
        group.barrier("launches measured")
    return LaunchCost(
        {variant: found[variant, 1] for variant, _ in runs},
        {variant: max(0.0, found[variant, NUM_UNITS] - found[variant, 1]) / (NUM_UNITS - 1) for variant, _ in runs},
        num_ops,
    )


def gemm_times(
    group: Group, shapes: Sequence[GemmShape], num_repeats: int, cold_bytes: int = COLD_BYTES
) -> tuple[dict[GemmShape, float], dict[GemmShape, float]]:
    """Microseconds of each gemm with its weight in memory, and with its weight read just before.

    `cold_bytes` of weights are read before one is read again.
    """
    cold: dict[GemmShape, float] = {}
    hot: dict[GemmShape, float] = {}
    for shape in shapes:
        m, n, k, name = shape
        dtype = torch_dtype(name)
        x, out = torch.randn(m, k).to(dtype), torch.empty(m, n, dtype=dtype)
        one = torch.randn(n, k).to(dtype)
        count = max(1, -(-cold_bytes // (one.numel() * one.element_size())))
        weights = [one] + [one.clone() for _ in range(count - 1)]
        group.barrier("before a gemm")
        cold[shape] = _gemm_us(x, out, [weights[i % count] for i in range(max(num_repeats, count) + 1)])
        hot[shape] = _gemm_us(x, out, [one] * (num_repeats + 1))
    return cold, hot


def _gemm_us(x: torch.Tensor, out: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    """The median over `weights` but the first."""
    times = []
    with torch.inference_mode():
        for weight in weights:
            begin = time.perf_counter()
            torch.mm(x, weight.t(), out=out)
            times.append((time.perf_counter() - begin) * 1e6)
    return quantile(sorted(times[1:]), 0.5)


@dataclass(frozen=True)
class Contention:
    """How much longer each takes beside the other, both on all ranks: 1.0 is not at all, 2.0 that they share a core."""

    compute: float
    copy: float


def contention(group: Group, n: int, k: int) -> Contention:
    """Gemms of one row by [n, k] weights beside copies of blocks that come from memory."""
    rates: dict[str, list[tuple[float, float]]] = {"compute": [], "copy": [], "both": []}
    count = max(2, COLD_BYTES // (n * k * 4))
    weights = [torch.randn(n, k) for _ in range(count)]
    source, target = torch.ones(COLD_BYTES, dtype=torch.uint8), torch.empty(BLOCK_BYTES, dtype=torch.uint8)
    x, out = torch.randn(1, k), torch.empty(1, n)

    def compute(i: int) -> None:
        torch.mm(x, weights[i % count].t(), out=out)

    def copy(i: int) -> None:
        offset = i * BLOCK_BYTES % COLD_BYTES
        memcpy(target.data_ptr(), source.data_ptr() + offset, BLOCK_BYTES)

    with torch.inference_mode():
        for _ in range(NUM_WINDOWS):
            for what, found in rates.items():
                group.barrier(f"contention: {what}")
                found.append(_window(compute if what != "copy" else None, copy if what != "compute" else None))

    def slowdown(index: int, alone: str) -> float:
        ratios = sorted(
            one[index] / max(both[index], 1e-9) for one, both in zip(rates[alone], rates["both"], strict=True)
        )
        return max(1.0, quantile(ratios, 0.5))

    return Contention(slowdown(0, "compute"), slowdown(1, "copy"))


def _window(compute: Callable[[int], None] | None, copy: Callable[[int], None] | None) -> tuple[float, float]:
    """(gemms, copies) a second, for WINDOW_S."""
    end = threading.Event()
    counts = [0, 0]

    def loop(index: int, work: Callable[[int], None]) -> None:
        torch.set_num_threads(1)  # thread-local in effect
        with torch.inference_mode():
            while not end.is_set():
                work(counts[index])
                counts[index] += 1

    given = [(index, work) for index, work in enumerate((compute, copy)) if work is not None]
    threads = [threading.Thread(target=loop, args=pair, daemon=True) for pair in given]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    end.wait(WINDOW_S)
    end.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    elapsed = time.perf_counter() - begin
    return counts[0] / elapsed, counts[1] / elapsed


def _in_turns(group: Group, runs: Mapping[Key, Callable[[], None]], num_repeats: int) -> dict[Key, float]:
    """The lower quartile of each, in us: others only add to it. Runs begin at a barrier, the first two do not count."""
    samples: dict[Key, list[float]] = {what: [] for what in runs}
    for turn in range(2 + num_repeats):
        for what, run in runs.items():
            group.barrier("before a run")
            begin = time.perf_counter()
            run()
            if turn >= 2:
                samples[what].append((time.perf_counter() - begin) * 1e6)
    return {what: quantile(sorted(found), 0.25) for what, found in samples.items()}
