"""What `plan="auto"` chooses where a machine's figures are known: options for `make_plan`, with their reasons.

On a GPU the residency solver decides: all that can be hidden, or what a memory limit asks for. On a host the candidates
are few, and each is walked in time, since there a gather slows compute and may fill its cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.sizes import format_bytes
from graphshard.core.specs import DeviceSpec, ModelSpec, StepShape
from graphshard.cost.facts import ModelFacts
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.host_step import predict_step
from graphshard.cost.problem import ResidencyRequest
from graphshard.cost.recommend import HIDDEN_SHARE, recommend
from graphshard.cost.residency import Residency, solve
from graphshard.schedule.auto import make_plan

HOST_UNITS = ("weight", "layer")
NUM_REASONS = 4
"""Rejected candidates that are named."""


@dataclass(frozen=True)
class Chosen:
    """Options for `make_plan`, and why: put `reasons` before the plan's own."""

    options: dict[str, Any]
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ChooseRequest:
    """What is known when `auto` has to choose."""

    model: ModelSpec
    facts: ModelFacts
    hardware: HardwareSpec
    device: DeviceSpec
    world_size: int
    step_shapes: tuple[StepShape, ...]
    memory_limit_bytes: int | None = None
    """Of one rank's chunks, slots and resident weights."""
    transport: str = "pull"
    max_share: float = HIDDEN_SHARE
    """Of the step that may be exposed without a memory limit."""


def choose(request: ChooseRequest) -> Chosen:
    """Options for the fastest plan that fits; without a limit on a GPU, for the one that frees most and is hidden.

    Raises:
        SpecError: no plan fits the limit; names the smallest that does.
    """
    if request.world_size == 1:
        return Chosen({"replicated": True}, ("every weight is resident: one rank has no other's bytes to gather",))
    return _choose_on_host(request) if request.hardware.kind == "host" else _choose_on_gpu(request)


def _choose_on_gpu(request: ChooseRequest) -> Chosen:
    asked = ResidencyRequest(
        request.model,
        request.facts,
        request.hardware,
        request.world_size,
        request.step_shapes,
        transport=request.transport,
    )
    limit = request.memory_limit_bytes
    if limit is None:
        advice = recommend(asked, request.max_share)
        if advice.residency is None:
            return Chosen({"replicated": True}, advice.reasons)
        return Chosen(advice.residency.options(), (*advice.reasons, *_why(advice.residency)))
    whole = build_layout(request.model, make_plan(request.model, request.world_size, request.device, replicated=True))
    granularity = request.device.granularity_bytes
    # chunks and slots are each rounded up too
    target = whole.reserved_bytes(granularity) - limit + 2 * granularity
    if whole.reserved_bytes(granularity) <= limit:
        return Chosen({"replicated": True}, (f"every weight is resident: they fit {format_bytes(limit)}",))
    residency = solve(asked, target)
    return Chosen(residency.options(), _why(residency))


def _why(residency: Residency) -> tuple[str, ...]:
    return tuple(residency.lines()[: 2 + NUM_REASONS])


def _choose_on_host(request: ChooseRequest) -> Chosen:
    candidates: list[dict[str, Any]] = [{"replicated": True}] if request.memory_limit_bytes is not None else []
    for units in HOST_UNITS:
        candidates.append({"units": units, "prefetch_depth": 0, "executor": "cooperative"})
        if request.device.spare_cores > 0:
            candidates.append({"units": units, "prefetch_depth": 1, "executor": "threaded"})
    judged = sorted(((*_walked(request, one), one) for one in candidates), key=lambda row: row[0])
    limit = request.memory_limit_bytes
    fits = [row for row in judged if limit is None or row[1] <= limit]
    if not fits:
        smallest = min(row[1] for row in judged)
        raise SpecError(f"no plan fits {format_bytes(limit or 0)}: the smallest needs {format_bytes(smallest)}")
    us, num_bytes, best = fits[0]
    reasons = [f"{_name(best)}: {us / 1e3:.2f} ms a step predicted, in {format_bytes(num_bytes)}"]
    for other_us, other_bytes, other in judged:
        if other is not best:
            why = "does not fit" if limit is not None and other_bytes > limit else f"{other_us / us:.2f} times as long"
            reasons.append(f"not {_name(other)}: {other_us / 1e3:.2f} ms, {format_bytes(other_bytes)}; {why}")
    return Chosen(best, tuple(reasons[: 1 + NUM_REASONS]))


def _walked(request: ChooseRequest, options: dict[str, Any]) -> tuple[float, int]:
    """(mean predicted us of the step shapes, bytes that a rank reserves)."""
    plan = make_plan(request.model, request.world_size, request.device, step_shapes=request.step_shapes, **options)
    layout = build_layout(request.model, plan)
    us = [
        predict_step(request.model, request.facts, plan, shape, request.hardware).duration_us
        for shape in request.step_shapes
    ]
    return sum(us) / len(us), layout.reserved_bytes(request.device.granularity_bytes)


def _name(options: dict[str, Any]) -> str:
    if options.get("replicated"):
        return "replicated"
    return f"units {options['units']}, prefetch_depth {options['prefetch_depth']}, {options['executor']}"
