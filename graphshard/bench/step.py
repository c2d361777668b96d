"""A whole step, ours beside its peers, in one launch: first whether the logits agree, then how long it takes.

All contenders live at once and take turns in blocks of steps, so they see the same machine. Every step starts at a
barrier, so all ranks work at once. The first step of a block is not counted: it finds its neighbour's caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphshard.bench.decode import Step
from graphshard.comm.group import Group

BLOCK_STEPS = 5
"""Counted steps of a contender's turn."""
CHECKED_STEPS = 4
TOLERANCE = 1e-3
"""Of the largest logit, for peers that may add up in another order; ours must agree in every bit."""


@dataclass(frozen=True)
class Contender:
    """One way to run the model's step."""

    run: str
    steps: Mapping[int, Step]
    """By batch size."""
    reset: Callable[[int], None]
    """Clears what steps of a batch size left behind: outputs and caches."""
    must_be_identical: bool
    unit: str | None = None
    prefetch_depth: int | None = None
    executor: str | None = None
    chosen: bool = False

    def facts(self) -> dict[str, Any]:
        """What its row says of it."""
        names = ("run", "unit", "prefetch_depth", "executor", "chosen")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Workload:
    """What the steps are fed: random tokens, one position after the other."""

    batch_sizes: Sequence[int]
    num_steps: int
    """Counted steps of each contender and batch size."""
    cache_length: int
    vocab_size: int


def measure_steps(
    group: Group,
    reference: Contender,
    contenders: Sequence[Contender],
    workload: Workload,
    on_steps: Callable[[int], None],
) -> dict[str, Any]:
    """What this rank measured (collective); `on_steps(n)` is called after n counted ones. `reference` is the truth."""
    measured: list[dict[str, Any]] = [{**contender.facts(), "batches": []} for contender in contenders]
    for batch_size in workload.batch_sizes:
        tokens = _tokens(workload, batch_size, group.rank)
        expected = check_logits(reference, batch_size, tokens)
        checks = [compare_logits(one, batch_size, tokens, expected) for one in contenders]
        samples = _time(group, contenders, batch_size, tokens, workload, on_steps)
        for into, check, found in zip(measured, checks, samples, strict=True):
            into["batches"].append({**check, **found})
    return {"batch_sizes": list(workload.batch_sizes), "contenders": measured}


def num_steps_of(num_contenders: int, workload: Workload) -> int:
    """How many steps `on_steps` will tell of."""
    return workload.num_steps * num_contenders * len(workload.batch_sizes)


def check_logits(contender: Contender, batch_size: int, tokens: Tensor) -> Tensor:
    """The logits of the first steps from clean caches, stacked."""
    contender.reset(batch_size)
    step, logits = contender.steps[batch_size], []
    for position in range(min(CHECKED_STEPS, len(tokens))):
        _run(step, tokens[position], position)
        logits.append(step.outputs["logits"].detach().clone())
    return torch.stack(logits)


def compare_logits(contender: Contender, batch_size: int, tokens: Tensor, expected: Tensor) -> dict[str, Any]:
    """`max_abs_diff` (0: equal bit for bit), and whether it agrees as far as it must."""
    found = check_logits(contender, batch_size, tokens)
    if torch.equal(found, expected):
        return {"max_abs_diff": 0.0, "agrees": True}
    difference = float((found - expected).abs().max())
    if not difference < float("inf"):  # NaN included, and JSON knows neither
        return {"max_abs_diff": torch.finfo(torch.float32).max, "agrees": False}
    close = difference <= TOLERANCE * float(expected.abs().max())
    return {"max_abs_diff": difference, "agrees": close and not contender.must_be_identical}


def _tokens(workload: Workload, batch_size: int, rank: int) -> Tensor:
    """`[position, batch, 1]`; ranks decode different sequences, as data-parallel ranks do."""
    generator = torch.Generator().manual_seed(1000 * batch_size + rank)
    return torch.randint(workload.vocab_size, (workload.cache_length, batch_size, 1), generator=generator)


def _run(step: Step, tokens: Tensor, position: int) -> None:
    step.inputs["tokens"].copy_(tokens)
    step.inputs["positions"].fill_(position)
    step.replay()


def _time(
    group: Group,
    contenders: Sequence[Contender],
    batch_size: int,
    tokens: Tensor,
    workload: Workload,
    on_steps: Callable[[int], None],
) -> list[dict[str, list[float]]]:
    """For each contender `samples_ms`, from before the inputs are written until the logits are there, and `cpu_ms`.

    `cpu_ms` is what all threads of this process used of the cores meanwhile: all that tells on a busy machine.
    """
    samples: list[dict[str, list[float]]] = [{"samples_ms": [], "cpu_ms": []} for _ in contenders]
    order = list(range(len(contenders)))
    for turn in range(-(-workload.num_steps // BLOCK_STEPS)):
        first = turn % len(order)
        counted = min(BLOCK_STEPS, workload.num_steps - turn * BLOCK_STEPS)
        for i in order[first:] + order[:first]:  # none is always after the same neighbour
            step = contenders[i].steps[batch_size]
            for at in range(counted + 1):
                position = (turn * BLOCK_STEPS + at) % workload.cache_length
                group.barrier("before a step")
                begin, begin_cpu = time.perf_counter(), time.process_time()
                _run(step, tokens[position], position)
                elapsed, elapsed_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
                if at:
                    samples[i]["samples_ms"].append(elapsed * 1e3)
                    samples[i]["cpu_ms"].append(elapsed_cpu * 1e3)
            on_steps(counted)
    return samples
