"""What `graphshard tune` measured: blocks gathered and in slices, by tokens of a rank; and which a step shape takes.

A *kind* is blocks that are alike but for their layer, so each is measured once. Between two measured numbers of tokens
a time is taken from the nearest two, linear in logarithms of both; outside of them it is the nearest one's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import exp, log
from typing import Any, Literal

from graphshard.core.errors import SpecError
from graphshard.core.plan import Mode, Transport
from graphshard.core.specs import BlockSpec, DeviceSpec, ModelSpec
from graphshard.core.text import digest_of

MODES: tuple[Mode, ...] = ("gather", "tensor_parallel")
"""What is measured; of equally fast ones the first: it has the bits of whole weights, and waits for nobody."""
_AGAIN = "measure with `graphshard tune`"


@dataclass(frozen=True, slots=True)
class TunedRow:
    """Times of a layer with one block of `kind` at `tokens_per_rank`, of the slowest rank, in ms."""

    kind: str
    tokens_per_rank: int
    mode: Mode
    median_ms: float
    p10_ms: float
    p90_ms: float
    n: int


@dataclass(frozen=True, slots=True)
class TunedChoice:
    """How a block runs at a step shape, and why, without a full stop."""

    mode: Mode
    reason: str


@dataclass(frozen=True)
class Tuned:
    """Measurements of one model's blocks over one group. `rows` have both modes of each number of tokens, in turn."""

    model: str
    """Its name."""
    model_digest: str
    world_size: int
    transport: Transport
    device_kind: Literal["host", "cuda"]
    device: str
    """Its name."""
    settings: Mapping[str, Any]
    """How it was measured: whatever must be alike for measurements to go on in one file, as plain data."""
    kinds: tuple[str, ...]
    """That are to be measured."""
    tokens: tuple[int, ...]
    """Of a rank, that are to be measured."""
    rows: tuple[TunedRow, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What else is worth to be kept, as plain data: the machine, blocks that are not sliced, merged collectives."""

    def __post_init__(self) -> None:
        seen: set[tuple[str, int]] = set()
        for one, other in _pairs(self.rows):
            where = f"{one.kind} at {one.tokens_per_rank} tokens a rank"
            if other is None or (one.mode, other.mode) != MODES or _key(one) != _key(other):
                raise SpecError(f"the rows of {where} are not {' and '.join(MODES)} in turn")
            if _key(one) in seen:
                raise SpecError(f"{where} was measured twice")
            seen.add(_key(one))

    @cached_property
    def digest(self) -> str:
        """Equal for equal measurements of the same, whatever the notes are."""
        said = [self.model_digest, self.world_size, self.transport, self.device_kind, self.device, self.rows]
        return digest_of("\n".join(map(repr, said)))

    @property
    def missing(self) -> tuple[tuple[str, int], ...]:
        """(kind, tokens of a rank) that were to be measured and are not yet, in order."""
        done = {_key(row) for row in self.rows}
        return tuple((kind, n) for kind in self.kinds for n in self.tokens if (kind, n) not in done)

    @property
    def num_measured(self) -> int:
        """Of all (kind, tokens of a rank)."""
        return len(self.rows) // len(MODES)

    @property
    def headline(self) -> str:
        """What plans say of it."""
        rest = len(self.missing)
        told = f", {rest} measurements of {rest + self.num_measured} are missing" if rest else ""
        how = ", ".join(f"{key} {value}" for key, value in self.settings.items() if key in _TOLD)
        return (
            f"tune file {self.digest[:12]}: {self.world_size} ranks, transport {self.transport}, {self.device}"
            f"{', ' if how else ''}{how}{told}"
        )

    def check(self, model: ModelSpec, world_size: int, transport: str, device: DeviceSpec) -> None:
        """SpecError unless it was measured of `model` over such a group, and has each kind of block that it wants."""
        found = {
            "model": (self._named(self.model, self.model_digest), self._named(model.name, model.digest)),
            "world_size": (self.world_size, world_size),
            "transport": (self.transport, transport),
            "device": (self.device_kind, device.kind),
        }
        for what, (mine, theirs) in found.items():
            if mine != theirs:
                raise SpecError(f"the tune file is of {what} {mine}, and this is {what} {theirs}: {_AGAIN} for it")

    def unlike(self, device: DeviceSpec, prefetch_depth: int, executor: str) -> str:
        """Where steps of a plan are others than those measured, in words; empty if they are alike, or nothing tells."""
        here: dict[str, Any] = {"prefetch_depth": prefetch_depth}
        here |= {"executor": executor} if device.kind == "host" else {}  # a GPU runs its graphs by itself
        return "; ".join(
            f"{what} {self.settings[what]}, here {value}"
            for what, value in here.items()
            if self.settings.get(what, value) != value
        )

    def choose(self, model: ModelSpec, block: BlockSpec, tokens_per_rank: int) -> TunedChoice:
        """The faster mode of `block` in a step of so many tokens of each rank.

        Raises:
            SpecError: no block of its kind was measured.
        """
        kind = kind_of(model, block)
        times = {mode: self._times(kind, mode) for mode in MODES}
        if not times["gather"]:
            left = " yet; run it again, it goes on where it stopped" if kind in self.kinds else f": {_AGAIN}"
            raise SpecError(f"the tune file has no measurement of {block.name} ({kind}){left}")
        took = {mode: time_at(points, tokens_per_rank) for mode, points in times.items()}
        best = min(MODES, key=lambda mode: took[mode])
        other = next(mode for mode in MODES if mode != best)
        pair = f"{_ms(took[best])} against {_ms(took[other])}"
        return TunedChoice(best, _reason(pair, [n for n, _ in times[best]], tokens_per_rank))

    def _times(self, kind: str, mode: Mode) -> list[tuple[int, float]]:
        return sorted((row.tokens_per_rank, row.median_ms) for row in self.rows if (row.kind, row.mode) == (kind, mode))

    @staticmethod
    def _named(name: str, digest: str) -> str:
        return f"{name} ({digest[:12]})"


_TOLD = ("units", "prefetch_depth", "executor")


def kind_of(model: ModelSpec, block: BlockSpec) -> str:
    """What blocks have in common that take equal times: `mlp_compute 1536x576 1536x576 1536x576 float32`."""
    weights = [model.weight(name) for name in block.weights]
    shapes = " ".join("x".join(map(str, weight.shape)) for weight in weights)
    dtypes = " ".join(dict.fromkeys(weight.dtype for weight in weights))
    return f"{block.compute.name} {shapes} {dtypes}"


def kinds_of(model: ModelSpec) -> dict[str, tuple[BlockSpec, ...]]:
    """The blocks of `model` by kind, in order."""
    found: dict[str, list[BlockSpec]] = {}
    for block in model.blocks:
        found.setdefault(kind_of(model, block), []).append(block)
    return {kind: tuple(blocks) for kind, blocks in found.items()}


def time_at(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Of ascending (tokens, time), at least one: the time at `tokens`; see the top of this file."""
    at = bisect_left(points, (tokens, 0.0))
    if at == len(points) or (at == 0 or points[at][0] == tokens):
        return points[min(at, len(points) - 1)][1]
    (low, below), (high, above) = points[at - 1], points[at]
    share = (log(tokens) - log(low)) / (log(high) - log(low))
    return exp(log(below) + share * (log(above) - log(below)))


def _reason(pair: str, measured: Sequence[int], tokens: int) -> str:
    if tokens in measured:
        return f"measured: {pair} at {tokens} tokens a rank"
    if not measured[0] < tokens < measured[-1]:
        nearest = measured[0] if tokens < measured[0] else measured[-1]
        return f"measured: {pair} at {nearest} tokens a rank, the nearest to {tokens}"
    at = bisect_left(measured, tokens)
    return f"between those measured at {measured[at - 1]} and {measured[at]} tokens a rank: {pair} at {tokens}"


def _ms(value: float) -> str:
    return f"{value:.3g} ms"


def _key(row: TunedRow) -> tuple[str, int]:
    return row.kind, row.tokens_per_rank


def _pairs(rows: Sequence[TunedRow]) -> Iterator[tuple[TunedRow, TunedRow | None]]:
    for at in range(0, len(rows), 2):
        yield rows[at], rows[at + 1] if at + 1 < len(rows) else None
