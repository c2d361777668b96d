"""Options that add a draft to a described plan, and the sequences of both: for `show sequence` and `verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import click

from graphshard.cli.planning import ANY_DEVICE, LAYERS, Planned, PlanRequest, planned
from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.plan import Plan
from graphshard.core.sequence import COMMIT_FOLD, StepSequence
from graphshard.core.specs import ModelSpec, SegmentSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.options import AUTO
from graphshard.schedule.sequence import DRAFT, TARGET, PrefetchStream, emit_sequences
from graphshard.verify import SequenceReport, verify_sequences

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
REPLAYS = click.IntRange(1, 64)


@dataclass(frozen=True)
class DraftRequest:
    """What the options said of the draft; `draft_layers` None: that there is none."""

    draft_layers: int | None
    num_draft_replays: int
    prefetch_stream: PrefetchStream


DRAFT_OPTIONS = ("draft_layers", "num_draft_replays", "prefetch_stream")
"""The fields of `DraftRequest`, as click hands them over."""


def draft_request(function: Decorated) -> Decorated:
    """Add the options of `DraftRequest`."""
    options = [
        click.option(
            "--draft-layers",
            type=LAYERS,
            help="A speculative step: the draft is the model's first layers, its first gathers are outside. "
            "Without: no draft.",
        ),
        click.option(
            "--num-draft-replays", type=REPLAYS, default=1, show_default=True, help="Runs of the draft in a step."
        ),
        click.option(
            "--prefetch-stream",
            type=click.Choice(get_args(PrefetchStream)),
            default="prefetch",
            show_default=True,
            help="Where the draft's first gathers are: on a stream of their own, or on the target's copy stream.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def split_draft(options: dict[str, Any]) -> tuple[PlanRequest, DraftRequest]:
    """The two requests in a command's options."""
    draft = DraftRequest(**{name: options.pop(name) for name in DRAFT_OPTIONS})
    request = PlanRequest(**options)
    if draft.draft_layers is not None and request.dual != "off":
        raise click.UsageError("--dual goes without --draft-layers: a cut model has no blocks")
    return request, draft


def first_layers(model: ModelSpec, num_layers: int) -> ModelSpec:
    """`model` with its first `num_layers` layers alone, and without folds.

    Raises:
        SpecError: it has fewer.
    """
    layers = {segment.layer for segment in model.segments if segment.layer is not None}
    if num_layers > len(layers):
        raise SpecError(f"a draft of {num_layers} layers: {model.name} has {len(layers)}; give fewer")
    kept = set(sorted(layers)[:num_layers])
    segments = tuple(segment for segment in model.segments if segment.layer is None or segment.layer in kept)
    names = {name for segment in segments for name in segment.reads}
    return replace(
        model,
        name=f"{model.name}-first-{num_layers}",
        weights=tuple(weight for weight in model.weights if weight.name in names),
        segments=segments,
        kept=tuple(kept_weight for kept_weight in model.kept if kept_weight.weight in names),
        folds=(),
        borrowed=tuple(name for name in model.borrowed if name in names),
    )


@dataclass(frozen=True)
class PlannedStep:
    """A target, its draft, and what the host issues for both."""

    target: Planned
    draft: ModelSpec | None
    draft_plan: Plan | None
    sequences: dict[str, StepSequence]

    def report(self) -> SequenceReport:
        """What the verifier says of them."""
        layouts, models = {TARGET: self.target.layout}, {TARGET: self.target.model}
        if self.draft is not None and self.draft_plan is not None:
            layouts[DRAFT], models[DRAFT] = build_layout(self.draft, self.draft_plan), self.draft
        num_copies = self.target.plan.num_copies
        return verify_sequences(self.sequences, num_copies=num_copies, layouts=layouts, models=models)


def planned_step(request: PlanRequest, asked: DraftRequest) -> PlannedStep:
    """The target of `request`, the draft of `asked`, planned as the target but for its head, and their sequences."""
    target = planned(request)
    if not target.model.folds:  # what a model without one commits is nothing, but the host issues it all the same
        target = replace(target, model=replace(target.model, folds=(SegmentSpec(COMMIT_FOLD, None, ()),)))
    draft, plan, program = None, None, None
    if asked.draft_layers is not None:
        draft = first_layers(target.model, asked.draft_layers)
        choices = {**request.choices(), "head": "outside", "num_slots": AUTO}
        plan = make_plan(draft, request.world_size, ANY_DEVICE, **choices)
        program = emit(draft, plan)
    sequences = emit_sequences(
        target.programs[min(target.programs)],
        program,
        num_draft_replays=asked.num_draft_replays,
        fold=target.model.folds[0].name,
        prefetch_stream=asked.prefetch_stream,
    )
    return PlannedStep(target, draft, plan, sequences)
