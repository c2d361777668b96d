"""Steps of blocks, replicated, gathered and in slices, and as a plan chose, in turns of one run.

All four runtimes live at once, so they see the same machine. Every step begins at a barrier, so that all ranks work at
once; the first of a turn is not counted. What they give is compared with the replicated run's before anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graphshard.bench.dual_rows import MODES
from graphshard.comm.group import Group
from graphshard.core.plan import Transport
from graphshard.core.specs import StepShape
from graphshard.runtime.runtime import Runtime

TURN_STEPS = 3
"""Counted steps of a mode's turn."""
MIN_STEPS = 9
LEAST_S, MOST_S = 0.1, 0.4
"""For each step that was asked for: slow ones are repeated less often, down to MIN_STEPS; fast ones go on."""
TOLERANCE = {"float32": 2**-16, "bfloat16": 2**-4}
"""Of a token's largest number: sums of slices are rounded in other places, some 2^-24 and 2^-9 each, layer on layer."""


@dataclass(frozen=True)
class DualRequest:
    """What to measure; the same on all ranks."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    dtype: str
    tokens: list[int]
    """Of one rank."""
    num_steps: int
    transport: Transport


def measure_dual(
    group: Group, runtimes: Mapping[str, Runtime], request: DualRequest, on_tokens: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """For each number of tokens (as text) and mode what this rank measured (collective).

    `samples_ms` of steps; `difference` from the replicated step, of the token's largest number; whether it `agrees` as
    far as it must; `runs`: how the blocks run.
    """
    found: dict[str, dict[str, Any]] = {}
    for tokens in request.tokens:
        x = torch.randn(tokens, request.hidden_size, generator=torch.Generator().manual_seed(97 * tokens + group.rank))
        checks = _check(group, runtimes, tokens, x.to(getattr(torch, request.dtype)), TOLERANCE[request.dtype])
        samples = _time(group, runtimes, tokens, request.num_steps)
        found[str(tokens)] = {mode: {**checks[mode], "samples_ms": samples[mode]} for mode in MODES}
        on_tokens()
    return found


def how_blocks_run(runtime: Runtime, tokens: int) -> str:
    """`replicated`, or the mode of all blocks at this step shape; `mixed` if they have several."""
    modes = runtime.plan.modes_of(StepShape(tokens))
    if not runtime.plan.units:
        return "replicated"
    return modes[0] if len(set(modes)) == 1 else "mixed" if modes else "gather"


def _check(
    group: Group, runtimes: Mapping[str, Runtime], tokens: int, x: Tensor, tolerance: float
) -> dict[str, dict[str, Any]]:
    expected, checks = None, {}
    for mode in MODES:
        step = runtimes[mode].graph(tokens)
        step.inputs["x"].copy_(x)
        group.barrier(f"before a checked step, {mode}")
        step.replay()
        step.synchronize()
        got = step.outputs["y"].float()
        expected = got.clone() if expected is None else expected
        difference = ((got - expected).abs().amax(-1) / expected.abs().amax(-1)).max().item()
        runs = how_blocks_run(runtimes[mode], tokens)
        difference = difference if difference == difference else float("inf")
        agrees = difference <= (tolerance if runs in ("tensor_parallel", "mixed") else 0.0)
        checks[mode] = {"runs": runs, "difference": min(difference, 1e30), "agrees": agrees}
    return checks


def _time(group: Group, runtimes: Mapping[str, Runtime], tokens: int, num_steps: int) -> dict[str, list[float]]:
    """Milliseconds of each mode's steps. All ranks make as many: they go by the first rank's clock."""
    steps = {mode: runtimes[mode].graph(tokens) for mode in MODES}
    samples: dict[str, list[float]] = {mode: [] for mode in MODES}
    begin_all, turn = time.perf_counter(), 0
    while _goes_on(group, len(samples[MODES[0]]), num_steps, time.perf_counter() - begin_all):
        for mode in _rotated(MODES, turn):  # none is always after the same neighbour
            for at in range(TURN_STEPS + 1):
                group.barrier("before a step")
                begin = time.perf_counter()
                steps[mode].replay()
                steps[mode].synchronize()
                if at:
                    samples[mode].append((time.perf_counter() - begin) * 1e3)
        turn += 1
    return samples


def _goes_on(group: Group, done: int, num_steps: int, elapsed_s: float) -> bool:
    wants = done < min(MIN_STEPS, num_steps) or elapsed_s < num_steps * (MOST_S if done < num_steps else LEAST_S)
    return bool(group.all_gather(wants, name="goes on")[0][0])


def _rotated(modes: Sequence[str], turn: int) -> list[str]:
    first = turn % len(modes)
    return [*modes[first:], *modes[:first]]
