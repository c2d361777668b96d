"""What a user may ask of a plan, checked in one place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from graphshard.core.errors import SpecError
from graphshard.core.patterns import patterns_of
from graphshard.core.plan import Executor, HeadPolicy, Transport, Unit
from graphshard.core.sizes import parse_bytes
from graphshard.core.specs import StepShape
from graphshard.schedule.dual import Dual, ModeChooser
from graphshard.schedule.tuned import Tuned
from graphshard.schedule.units import unit_cap

AUTO: Literal["auto"] = "auto"
AutoExecutor = Literal["auto", "cooperative", "threaded"]
MAX_COPY_STREAMS = 64
"""More would be threads or queues that no machine runs side by side."""
MIN_ALIGNMENT_BYTES = 16


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
    """`pull` copies peers' chunks, `nccl` gathers by NCCL's collective over the copy engines."""
    executor: AutoExecutor = AUTO
    """Of captured graphs on the host."""
    step_shapes: Sequence[StepShape | int] = (1,)
    """What will be captured; an int b is `StepShape(b, 1)`."""
    include: str | Sequence[str] = ()
    """Patterns of weights to shard, wherever they are read and however small; all others stay resident."""
    exclude: str | Sequence[str] = ()
    """Patterns of weights that stay resident."""
    min_shard_bytes: int | Literal["auto"] = AUTO
    """Smaller weights stay resident. `auto`: 64 KiB; for a model with rules of its own (`ModelSpec.kept`), none."""
    outside_layers: bool = False
    """Shard weights outside the layers too (embedding, head)."""
    alignment_bytes: int = 256
    num_copy_streams: int = 1
    memory_limit_bytes: int | str | None = None
    """For one rank's chunks, slots and resident weights, each rounded up to the device's granularity; or `1GiB`."""
    placed: Sequence[Unit] | None = None
    """The units, as they are: what is sharded, and together with what. All else stays resident."""
    dual: Dual = "off"
    """Whether the model's blocks are sliced, and how steps run them: `gather`, `tensor_parallel`, or `auto` (by step
    shape)."""
    tune: Tuned | str | Path | None = None
    """For `dual="auto"`: what `graphshard tune` measured, or its file. A mode that is asked for goes before it."""
    chooser: ModeChooser | None = None
    """For `dual="auto"` without `tune`: who knows how long blocks take."""
    replicated: bool = False
    """Keep every weight resident; says no more about units, slots and patterns than that there are none."""

    def __post_init__(self) -> None:
        if not isinstance(self.units, str):
            raise SpecError(f"units is {self.units!r}, not a text: write layer, weight, bytes:4MiB or auto")
        if self.units != AUTO:
            unit_cap(self.units)  # raises SpecError with the known policies
        _check_known("head policy", self.head, get_args(HeadPolicy))
        _check_known("transport", self.transport, get_args(Transport))
        _check_known("executor", self.executor, (AUTO, *get_args(Executor)))
        _check_known("dual", self.dual, get_args(Dual))
        if self.dual == "off" and self.tune is not None:
            raise SpecError("tune says how steps run blocks, and dual is off, which slices none: say dual auto")
        _check_at_least("prefetch_depth", self.prefetch_depth, 0)
        _check_at_least("num_slots", self.num_slots, 1)
        _check_at_least("num_copy_streams", self.num_copy_streams, 1)
        if self.num_copy_streams > MAX_COPY_STREAMS:
            raise SpecError(f"num_copy_streams is {self.num_copy_streams}; at most {MAX_COPY_STREAMS} are of any use")
        if self.transport == "nccl" and self.num_copy_streams != 1:
            raise SpecError(
                f"num_copy_streams is {self.num_copy_streams}, and transport nccl gathers a unit by one collective on "
                "one stream: leave it at 1, or use transport pull"
            )
        _check_at_least("min_shard_bytes", self.min_shard_bytes, 0)
        _check_alignment(self.alignment_bytes)
        for name in ("outside_layers", "replicated"):
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} is {getattr(self, name)!r}; it is True or False")
        object.__setattr__(self, "include", patterns_of("include", self.include))
        object.__setattr__(self, "exclude", patterns_of("exclude", self.exclude))
        object.__setattr__(self, "step_shapes", capture_shapes(self.step_shapes))
        if self.memory_limit is not None:
            _check_at_least("memory_limit_bytes", self.memory_limit, 0)
        if self.placed is not None:
            self._check_nothing_is_grouped()
        if self.replicated:
            self._check_nothing_is_cut()

    @property
    def memory_limit(self) -> int | None:
        """`memory_limit_bytes` as a number."""
        limit = self.memory_limit_bytes
        return parse_bytes(limit) if isinstance(limit, str) else limit

    def _check_nothing_is_cut(self) -> None:
        """SpecError if something was asked for that only sharded weights have."""
        asked = {
            "units": self.units != AUTO,
            "prefetch_depth": self.prefetch_depth != AUTO,
            "num_slots": self.num_slots != AUTO,
            "include": bool(self.include),
            "outside_layers": self.outside_layers,
            "placed": bool(self.placed),
            "dual": self.dual != "off",
        }
        names = [name for name, is_asked in asked.items() if is_asked]
        if names:
            raise SpecError(
                f"a replicated plan keeps every weight resident, and {', '.join(names)} "
                f"({', '.join(repr(getattr(self, name)) for name in names)}) asks for sharded ones: leave out one or "
                "the other"
            )

    def _check_nothing_is_grouped(self) -> None:
        """SpecError if something was asked for that decides what given units have decided."""
        asked = {
            "units": self.units != AUTO,
            "include": bool(self.include),
            "exclude": bool(self.exclude),
            "min_shard_bytes": self.min_shard_bytes != AUTO,
            "outside_layers": self.outside_layers,
        }
        names = [name for name, is_asked in asked.items() if is_asked]
        if names:
            raise SpecError(f"{', '.join(names)} cannot be chosen beside placed, which says what the units are")


def capture_shapes(step_shapes: Sequence[StepShape | int]) -> tuple[StepShape, ...]:
    """Step shapes, sorted and each once; an int b is `StepShape(b, 1)`."""
    if isinstance(step_shapes, str | int | StepShape) or not isinstance(step_shapes, Iterable):
        raise SpecError(f"step shapes are {step_shapes!r}, not a sequence: write [1, 2, 4]")
    step_shapes = tuple(step_shapes)
    if not step_shapes:
        raise SpecError("no step shape to capture: name at least one batch size, as in capture_sizes=[1]")
    return tuple(sorted({shape if isinstance(shape, StepShape) else StepShape(shape) for shape in step_shapes}))


def _check_alignment(value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < MIN_ALIGNMENT_BYTES or value & (value - 1):
        raise SpecError(f"alignment_bytes is {value!r}; it is a power of two from {MIN_ALIGNMENT_BYTES} on, as 256 is")


def _check_known(what: str, name: object, known: Sequence[str]) -> None:
    if name not in known:
        raise SpecError(f"unknown {what} {name!r}; known are {', '.join(known)}")


def _check_at_least(what: str, value: int | str, least: int) -> None:
    if value != AUTO and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise SpecError(f"{what} is {value!r}; it is a whole number that starts at {least}")
