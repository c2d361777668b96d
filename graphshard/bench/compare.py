"""One program eagerly and captured: is the same done in the same order, on all ranks, and what does each way cost?

What is compared was seen: the graph is walked, and the eager run's driver calls are traced. Ranks compare what they
captured before anything is run: under a collective transport a rank that lacks a gather would hang all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphshard.bench.decode import clear_state
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.evidence.inspection import listed, traced_run
from graphshard.runtime.evidence.sequence import Difference, Seen, SeenOp, compare_runs, first_difference
from graphshard.runtime.runtime import Runtime

RUNS = ("eager", "graph")
BLOCK_STEPS = 5
"""Counted steps of a run's turn; the first one before them finds the other run's caches, and is not counted."""


@dataclass
class Samples:
    """Of one run on one rank, a number a step."""

    step_ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)
    """From the call until the host waits: all that it does to enqueue the step."""
    launch_us: list[float] = field(default_factory=list)
    """Of that, handing the step to the driver: all ops of the list, or one graph launch."""


def compare_step(group: Group, runtime: Runtime, shape: StepShape, num_steps: int) -> dict[str, Any]:
    """What this rank saw and measured of steps of `shape` (collective).

    `rows` by run, `ran` (False: ranks captured unlike sequences, so nothing was run, and the eager rows are those of
    the list as bound), `difference` (the same on all ranks, or None), `report`, `outputs_equal`, `samples`.
    """
    step = runtime.graph(shape.batch_size, shape.tokens_per_sequence)
    nodes = step.look()
    captured, report = nodes.seen(), nodes.report()
    found: dict[str, Any] = {"report": asdict(report), "claim": report.claim}
    difference = _unlike_ranks(group, "graph", captured.ops)
    if difference is not None:
        eager = listed(runtime, shape)
        found |= {"ran": False, "difference": difference, "outputs_equal": None, "samples": {}}
    else:
        eager, outputs_equal = _run_both(runtime, shape)
        difference = _unlike_ranks(group, "eager", eager.ops)
        difference = difference or _unlike_runs(group, compare_runs(eager, captured))
        samples = _time(group, runtime, shape, num_steps)
        found |= {"ran": True, "difference": difference, "outputs_equal": outputs_equal}
        found["samples"] = {run: asdict(one) for run, one in samples.items()}
    found["rows"] = {"eager": [asdict(op) for op in eager.ops], "graph": [asdict(op) for op in captured.ops]}
    return found


def _unlike_ranks(group: Group, run: str, ops: Sequence[SeenOp]) -> dict[str, Any] | None:
    """The first rank whose sequence is not rank 0's, and where (collective)."""
    told: list[Any] = group.all_gather([asdict(op) for op in ops], name=f"sequence of the {run} run")
    sequences = [[SeenOp.of(values) for values in rank] for rank, _ in told]
    for rank, sequence in enumerate(sequences):
        difference = first_difference(sequences[0], sequence, order=True)
        if difference is not None:
            return _told(difference, rank, (f"rank 0's {run} run", f"rank {rank}'s"))
    return None


def _unlike_runs(group: Group, mine: Difference | None) -> dict[str, Any] | None:
    """The first rank whose two runs differ, and where (collective)."""
    told = group.all_gather(asdict(mine) if mine is not None else None, name="difference of runs")
    for rank, (values, _) in enumerate(told):
        if isinstance(values, dict):
            return _told(Difference(**values), rank, (f"rank {rank}'s eager run", "its graph"))
    return None


def _told(difference: Difference, rank: int, names: tuple[str, str]) -> dict[str, Any]:
    return {**asdict(difference), "rank": rank, "between": list(names), "text": difference.text(*names)}


def _run_both(runtime: Runtime, shape: StepShape) -> tuple[Seen, bool]:
    """An eager run, traced, and a replay from the same state; whether all bits of the outputs are equal."""
    clear_state(runtime, shape)
    eager = traced_run(runtime, shape)
    outputs = {name: tensor.clone() for name, tensor in runtime.buffers(shape, "output").items()}
    clear_state(runtime, shape)
    runtime.graph(shape.batch_size, shape.tokens_per_sequence).replay()
    replayed = runtime.buffers(shape, "output")
    return eager, all(_same_bits(outputs[name], replayed[name]) for name in outputs)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    a, b = (tensor.contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(a, b)


def _wait(runtime: Runtime) -> None:
    """Until a step is over: on a GPU it returns when it is enqueued."""
    if not runtime.driver.is_host:
        torch.cuda.synchronize()


def _time(group: Group, runtime: Runtime, shape: StepShape, num_steps: int) -> dict[str, Samples]:
    """Both runs in turns, each step from a barrier on, so all ranks work at once (collective)."""
    graph = runtime.graph(shape.batch_size, shape.tokens_per_sequence)
    steps: dict[str, Callable[[], object]] = {
        "eager": lambda: runtime.run(shape.batch_size, shape.tokens_per_sequence),
        "graph": graph.replay,
    }
    samples = {run: Samples() for run in RUNS}
    for turn in range(-(-num_steps // BLOCK_STEPS)):
        for run in RUNS if turn % 2 == 0 else RUNS[::-1]:
            for at in range(min(BLOCK_STEPS, num_steps - turn * BLOCK_STEPS) + 1):
                group.barrier("before a step")
                begin = time.perf_counter()
                steps[run]()
                _wait(runtime)
                elapsed = time.perf_counter() - begin
                if at:
                    samples[run].step_ms.append(elapsed * 1e3)
                    samples[run].host_us.append((runtime.handed_over_s - begin) * 1e6)
                    samples[run].launch_us.append(runtime.launch_s * 1e6)
    return samples
