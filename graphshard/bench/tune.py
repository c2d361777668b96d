"""Blocks gathered and in slices, as captured steps of all ranks, in turns; each measurement is kept once it is made.

A measurement is one kind of block at one number of tokens of a rank, both modes together: they take turns, each step
begins at a barrier, and the slowest rank's time counts. Rank 0 replaces the file after each, as a whole, so whatever
ends a run leaves what was measured, and the next run goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from graphshard.bench.cut import CutModel
from graphshard.bench.stats import summarize
from graphshard.comm.group import Group
from graphshard.core.errors import SpecError
from graphshard.core.plan import Mode, Transport
from graphshard.core.slices import why_not_sliced
from graphshard.core.specs import ModelSpec
from graphshard.load.atomic_file import AtomicFile
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.gating import why_block_is_gathered
from graphshard.schedule.tune_file import load_tuned, parse_tuned, tune_content, tune_text
from graphshard.schedule.tuned import MODES, Tuned, TunedRow, kinds_of

TURN_STEPS = 3
"""Counted steps of a mode's turn; the first one before them finds the other mode's caches, and is not counted."""
OnMeasured = Callable[[int, int], None]
"""Called with how many measurements there are, and how many there will be."""


class Build(Protocol):
    """Makes a runtime of a model whose blocks all run in one mode (collective)."""

    def __call__(self, model: SegmentedModel, mode: Mode, tokens: Sequence[int]) -> Runtime:
        """With steps of `tokens` sequences of one token captured."""


@dataclass(frozen=True)
class TuneRequest:
    """What to measure; the same on all ranks."""

    path: Path
    tokens: tuple[int, ...]
    """Of a rank."""
    num_steps: int
    """Counted steps of each mode in a measurement."""
    num_layers: int
    """Layers with a block of the kind that are built, at most: so many that a cache does not hold them, at best."""
    transport: Transport
    device_kind: Literal["host", "cuda"]
    device: str
    """Its name."""
    settings: Mapping[str, Any]
    """Whatever else measurements of one file have in common."""
    notes: Mapping[str, Any]
    vocab_size: int = 1
    """Of the input `tokens`, if the model has it."""


def not_sliced(model: ModelSpec, world_size: int) -> dict[str, str]:
    """Kinds of blocks that only gathers can serve, and why."""
    found = {}
    for kind, blocks in kinds_of(model).items():
        weights = [model.weight(name) for name in blocks[0].weights]
        why = why_not_sliced(weights, world_size) or why_block_is_gathered(model, blocks[0], world_size)
        if why:
            found[kind] = f"{blocks[0].name}: {why}"
    return found


def plan_tuning(model: ModelSpec, world_size: int, request: TuneRequest, before: Tuned | None) -> Tuned:
    """What is to be measured, with what was: `before` is what the file held, or None.

    Raises:
        SpecError: nothing can be measured, or the file holds measurements of something else.
    """
    refused = not_sliced(model, world_size)
    kinds = tuple(kind for kind in kinds_of(model) if kind not in refused)
    if not kinds:
        why = "; ".join(refused.values()) or "it has none: make it with dual=True"
        raise SpecError(f"{model.name} has no block that may run in slices on {world_size} ranks: {why}")
    notes = {**request.notes, "not_sliced": refused}
    asked = Tuned(
        model.name, model.digest, world_size, request.transport, request.device_kind, request.device,
        {**request.settings, "num_layers": request.num_layers}, kinds, tuple(sorted(set(request.tokens))), (), notes,
    )  # fmt: skip
    if before is None:
        return asked
    _check_same(asked, before, request.path)
    tokens = tuple(sorted({*asked.tokens, *before.tokens}))
    return replace(asked, tokens=tokens, rows=before.rows, settings=before.settings)


def tune(group: Group, model: SegmentedModel, build: Build, request: TuneRequest, on_measured: OnMeasured) -> Tuned:
    """Measure what the file at `request.path` does not have yet (collective); the whole file.

    Raises:
        SpecError: as `plan_tuning`; or a plan has a block in no slices.
    """
    spec = model.spec()
    tuned = group.agree("tune file", lambda: plan_tuning(spec, group.world_size, request, _before(request.path)))
    tuned = _told_by_first(group, tuned)
    blocks = kinds_of(spec)
    total = tuned.num_measured + len(tuned.missing)
    on_measured(tuned.num_measured, total)
    for kind in tuned.kinds:
        tokens = [n for missing, n in tuned.missing if missing == kind]
        if not tokens:
            continue
        with ExitStack() as stack:
            cut = CutModel(model, blocks[kind][: request.num_layers])
            runtimes = {mode: stack.enter_context(build(cut, mode, tokens)) for mode in MODES}
            tuned = group.agree("settings", lambda: _with_settings(tuned, runtimes, request.path))  # noqa: B023
            for n in tokens:
                found = _measure(group, runtimes, n, request)
                rows = [_row(kind, n, mode, found[mode], len(cut.blocks)) for mode in MODES]
                tuned = replace(tuned, rows=(*tuned.rows, *rows))
                group.agree("write the tune file", lambda: _write(group, request.path, tuned))  # noqa: B023
                on_measured(tuned.num_measured, total)
            group.barrier("measured")
            runtimes.clear()
    return tuned


def _before(path: Path) -> Tuned | None:
    return load_tuned(path) if path.exists() else None


def _told_by_first(group: Group, tuned: Tuned) -> Tuned:
    """Rank 0's: it is the one that writes, and all must measure the same."""
    told = group.all_gather(tune_content(tuned), name="measurements so far")
    first: Any = told[0][0]
    return parse_tuned(first)


def _check_same(asked: Tuned, before: Tuned, path: Path) -> None:
    """SpecError if measurements cannot go on in the file."""
    for what in ("model_digest", "world_size", "transport", "device_kind", "device"):
        _compare(what, getattr(asked, what), getattr(before, what), path)
    for what, value in asked.settings.items():
        _compare(what, value, before.settings.get(what), path)


def _compare(what: str, asked: object, before: object, path: Path) -> None:
    if asked != before:
        raise SpecError(
            f"{path} holds measurements with {what} {before}, this run has {asked}: give another file, or remove it"
        )


def _with_settings(tuned: Tuned, runtimes: Mapping[Mode, Runtime], path: Path) -> Tuned:
    """With what the plans chose; SpecError if the file's differ, or if a block does not run as it should."""
    for mode, runtime in runtimes.items():
        for shape in runtime.plan.step_shapes:
            modes = runtime.plan.modes_of(shape)
            if set(modes) != {mode}:
                why = "; ".join(runtime.plan.block_reasons)
                raise SpecError(
                    f"blocks were to run by {mode}, and at {shape} they run by {', '.join(dict.fromkeys(modes))}: {why}"
                )
    plan = runtimes["gather"].plan
    chosen = {"units": plan.unit_policy, "prefetch_depth": plan.prefetch_depth, "executor": plan.executor}
    if tuned.rows:
        for what, value in chosen.items():
            _compare(what, value, tuned.settings.get(what), path)
    return replace(tuned, settings={**tuned.settings, **chosen})


def _measure(group: Group, runtimes: Mapping[Mode, Runtime], n: int, request: TuneRequest) -> dict[Mode, list[float]]:
    """Milliseconds of each mode's steps, of the slowest rank (collective)."""
    steps = {mode: runtime.graph(n) for mode, runtime in runtimes.items()}
    for step in steps.values():
        if "tokens" in step.inputs:
            generator = torch.Generator().manual_seed(1000 * n + group.rank)
            tokens = torch.randint(request.vocab_size, step.inputs["tokens"].shape, generator=generator)
            step.inputs["tokens"].copy_(tokens)
    samples: dict[Mode, list[float]] = {mode: [] for mode in MODES}
    for turn in range(-(-request.num_steps // TURN_STEPS)):
        for mode in MODES if turn % 2 == 0 else MODES[::-1]:
            for at in range(min(TURN_STEPS, request.num_steps - turn * TURN_STEPS) + 1):
                group.barrier("before a step")
                begin = time.perf_counter()
                steps[mode].replay()
                steps[mode].synchronize()
                if at:
                    samples[mode].append((time.perf_counter() - begin) * 1e3)
    told: list[Any] = [value for value, _ in group.all_gather(samples, name="samples")]
    return {mode: [max(each) for each in zip(*(one[mode] for one in told), strict=True)] for mode in MODES}


def _row(kind: str, tokens: int, mode: Mode, samples_ms: Sequence[float], num_blocks: int) -> TunedRow:
    summary = summarize([ms / num_blocks for ms in samples_ms])
    return TunedRow(kind, tokens, mode, summary.median, summary.p10, summary.p90, summary.n)


def _write(group: Group, path: Path, tuned: Tuned) -> None:
    if group.rank:
        return
    with AtomicFile(path) as file:
        file.write(0, tune_text(tuned).encode())
        file.commit()
