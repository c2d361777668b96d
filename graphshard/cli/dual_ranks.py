"""What a rank of `bench dual` runs: builds every runtime, then has them measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from graphshard.bench.dual import DualRequest, measure_dual
from graphshard.bench.dual_figures import hardware_of, measure_figures
from graphshard.bench.stats import quantile
from graphshard.bench.tune import TuneRequest, tune
from graphshard.cli.loading import compile_shown
from graphshard.comm.group import Group
from graphshard.core.plan import Mode
from graphshard.cost.dual import Block
from graphshard.cost.dual_choice import CostChooser, as_cost_block
from graphshard.cost.hardware_file import load_hardware
from graphshard.models.block_stack import BlockSizes, BlockStack
from graphshard.report.machine import machine_facts
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.tuned import Tuned

TIMEOUT_S = 60.0
EMPTY_LAYERS = 16
"""Blocks that compute almost nothing, so that their steps take as long as their exchanges."""
EMPTY_HIDDEN_PER_RANK, EMPTY_FEATURES_PER_RANK = 32, 16
NUM_STEPS = 9
TUNE_STEPS, FEW_TOKENS = 30, 64
"""Counted steps of a mode on which the choice rests, where a rank has so few tokens; half of them where it has more."""
CHOICES: dict[str, dict[str, Any]] = {
    "replicated": {"plan": "replicated"},
    "gather": {"dual": "gather", "min_shard_bytes": 0},
    "tensor_parallel": {"dual": "tensor_parallel", "min_shard_bytes": 0},
    "chosen": {"dual": "auto", "min_shard_bytes": 0},
}


def dual(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """`bench dual` on one rank: `tokens` as `measure_dual` has them, `figures` that were measured, `reasons`."""
    values = dict(values)
    hardware_path, choose_by, tune_path = (values.pop(name) for name in ("hardware", "choose_by", "tune_path"))
    request = DualRequest(**values)
    torch.set_num_threads(1)
    field, figures = _Field(group, request), None
    if hardware_path is None:
        l3_bytes = int(str(machine_facts()["l3_bytes"] or 0))
        figures = measure_figures(group, field.block, request.tokens, request.transport, field.exchange_us, l3_bytes)
        hardware = hardware_of(figures, field.block, group.world_size, request.transport)
    else:
        hardware = load_hardware(hardware_path)
    if choose_by == "model":
        told: dict[str, Any] = {"chooser": CostChooser(hardware, group.world_size, request.transport, is_ahead=False)}
    else:
        told = {"tune": field.tuned(Path(tune_path))}
    with ExitStack() as stack:
        runtimes = {
            mode: stack.enter_context(field.compile(request.tokens, **choices, **(told if mode == "chosen" else {})))
            for mode, choices in CHOICES.items()
        }
        on_tokens = stack.enter_context(_progress(group.rank == 0, len(request.tokens)))
        found = measure_dual(group, runtimes, request, on_tokens)
        group.barrier("measured")
        reasons = list(runtimes["chosen"].plan.block_reasons)
        runtimes.clear()
    return {"tokens": found, "figures": figures, "reasons": reasons}


def stack_of(request: DualRequest) -> BlockStack:
    """The model that is measured."""
    return BlockStack(BlockSizes(request.hidden_size, request.intermediate_size, request.num_layers, request.dtype))


def block_of(model: BlockStack) -> Block:
    """One of its blocks as the cost model sees it."""
    spec = model.spec()
    return replace(as_cost_block(spec, spec.blocks[0]), layers=len(spec.blocks))


class _Field:
    """Builds runtimes of one model."""

    def __init__(self, group: Group, request: DualRequest) -> None:
        self._group, self._request = group, request
        self.model = stack_of(request)
        self.weights = self.model.random_weights()
        self.block = block_of(self.model)

    def compile(self, tokens: Sequence[int], **choices: Any) -> Runtime:
        """A runtime with steps of `tokens` captured."""
        return self._compile(self.model, self.weights, tokens, choices)

    def tuned(self, path: Path) -> Tuned:
        """What `graphshard tune` would find of this model: both modes, in turns of their own, into the file `path`."""

        def build(model: SegmentedModel, mode: Mode, tokens: Sequence[int]) -> Runtime:
            names = {weight.name for weight in model.spec().weights}
            weights = {name: weight for name, weight in self.weights.items() if name in names}
            return self._compile(model, weights, tokens, CHOICES[mode])

        few = [tokens for tokens in self._request.tokens if tokens <= FEW_TOKENS]
        many = [tokens for tokens in self._request.tokens if tokens > FEW_TOKENS]
        for tokens, num_steps in ((few, TUNE_STEPS), (many, TUNE_STEPS // 2)):  # short steps vary more
            if tokens:
                request = TuneRequest(
                    path, tuple(tokens), num_steps, self._request.num_layers, self._request.transport,
                    "host", "host", {}, {},
                )  # fmt: skip
                tuned = tune(self._group, self.model, build, request, lambda done, total: None)
        return tuned

    def exchange_us(self) -> float:
        """Of a block: its tokens gathered and its results brought back, over what a step without takes."""
        features = EMPTY_FEATURES_PER_RANK * self._group.world_size
        hidden = EMPTY_HIDDEN_PER_RANK * self._group.world_size
        model = BlockStack(BlockSizes(hidden, features, EMPTY_LAYERS, self._request.dtype))
        weights = model.random_weights()
        with (
            self._compile(model, weights, [1], CHOICES["replicated"]) as whole,
            self._compile(model, weights, [1], CHOICES["tensor_parallel"]) as sliced,
        ):
            samples: list[list[float]] = [[], []]
            for _ in range(NUM_STEPS):
                for runtime, found in zip((whole, sliced), samples, strict=True):
                    found.append(_step_us(self._group, runtime))
            self._group.barrier("exchanges measured")
        without, with_exchange = (quantile(sorted(found), 0.5) for found in samples)
        return max(0.1, (with_exchange - without) / EMPTY_LAYERS)

    def _compile(
        self, model: SegmentedModel, weights: dict[str, torch.Tensor], tokens: Sequence[int], choices: dict[str, Any]
    ) -> Runtime:
        return compile_shown(
            model,
            self._group,
            checkpoint=weights,
            capture_sizes=tokens,
            timeout_s=TIMEOUT_S,
            transport=self._request.transport,
            **choices,
        )


def _step_us(group: Group, runtime: Runtime) -> float:
    step = runtime.graph(1)
    group.barrier("before an exchange")
    begin = time.perf_counter()
    step.replay()
    step.synchronize()
    return (time.perf_counter() - begin) * 1e6


@contextmanager
def _progress(show: bool, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, one number of tokens at a time."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("numbers of tokens", total=total)
        yield lambda: bar.advance(task, 1)
