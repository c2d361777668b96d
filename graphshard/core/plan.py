"""What was chosen: a plan is a value that can be printed, with the reason for every weight.

A *unit* is what one gather restores. A *residency* is one stay of a unit in a slot: the segments from the first to
the last that read it. A unit that is read at two far ends of the model has two residencies, and is gathered twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.core.text import OMIT_EMPTY, digest_of, text_of

HeadPolicy = Literal["inside", "outside", "tail"]
Transport = Literal["pull", "nccl"]
Executor = Literal["cooperative", "threaded"]
Mode = Literal["gather", "tensor_parallel"]
"""How a step runs a block: on whole weights, gathered, or on this rank's slices for the tokens of all ranks."""


def copies_per_gather(transport: Transport, world_size: int) -> int:
    """What `lower` is given: `pull` copies each rank's chunk, `nccl` gathers all of them by one collective."""
    return 1 if transport == "nccl" else world_size


@dataclass(frozen=True, slots=True)
class WeightDecision:
    """Whether `weight` is sharded (its unit's index) or resident (unit None), and why."""

    weight: str
    unit: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that one gather restores, in the order in which they lie in the slot.

    A sliced unit is the weights of a block, and a rank keeps its slice of each; else each rank keeps one range of the
    unit's bytes.
    """

    index: int
    name: str
    weights: tuple[str, ...]
    is_sliced: bool = field(default=False, metadata={OMIT_EMPTY: True})


def refuse_sharded(model: ModelSpec, units: Sequence[Unit]) -> None:
    """SpecError if `units` have a weight that no plan may shard (`ModelSpec.why_whole`), naming it and the reason."""
    for unit in units:
        for name in unit.weights:
            if name in model.why_whole:
                raise SpecError(
                    f"unit {unit.index} ({unit.name}) shards the weight {name}, which stays whole: it is "
                    f"{model.why_whole[name]}; leave it out of the units"
                )


@dataclass(frozen=True, slots=True)
class Residency:
    """Unit `unit` stays in `slot` for the model's segments `begin` (included) to `end` (excluded)."""

    unit: int
    begin: int
    end: int
    slot: int


@dataclass(frozen=True)
class Plan:
    """Everything that decides the op list. Two ranks with equal plans issue equal ops."""

    model: str
    world_size: int
    decisions: tuple[WeightDecision, ...]
    units: tuple[Unit, ...]
    residencies: tuple[Residency, ...]
    """In the order in which their gathers are issued: by `begin`, then by unit."""
    num_slots: int
    prefetch_depth: int
    head: HeadPolicy
    transport: Transport
    executor: Executor
    step_shapes: tuple[StepShape, ...]
    unit_policy: str
    """`layer`, `weight`, or `bytes:CAP`; `placed` where the units were given."""
    alignment_bytes: int = 256
    num_copy_streams: int = 1
    reasons: tuple[str, ...] = ()
    """Why depth, units and executor were chosen, one sentence each; empty where the user chose."""
    modes: tuple[tuple[StepShape, tuple[Mode, ...]], ...] = field(default=(), metadata={OMIT_EMPTY: True})
    """By step shape: a mode for each block of the model, in order; `gather` for those that are not sliced."""
    block_reasons: tuple[str, ...] = field(default=(), metadata={OMIT_EMPTY: True})
    """Why each block is sliced or not, and why its modes were chosen, one sentence each; empty without blocks."""

    def __post_init__(self) -> None:
        for name, choices in (("head", HeadPolicy), ("transport", Transport), ("executor", Executor)):
            if getattr(self, name) not in get_args(choices):
                known = ", ".join(get_args(choices))
                raise SpecError(f"plan: unknown {name} {getattr(self, name)!r}; known: {known}")
        for name in ("decisions", "units", "residencies", "step_shapes"):
            if not isinstance(getattr(self, name), tuple):
                raise SpecError(f"plan: {name} is of type {type(getattr(self, name)).__name__}; give a tuple")

    @property
    def num_copies(self) -> int:
        """The copies that one gather is lowered to, see `copies_per_gather`."""
        return copies_per_gather(self.transport, self.world_size)

    def modes_of(self, shape: StepShape) -> tuple[Mode, ...]:
        """The modes of a step of `shape`, by block; empty where the plan has none at all: every block is gathered.

        Raises:
            SpecError: the plan has modes, and none for `shape`.
        """
        if not self.modes:
            return ()
        by_shape = dict(self.modes)
        if shape not in by_shape:
            known = ", ".join(map(str, sorted(by_shape)))
            raise SpecError(f"the plan has no modes for step shape {shape}; it has some for {known}: give one a block")
        return by_shape[shape]

    def text(self) -> str:
        """Stable text, the base of `digest`."""
        return text_of(self)

    @cached_property
    def digest(self) -> str:
        """The sha256 of `text()`."""
        return digest_of(self.text())


def refuse_misplaced(plan: Plan) -> None:
    """SpecError for a residency of a unit, or in a slot, that there is not."""
    for residency in plan.residencies:
        if not 0 <= residency.unit < len(plan.units) or not 0 <= residency.slot < plan.num_slots:
            raise SpecError(f"{residency} is refused: the plan has {len(plan.units)} units and {plan.num_slots} slots")
