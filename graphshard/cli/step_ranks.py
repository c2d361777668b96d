"""What a rank of one launch of `bench step` runs: builds every contender, then has them measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphshard.bench.decode import Step, clear_state
from graphshard.bench.gloo import gloo
from graphshard.bench.step import Contender, Workload, measure_steps, num_steps_of
from graphshard.cli.loading import compile_shown
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape, WeightSpec
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.store import tensor_bytes
from graphshard.models.llama import Llama, load_llama
from graphshard.models.module import SegmentedModule, new_buffers
from graphshard.runtime.eager_step import EagerStep
from graphshard.runtime.memory import torch_dtype
from graphshard.runtime.runtime import Runtime

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class StepRequest:
    """What to measure; the same on all ranks."""

    model: str
    batch_sizes: list[int]
    num_steps: int
    cache_length: int
    peers: list[str]
    plans: list[list[Any]]
    """[units, prefetch_depth, executor] of plans to run beside the chosen one."""
    transport: str
    title: str
    """Of the progress bar."""


def step(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """`bench step` on one rank, one launch: see `measure_steps`."""
    request = StepRequest(**values)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        field = _Field(group, request, stack)
        contenders = field.contenders()
        workload = Workload(request.batch_sizes, request.num_steps, request.cache_length, field.model.config.vocab_size)
        total = num_steps_of(len(contenders), workload)
        on_steps = stack.enter_context(_progress(group.rank == 0, request.title, total))
        measured = measure_steps(group, field.replicated, contenders, workload, on_steps)
        group.barrier("measured")
        return {**measured, "reasons": field.reasons}


class _Field:
    """Builds the contenders; what they hold is given back when `stack` is left."""

    def __init__(self, group: Group, request: StepRequest, stack: ExitStack) -> None:
        self._group, self._request, self._stack = group, request, stack
        self._folder = Path(request.model)
        self.model: Llama = load_llama(self._folder, max(request.batch_sizes), request.cache_length)
        self.replicated = self._graph(self._compile("replicated"), run="replicated", unit=None, prefetch_depth=None)
        self.reasons: list[str] = []

    def contenders(self) -> list[Contender]:
        """In the order of the rows."""
        peers = self._request.peers
        found = [self.replicated] if "replicated" in peers else []
        chosen = self._compile("auto")
        self.reasons = list(chosen.plan.reasons)
        found += [self._graph(chosen, chosen=True), self._eager(chosen)]
        taken = {_choices(chosen)}
        for units, depth, executor in self._request.plans:
            if (units, depth, executor) not in taken:
                taken.add((units, depth, executor))
                found.append(self._graph(self._compile("auto", units=units, prefetch_depth=depth, executor=executor)))
        if "fsdp2" in peers:
            found.append(self._fsdp2())
        if "transformers" in peers:
            found.append(self._transformers())
        return found

    def _compile(self, plan: Any, **choices: Any) -> Runtime:
        made = compile_shown(
            self.model,
            self._group,
            checkpoint=self._folder,
            ignore=self.model.redundant_tensors,
            plan=plan,
            capture_sizes=self._request.batch_sizes,
            timeout_s=TIMEOUT_S,
            transport=self._request.transport,
            **choices,
        )
        return self._stack.enter_context(made)

    def _graph(self, runtime: Runtime, run: str = "graph", **facts: Any) -> Contender:
        steps = {size: runtime.graph(size) for size in self._request.batch_sizes}
        unit, depth, executor = _choices(runtime)
        known = {"unit": unit, "prefetch_depth": depth, "executor": executor, **facts}
        return _of_runtime(runtime, run, steps, **known)

    def _eager(self, runtime: Runtime) -> Contender:
        steps = {size: EagerStep(runtime, StepShape(size)) for size in self._request.batch_sizes}
        unit, depth, _ = _choices(runtime)
        return _of_runtime(runtime, "eager", steps, unit=unit, prefetch_depth=depth)

    def _fsdp2(self) -> Contender:
        from graphshard.bench.fsdp2 import ModuleStep, shard_layers  # only for those who ask: it takes a second

        self._stack.enter_context(gloo(self._group, TIMEOUT_S))
        checkpoint = Checkpoint(self._folder)

        def read(spec: WeightSpec) -> Tensor:
            raw = tensor_bytes(checkpoint, spec.name)
            return torch.frombuffer(raw, dtype=torch_dtype(spec.dtype)).view(spec.shape).clone()  # torch aligns

        with closing(checkpoint):
            module = SegmentedModule(self.model, read)
        shard_layers(module, module.layers, module.outside.parameters())
        shapes = {size: StepShape(size) for size in self._request.batch_sizes}
        buffers = new_buffers(self.model, list(shapes.values()))
        steps = {
            size: ModuleStep(module, module.state(shape, buffers[shape]), buffers[shape], buffers[shape])
            for size, shape in shapes.items()
        }

        def reset(batch_size: int) -> None:
            for tensor in buffers[shapes[batch_size]].values():
                tensor.zero_()

        return Contender("fsdp2", steps, reset, must_be_identical=False, unit="layer", prefetch_depth=0)

    def _transformers(self) -> Contender:
        from graphshard.bench.transformers_step import TransformersModel

        model = TransformersModel(self._folder, self._request.cache_length)
        steps = {size: model.step(size) for size in self._request.batch_sizes}
        return Contender("transformers", steps, lambda batch_size: None, must_be_identical=False)


def _choices(runtime: Runtime) -> tuple[str, int, str]:
    plan = runtime.plan
    return plan.unit_policy, plan.prefetch_depth, plan.executor


def _of_runtime(runtime: Runtime, run: str, steps: Mapping[int, Step], **facts: Any) -> Contender:
    def reset(batch_size: int) -> None:
        clear_state(runtime, StepShape(batch_size))

    return Contender(run, steps, reset, must_be_identical=True, **facts)


@contextmanager
def _progress(show: bool, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, a step at a time."""
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
