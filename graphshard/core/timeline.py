"""A step in time: what each stream did from when to when. Measured or predicted, it is the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["compute", "copy", "wait"]


@dataclass(frozen=True, slots=True)
class Span:
    """An op's time on its stream, counted from the step's first op. Spans of one lane do not overlap."""

    lane: str
    """The stream."""
    kind: SpanKind
    """What the stream does; `wait`: it stands still for another."""
    name: str
    begin_us: float
    end_us: float
    unit: int | None = None
    """The unit that is copied, waited for or read."""
    layer: int | None = None
    segment: str | None = None

    @property
    def duration_us(self) -> float:
        """How long it took."""
        return self.end_us - self.begin_us


@dataclass(frozen=True)
class Timeline:
    """One step of one rank."""

    rank: int
    spans: tuple[Span, ...]
    """In issue order."""
    offset_us: float = 0.0
    """When the step began, on a clock that all ranks share; 0 where there is none."""

    @property
    def duration_us(self) -> float:
        """From the step's first op to its last."""
        return max((span.end_us for span in self.spans), default=0.0)

    @property
    def lanes(self) -> tuple[str, ...]:
        """The streams, in the order in which they first did something."""
        return tuple(dict.fromkeys(span.lane for span in self.spans))


@dataclass(frozen=True, slots=True)
class UnitTime:
    """What one unit cost in a step: gathering it (all its copies), and the compute that reads it."""

    unit: int
    gather_us: float
    compute_us: float


def unit_times(spans: Sequence[Span]) -> tuple[UnitTime, ...]:
    """The cost of each unit, by unit; compute that reads several is counted for the first."""
    units = sorted({span.unit for span in spans if span.unit is not None})

    def total(kind: str, unit: int) -> float:
        return sum(span.duration_us for span in spans if span.kind == kind and span.unit == unit)

    return tuple(UnitTime(unit, total("copy", unit), total("compute", unit)) for unit in units)
