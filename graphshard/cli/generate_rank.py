"""What a rank of `generate` runs: its prompts through a sharded runtime, then, if asked, the report's measurements.

Nothing here waits for another rank once the runtime is built. A rank that is done keeps its runtime open until the
command says `end`, as a rank that comes back needs somebody who is there.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphshard.bench.decode import Decoded, OnToken, Step, clear_state, decode, num_steps, step_of
from graphshard.cli.generate_sizes import dealt
from graphshard.cli.generate_wire import Lines, connect
from graphshard.cli.loading import compile_shown
from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.specs import StepShape
from graphshard.models.open import open_model
from graphshard.runtime.runtime import Runtime

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class GenerateRequest:
    """What ranks do; the same on all of them, and on those that come back."""

    model: str
    prompts: list[list[int]]
    num_tokens: int
    batch_size: int
    cache_length: int
    run: str
    choices: dict[str, Any]
    report: bool
    address: str
    """Where the command listens."""
    fault: list[Any] | None
    """[signal name, rank, step] that a test orders."""

    @property
    def shape(self) -> StepShape:
        """Of every step."""
        return StepShape(self.batch_size)

    def batches(self, rank: int, world_size: int) -> list[list[int]]:
        """The prompts of a rank, by number."""
        return dealt(len(self.prompts), rank, world_size, self.batch_size)

    def num_steps(self, rank: int, world_size: int) -> int:
        """The steps that a rank's batches take."""
        batches = self.batches(rank, world_size)
        return sum(num_steps([self.prompts[i] for i in numbers], self.num_tokens) for numbers in batches)


def generate(group: Group, values: dict[str, Any]) -> None:
    """`generate` on one rank. What it made goes to the command at once, and again nowhere."""
    request = GenerateRequest(**values)
    torch.set_num_threads(1)
    lines = connect(request.address)
    lines.send({"what": "hello", "rank": group.rank})
    measure = _report_of(group, request) if request.report else None
    make = maker(group, request)
    runtime = make("auto") if measure is None else measure.started("sharded", lambda: make("auto"))
    with runtime:
        lines.send({"what": "ready", "is_newcomer": isinstance(group, Newcomer)})
        batches = decode_batches(runtime, group, request, lines)
        lines.send({"what": "done", "batches": batches})
        counts = [request.num_steps(rank, group.world_size) for rank in range(group.world_size)]
        keep_company(runtime, step_of(runtime, request.shape, request.run), counts)
        if wait_for_order(lines) == "end":
            return
        assert measure is not None
        measure.run("sharded", runtime, batches)
    del runtime
    with measure.started("replicated", lambda: make("replicated")) as runtime:
        measure.run("replicated", runtime, decode_batches(runtime, group, request, None))
    lines.send({"what": "report", "report": measure.told()})
    wait_for_order(lines)


def maker(group: Group, request: GenerateRequest) -> Callable[[str], Runtime]:
    """Builds runtimes of the request's model and shapes, by plan: `auto` (as requested) or `replicated`."""
    folder = Path(request.model)
    model, recipes, ignore = open_model(folder, request.batch_size, request.cache_length)

    def make(plan: Any) -> Runtime:
        choices = request.choices if plan == "auto" else {}
        return compile_shown(
            model,
            group,
            checkpoint=folder,
            recipes=recipes,
            ignore=ignore,
            plan=plan,
            capture_sizes=[request.batch_size],
            timeout_s=TIMEOUT_S,
            **choices,
        )

    return make


def decode_batches(
    runtime: Runtime, group: Group, request: GenerateRequest, lines: Lines | None
) -> list[dict[str, Any]]:
    """Greedy tokens of this rank's prompts: for each batch its prompts' numbers, tokens, times and logits' hashes.

    A short batch is filled with its own first prompt. With `lines`, tokens of prompt 0 are sent as they come.
    """
    found = []
    for numbers in request.batches(group.rank, group.world_size):
        filled = numbers + numbers[:1] * (request.batch_size - len(numbers))
        on_token = sender(lines if numbers[0] == 0 else None)
        clear_state(runtime, request.shape)
        is_fragile = request.fault is not None and request.fault[1] == group.rank and not isinstance(group, Newcomer)
        step = step_of(runtime, request.shape, request.run)
        if is_fragile and lines is not None:
            assert request.fault is not None
            step = _Struck(step, request.fault[0], int(request.fault[2]))
        prompts = [request.prompts[i] for i in filled]
        decoded = decode(step, prompts, request.num_tokens, on_token, num_positions=request.cache_length)
        found.append(_told(request, numbers, decoded))
    return found


def keep_company(runtime: Runtime, step: Step, counts: Sequence[int]) -> None:
    """Steps for no prompt, where gathers need all ranks: as many as the rank with the most (`counts` by rank) has."""
    if runtime.is_collective:
        for _ in range(max(counts) - counts[runtime.rank]):
            step.replay()


def _told(request: GenerateRequest, numbers: list[int], decoded: Decoded) -> dict[str, Any]:
    return {
        "prompts": numbers,
        "first_token_s": [sum(decoded.step_s[: len(request.prompts[i])]) for i in numbers],
        "tokens": decoded.tokens[: len(numbers)],
        "step_s": decoded.step_s,
        "hashes": decoded.hashes,
    }


def sender(lines: Lines | None) -> OnToken:
    """Sends what it is told of number 0, as it comes; without `lines` nothing."""

    def on_token(number: int, token: int) -> None:
        if lines is not None and number == 0:
            lines.send({"what": "token", "token": token})

    return on_token


def wait_for_order(lines: Lines) -> str:
    """What the command wants next; it is gone if it says nothing: `end`."""
    while lines.is_open:
        for message in lines.receive():
            return str(message["what"])
    return "end"


def _report_of(group: Group, request: GenerateRequest) -> Any:
    from graphshard.cli.generate_measure import Measure  # only for those who ask

    return Measure(group, request.shape)


class _Struck:
    """A step whose process gets a signal right before the replay number `at`: a test's, see `--fault`."""

    def __init__(self, step: Step, name: str, at: int) -> None:
        self._step, self._signal, self._left = step, signal.Signals[name], at

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        return self._step.inputs

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        return self._step.outputs

    def replay(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), self._signal)
        self._left -= 1
        self._step.replay()
