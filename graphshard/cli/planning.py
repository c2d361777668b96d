"""Options that describe a plan, shared by commands that need no device: a synthetic model, or a folder's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from graphshard.cli.common import refuse_given
from graphshard.cli.counts import Counts
from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.plan import HeadPolicy, Plan, Transport
from graphshard.core.program import Program
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.models.open import open_spec_model
from graphshard.schedule.auto import make_plan
from graphshard.schedule.dual import Dual
from graphshard.schedule.emit import emit_all
from graphshard.schedule.options import AUTO, MAX_COPY_STREAMS
from graphshard.schedule.synthetic import LLAMA_WEIGHTS, ONE_WEIGHT, synthetic_model
from graphshard.schedule.tune_file import load_tuned
from graphshard.schedule.units import unit_cap

ANY_DEVICE = DeviceSpec(kind="host", name="any", memory_bytes=2**62)
"""For plans that are only looked at: it refuses none for its size."""

LAYERS = click.IntRange(1, 10_000)
MOST_SHAPES = 4096
SHAPES = click.IntRange(1, MOST_SHAPES)
"""Step shapes that are counted from 1 on."""
RANKS = click.IntRange(1, 4096)
COPY_STREAMS = click.IntRange(1, MAX_COPY_STREAMS)

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


transport_option = click.option(
    "--transport",
    type=click.Choice(get_args(Transport)),
    default="pull",
    show_default=True,
    help="What gathers are carried out by.",
)


class IntOrAuto(click.ParamType[int | str]):
    """A number, or `auto`."""

    name = "number|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number; a usage error if it is neither."""
        if value == "auto" or isinstance(value, int):
            return value  # type: ignore[no-any-return]  # click hands over what the option was given or defaults to
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a number nor auto", param, ctx)
        return int(value)


class BatchSizes(click.ParamType[list[int]]):
    """Batch sizes: 1 to a number, or those of a list."""

    name = "number|count,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The sizes; a usage error if there is none, or too many."""
        if not isinstance(value, str):
            return list(value)
        if "," in value:
            return Counts().convert(value, param, ctx)
        most = click.IntRange(1, MOST_SHAPES)(value, param, ctx)
        return list(range(1, int(most) + 1))


class Units(click.ParamType[str]):
    """A unit policy, or `auto`."""

    name = "layer|weight|bytes:CAP|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The policy as it was written; an unknown one is a usage error that lists the known."""
        try:
            if value != AUTO:
                unit_cap(str(value))
        except SpecError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def units_option(default: str) -> Callable[[Decorated], Decorated]:
    """`--units`."""
    text = "What one gather restores: a layer, a weight, or a layer in pieces of up to CAP."
    return click.option("--units", type=Units(), default=default, show_default=True, help=text)


depth_option = click.option(
    "--prefetch-depth",
    type=IntOrAuto(),
    default=AUTO,
    show_default=True,
    help="Units that are gathered ahead of the one in use; 0: right before it is used.",
)
head_option = click.option(
    "--head",
    type=click.Choice(get_args(HeadPolicy)),
    default="inside",
    show_default=True,
    help="Where a step's first gathers are: in it, before it by the host, or at the end of the step before.",
)


@dataclass(frozen=True)
class PlanRequest:
    """What the options said."""

    layers: int
    weights: str
    model: Path | None
    world_size: int
    units: str
    prefetch_depth: int | str
    num_slots: int | str
    head: str
    transport: Transport
    num_copy_streams: int
    capture_sizes: list[int]
    dual: Dual
    tune: Path | None

    def choices(self) -> dict[str, Any]:
        """As `make_plan` takes them."""
        options: dict[str, Any] = {"dual": self.dual} if self.dual != "off" else {}
        return {
            **options,
            "units": self.units,
            "prefetch_depth": self.prefetch_depth,
            "num_slots": self.num_slots,
            "head": self.head,
            "transport": self.transport,
            "num_copy_streams": self.num_copy_streams,
            "step_shapes": [StepShape(size) for size in self.capture_sizes],
        }


@dataclass(frozen=True)
class Planned:
    """The four nouns that need no device."""

    model: ModelSpec
    plan: Plan
    layout: Layout
    programs: dict[StepShape, Program]


def plan_request(function: Decorated) -> Decorated:
    """Add the options of `PlanRequest`."""
    options = [
        click.option("--layers", type=LAYERS, default=2, show_default=True, help="Layers of a synthetic model."),
        click.option(
            "--weights",
            type=click.Choice(["one", "llama"]),
            default="one",
            show_default=True,
            help="Weights of a synthetic layer: one, or the nine of an 8B llama.",
        ),
        click.option(
            "--model",
            type=click.Path(path_type=Path),
            help="Folder of a llama or Kimi K3 checkpoint, instead of a synthetic model.",
        ),
        click.option("--world-size", type=RANKS, default=2, show_default=True, help="Ranks that share one copy."),
        units_option("layer"),
        depth_option,
        click.option(
            "--num-slots", type=IntOrAuto(), default="auto", show_default=True, help="Gathered units that have room."
        ),
        head_option,
        transport_option,
        click.option(
            "--num-copy-streams", type=COPY_STREAMS, default=1, show_default=True, help="Streams that gather."
        ),
        click.option(
            "--capture-sizes",
            type=BatchSizes(),
            default="1",
            show_default=True,
            help="Step shapes: batch sizes 1 to this, or a list of them.",
        ),
        click.option(
            "--dual",
            type=click.Choice(get_args(Dual)),
            default="off",
            show_default=True,
            help="How steps run the model's blocks: on gathered weights, or every rank on its slice of them.",
        ),
        click.option("--tune", type=click.Path(path_type=Path), help="File of `tune`, for --dual auto."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def model_of(request: PlanRequest) -> ModelSpec:
    """The model that the request names, as data."""
    if request.model is not None:
        refuse_given(("layers", "weights"), "a model's folder says what its layers are: leave it out, or --model")
        return open_spec_model(request.model, dual=request.dual != "off").spec()
    if request.dual != "off":
        raise click.UsageError(f"--dual {request.dual}: a synthetic model has no blocks; give --model")
    return synthetic_model(request.layers, LLAMA_WEIGHTS if request.weights == "llama" else ONE_WEIGHT)


def planned(request: PlanRequest) -> Planned:
    """Model, plan, layout and programs. Not verified: `graphshard verify` does that."""
    model, tuned = model_of(request), None if request.tune is None else load_tuned(request.tune)
    device = ANY_DEVICE if tuned is None else replace(ANY_DEVICE, kind=tuned.device_kind, name=tuned.device)
    plan = make_plan(model, request.world_size, device, tune=tuned, **request.choices())
    return Planned(model, plan, build_layout(model, plan), emit_all(model, plan))
