"""What a user may ask of a plan, checked in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from graphshard.core.errors import SpecError
from graphshard.core.plan import Executor, HeadPolicy, Transport
from graphshard.core.specs import StepShape
from graphshard.schedule.units import DEFAULT_MIN_SHARD_BYTES, unit_cap

AUTO: Literal["auto"] = "auto"
AutoExecutor = Literal["auto", "cooperative", "threaded"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The request; `auto` leaves a choice to the rules of `make_plan`."""

    units: str = AUTO
    """`layer`, `weight`, `bytes:CAP`, or `auto`."""
    prefetch_depth: int | Literal["auto"] = AUTO
    """Units that a gather runs ahead of its wait."""
    num_slots: int | Literal["auto"] = AUTO
    """`auto`: the fewest. More let gathers run further ahead."""
    head: HeadPolicy = "inside"
    transport: Transport = "pull"
    executor: AutoExecutor = AUTO
    """Of captured graphs on the host."""
    step_shapes: Sequence[StepShape | int] = (1,)
    """What will be captured; an int b is `StepShape(b, 1)`."""
    include: Sequence[str] = ()
    """Patterns of weights to shard, wherever they are read and however small; all others stay resident."""
    exclude: Sequence[str] = ()
    """Patterns of weights that stay resident."""
    min_shard_bytes: int = DEFAULT_MIN_SHARD_BYTES
    """Smaller weights stay resident."""
    outside_layers: bool = False
    """Shard weights outside the layers too (embedding, head)."""
    alignment_bytes: int = 256
    num_copy_streams: int = 1
    memory_limit_bytes: int | None = None
    """For one rank's chunks, slots and resident weights, each rounded up to the device's granularity."""
    replicated: bool = False
    """Keep every weight resident."""

    def __post_init__(self) -> None:
        if self.units != AUTO:
            unit_cap(self.units)  # raises SpecError with the known policies
        _check_known("head policy", self.head, get_args(HeadPolicy))
        _check_known("transport", self.transport, get_args(Transport))
        _check_known("executor", self.executor, (AUTO, *get_args(Executor)))
        _check_at_least("prefetch_depth", self.prefetch_depth, 0)
        _check_at_least("num_slots", self.num_slots, 1)
        _check_at_least("num_copy_streams", self.num_copy_streams, 1)
        _check_at_least("min_shard_bytes", self.min_shard_bytes, 0)


def capture_shapes(step_shapes: Sequence[StepShape | int]) -> tuple[StepShape, ...]:
    """Step shapes, sorted and each once; an int b is `StepShape(b, 1)`."""
    if not step_shapes:
        raise SpecError("no step shape to capture: name at least one batch size, as in capture_sizes=[1]")
    return tuple(sorted({shape if isinstance(shape, StepShape) else StepShape(shape) for shape in step_shapes}))


def _check_known(what: str, name: object, known: Sequence[str]) -> None:
    if name not in known:
        raise SpecError(f"unknown {what} {name!r}; known are {', '.join(known)}")


def _check_at_least(what: str, value: int | str, least: int) -> None:
    if value != AUTO and (not isinstance(value, int) or value < least):
        raise SpecError(f"{what} is {value!r}; it is a whole number that starts at {least}")
