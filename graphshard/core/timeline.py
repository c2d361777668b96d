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


def prefetch_name(graph: str, unit: int) -> str:
    """What the span of a gather of `graph` is called that the host issues outside the graph."""
    return f"prefetch {graph} unit={unit}"


def prefetch_wait_name(graph: str, unit: int) -> str:
    """What the span is called in which `graph`'s stream stands still for such a gather."""
    return f"prefetch wait {graph} unit={unit}"


@dataclass(frozen=True, slots=True)
class Overlap:
    """Gathers from outside beside a fold, in us."""

    prefetch_us: float
    """From their first byte to their last."""
    fold_us: float
    overlap_us: float
    """That both were under way."""
    late_us: float
    """That the gathers ended after the fold: what would be waited for after it."""

    @property
    def share(self) -> float:
        """Of the gathers' time, the part beside the fold."""
        return self.overlap_us / self.prefetch_us if self.prefetch_us > 0 else 0.0

    @staticmethod
    def of(prefetch: tuple[float, float], fold: tuple[float, float]) -> Overlap:
        """By when each began and ended, on one clock."""
        both = min(prefetch[1], fold[1]) - max(prefetch[0], fold[0])
        late = prefetch[1] - fold[1]
        return Overlap(prefetch[1] - prefetch[0], fold[1] - fold[0], max(0.0, both), max(0.0, late))


def overlap_of(spans: Sequence[Span], graph: str, segment: str) -> Overlap:
    """How much of what was gathered for `graph` from outside ran beside the fold `segment`.

    A step's spans may begin with a gather that the step before launched; the last one of each unit counts.

    Raises:
        ValueError: there is no such gather, or no such fold.
    """
    folds = [span for span in spans if span.kind == "compute" and span.segment == segment and span.layer is None]
    gathers: dict[int | None, Span] = {}
    for span in sorted(spans, key=lambda one: one.end_us):
        if span.kind == "copy" and span.name == prefetch_name(graph, -1 if span.unit is None else span.unit):
            gathers[span.unit] = span
    if not folds or not gathers:
        raise ValueError(f"{len(folds)} folds {segment} and {len(gathers)} gathers of {graph}: there is one at least")
    begin, end = min(one.begin_us for one in gathers.values()), max(one.end_us for one in gathers.values())
    return Overlap.of((begin, end), (folds[-1].begin_us, folds[-1].end_us))
