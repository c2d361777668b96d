"""A target and a draft whose bytes name themselves, and what shows which gathers, waits and launches a step issued."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes
from torch.utils._python_dispatch import TorchDispatchMode

import graphshard
from graphshard._core import Calls, OpList
from graphshard.comm.group import Group
from graphshard.core import sequence as ops
from graphshard.core.sequence import StepSequence
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.speculative import Speculation

TARGET_LAYERS = [[3000, 5], [4000], [5000], [700]]
DRAFT_LAYERS = [[900], [800, 9], [650], [1000]]
LIMIT_S = 20.0
"""Far more than a step takes, however loaded the machine."""
VIEWS = ("aten.detach.", "aten.slice.", "aten.view.")
"""Operators that take no memory."""


class FoldModel(ByteModel):
    """The byte model with a fold: it shows a weight of its own, which stays resident, and what `accepted` holds."""

    def __init__(self, layers: Sequence[Sequence[int]], **more: Any) -> None:
        super().__init__(layers, **more)
        weight = WeightSpec(f"{self.name}.f_b", (333,), "uint8")
        self.weights.append(weight)
        spec = SegmentSpec("commit_fold", None, (weight.name,))
        self.folds = (Segment(spec, self._fold),)

    def spec(self) -> ModelSpec:
        return replace(super().spec(), folds=tuple(segment.spec for segment in self.folds))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        fold = self.folds[0].spec
        return (
            *super().buffers(shape),
            BufferSpec("accepted", (shape.batch_size,), "int64", "input"),
            BufferSpec("committed", (shape.batch_size,), "int64", "activation"),
            BufferSpec(f"{fold.path}:{fold.reads[0]}", (333,), "uint8", "output"),
        )

    def _fold(self, state: StepState) -> None:
        fold = self.folds[0].spec
        state.buffer("committed").copy_(state.buffer("accepted"))
        state.buffer(f"{fold.path}:{fold.reads[0]}").copy_(state.weight(fold.reads[0]))


class Pair:
    """Both runtimes of one rank, and their speculation."""

    def __init__(
        self,
        group: Group,
        transport: str,
        *,
        run: str = "graph",
        sizes: Sequence[int | tuple[int, int]] = (1,),
        draft_sizes: Sequence[int | tuple[int, int]] | None = None,
        head: str = "outside",
        timeout_s: float = LIMIT_S,
        target_hooks: Hooks | None = None,
        target_choices: dict[str, Any] | None = None,
        draft_choices: dict[str, Any] | None = None,
        **speculate: Any,
    ) -> None:
        self.group, self.run = group, run
        target, draft = FoldModel(TARGET_LAYERS, name="target"), ByteModel(DRAFT_LAYERS, name="draft")
        self.models = {"target": target, "draft": draft}
        self.versions = {"target": 0, "draft": 0}
        common = {"units": "layer", "prefetch_depth": 1, "transport": transport, "timeout_s": timeout_s}
        captured = {"capture_sizes": list(sizes)}
        hooks = {"hooks": target_hooks or Hooks(poison=True)}
        choices = common | captured | hooks | (target_choices or {})
        self.target = compile_bytes(group, self.models["target"], **choices)
        captured = {"capture_sizes": list(draft_sizes or sizes), "head": head}
        self.draft = compile_bytes(group, self.models["draft"], **(common | captured | (draft_choices or {})))
        self.spec: Speculation = graphshard.speculate(self.target, self.draft, run=run, **speculate)

    def step(
        self,
        size: int = 1,
        tokens: int = 1,
        *,
        skip: bool = False,
        verifying: AbstractContextManager[None] | None = None,
    ) -> list[str]:
        """One step on cleared outputs: what segments saw that was not theirs. `verifying` is there during `verify`."""
        step = self.spec.graph(size, tokens)
        pieces = [] if skip else [("draft", step.draft(replay)) for replay in range(step.num_draft_replays)]
        wrong: list[str] = []
        for tensor in step.target.outputs.values():
            tensor.zero_()
        for replay, (_, piece) in enumerate(pieces):
            for tensor in piece.outputs.values():
                tensor.zero_()
            step.propose(replay)
            wrong += self.models["draft"].wrong(piece.outputs, self.versions["draft"])
        with verifying or nullcontext():
            step.verify()
        step.commit()
        return wrong + self.models["target"].wrong(step.target.outputs, self.versions["target"])

    def runtimes(self) -> dict[str, Runtime]:
        return {"draft": self.draft, "target": self.target}

    def close(self) -> None:
        self.spec.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Recorder:
    """What the host issues for a pair, in a sequence's words: launches, waits, replays, folds."""

    def __init__(self, pair: Pair) -> None:
        self.seen: list[str] = []
        for name, runtime in pair.runtimes().items():
            self._watch(name, runtime)
        fold = pair.target.fold
        pair.target.fold = lambda *a, **k: (self.seen.append("fold target"), fold(*a, **k))[1]  # type: ignore

    def _watch(self, name: str, runtime: Runtime) -> None:
        table, alignment, issue = runtime._slots, runtime._alignment, runtime.issue
        post = alignment.issue

        def posted(kind: str, units: Sequence[int], *more: Any) -> None:
            if kind == "outside":
                self.seen.extend(f"prefetch_launch {name} {unit}" for unit in units)
            post(kind, units, *more)

        def issued(what: str, launch: Callable[[], None]) -> None:
            self.seen.append(f"replay {name}")
            issue(what, launch)

        alignment.issue = posted  # type: ignore[method-assign]
        runtime.issue = issued  # type: ignore[method-assign]
        table._compute = _Waits(table._compute, lambda: self.seen.append(f"prefetch_wait {name}"))  # type: ignore

    def take(self) -> list[str]:
        seen, self.seen[:] = list(self.seen), []
        return seen


class _Waits:
    """A stream that tells of its waits."""

    def __init__(self, stream: Any, on_wait: Callable[[], None]) -> None:
        self._stream, self._on_wait = stream, on_wait

    def wait(self, event: Any) -> None:
        self._on_wait()
        self._stream.wait(event)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class OwnOps(TorchDispatchMode):
    """While a context, the operators that this thread calls, but for views; segments run on other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if not name.startswith(VIEWS):
            self.names.add(name)
        return func(*args, **(kwargs or {}))


def words(sequence: StepSequence) -> list[str]:
    """The ops of `sequence` as a `Recorder` tells them: a wait is one for all units in flight."""
    told: list[str] = []
    for op in sequence.ops:
        if isinstance(op, ops.PrefetchLaunch):
            told.append(f"prefetch_launch {op.graph} {op.unit}")
        elif isinstance(op, ops.PrefetchWait):
            line = f"prefetch_wait {op.graph}"
            told += [] if told and told[-1] == line else [line]
        elif isinstance(op, ops.Replay):
            told.append(f"replay {op.graph}")
        elif isinstance(op, ops.Fold):
            told.append(f"fold {op.graph}")
    return told


def traced(pair: Pair) -> list[list[Any]]:
    """From now on the gathers that this rank issues, in order: [model, kind, units]."""
    trace: list[list[Any]] = []
    for name, runtime in pair.runtimes().items():
        post = runtime._alignment.issue

        def posted(kind: str, units: Sequence[int], *more: Any, name: str = name, post: Any = post) -> None:
            if units:
                trace.append([name, kind, list(units)])
            post(kind, units, *more)

        runtime._alignment.issue = posted  # type: ignore[method-assign]
    return trace


@contextmanager
def stalled(runtime: Runtime, address: int) -> Iterator[None]:
    """Gathers that the host issues in the block stand still until the word at `address` is 1."""
    table, before = runtime._slots, runtime._slots._before_gathers
    stall = OpList(runtime.driver, (runtime._streams["prefetch"],), 0, [("wait_value", 0, address, 1)])

    def before_and_stall(units: Sequence[int]) -> None:
        before(units)  # which may wait for the stream to end what it has
        stall.issue(Calls([]))

    table._before_gathers = before_and_stall
    try:
        yield
    finally:
        table._before_gathers = before
