"""Where each byte lives. The only module that adds offsets; all of them are Python ints, so 64 bits and more.

A unit's weights are laid end to end in one byte buffer T, each padded to `alignment_bytes`, the total padded to
`world_size * alignment_bytes`. T is cut into `world_size` equal chunks; rank i keeps `T[i * C : (i + 1) * C]` in its
shard window. A gathered slot holds T whole. Padding is zero.

A sliced unit's weights lie in T the same way. Rank i's chunk is the i-th of `world_size` equal ranges of rows of each
weight, end to end, each padded to `alignment_bytes` with zeros. A gather brings every slice to its place in its
weight; the padding of T belongs to no chunk, and is whatever the slot held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from graphshard.core.errors import SpecError
from graphshard.core.plan import Plan, Unit, refuse_misplaced, refuse_sharded
from graphshard.core.sizes import align_up
from graphshard.core.slices import why_not_sliced
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.core.text import OMIT_EMPTY, digest_of, text_of

MIN_ALIGNMENT_BYTES = 16
"""The floor: vector loads of 16 bytes, and the largest element (complex128) too."""


@dataclass(frozen=True, slots=True)
class WeightView:
    """Bytes `[offset, offset + num_bytes)` of a unit (or of the resident area) are `weight`."""

    weight: str
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Copy:
    """One piece of a gather: `rows` rows of `row_bytes` from a rank's shard window into a slot.

    `source_offset` counts from the base of `source_rank`'s shard window, `slot_offset` from the base of the slot.
    The flat layout has one row a copy (pitches 0).
    """

    source_rank: int
    source_offset: int
    source_pitch: int
    slot_offset: int
    slot_pitch: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Unit `unit`: `num_bytes` whole (with padding), `chunk_bytes` a rank, at `chunk_offset` of each shard window."""

    unit: int
    num_bytes: int
    chunk_bytes: int
    chunk_offset: int
    views: tuple[WeightView, ...]
    copies: tuple[Copy, ...]
    """By source rank, 0 first; a transport starts at its own rank + 1 and ends with its own.

    Of a sliced unit: a piece for each weight, in the order of the weights, of each rank.
    """
    slices: tuple[WeightView, ...] = field(default=(), metadata={OMIT_EMPTY: True})
    """Where a rank's slice of each weight lies in its chunk, in the order of `views`; empty unless it is sliced."""

    @property
    def is_sliced(self) -> bool:
        """Whether a rank's chunk is its slice of each weight."""
        return bool(self.slices)

    @property
    def num_slices(self) -> int:
        """Contiguous pieces that a gather takes of each rank: its chunk, or its slice of each weight."""
        return max(1, len(self.slices))


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A slot: `[offset, offset + num_bytes)` of the slot window, as large as its largest unit."""

    slot: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Layout:
    """The whole of it, for any rank: nothing here depends on which rank asks."""

    world_size: int
    alignment_bytes: int
    units: tuple[UnitLayout, ...]
    slots: tuple[SlotLayout, ...]
    resident: tuple[WeightView, ...]
    shard_bytes: int
    """A rank's shard window: all of its chunks (the plan's chunk_bytes in reports)."""
    slot_bytes: int
    resident_bytes: int

    def text(self) -> str:
        """Stable text, the base of `digest`."""
        return text_of(self)

    @cached_property
    def digest(self) -> str:
        """The sha256 of `text()`."""
        return digest_of(self.text())

    @property
    def shardable_bytes(self) -> int:
        """The sharded weights' own bytes, without padding: what a replica would hold of them."""
        return sum(view.num_bytes for unit in self.units for view in unit.views)

    @property
    def largest_unit_bytes(self) -> int:
        """The largest unit, padding included; 0 if nothing is sharded."""
        return max((unit.num_bytes for unit in self.units), default=0)

    def reserved_bytes(self, granularity_bytes: int) -> int:
        """What a rank reserves: shard window, slot window and resident area, each rounded up to the granularity."""
        areas = (self.shard_bytes, self.slot_bytes, self.resident_bytes)
        return sum(align_up(area, granularity_bytes) for area in areas)


class ChunkPiece(NamedTuple):
    """Bytes `[weight_begin, weight_end)` of `weight` lie at `chunk_offset` of a rank's chunk."""

    weight: str
    weight_begin: int
    weight_end: int
    chunk_offset: int


def build_layout(model: ModelSpec, plan: Plan) -> Layout:
    """Place every weight of `model` as `plan` decided; those that are borrowed lie in another runtime's memory.

    Raises:
        SpecError: the alignment is below 16 bytes or no power of two, a weight is placed twice or not at all, a unit
            has no bytes or a weight that no plan may shard, or is sliced and cannot be, or a residency names a slot or
            unit that does not exist.
    """
    _check_request(plan)
    refuse_misplaced(plan)
    refuse_sharded(model, plan.units)
    units = []
    shard_bytes = 0
    for unit in plan.units:
        layout = _unit_layout(model, unit, plan, shard_bytes)
        units.append(layout)
        shard_bytes += layout.chunk_bytes
    slots = _slot_layouts(plan, units)
    sharded = {name for unit in plan.units for name in unit.weights}
    resident, resident_bytes = _place([w for w in model.owned if w.name not in sharded], plan.alignment_bytes)
    return Layout(
        world_size=plan.world_size,
        alignment_bytes=plan.alignment_bytes,
        units=tuple(units),
        slots=slots,
        resident=resident,
        shard_bytes=shard_bytes,
        slot_bytes=sum(slot.num_bytes for slot in slots),
        resident_bytes=resident_bytes,
    )


def chunk_pieces(unit: UnitLayout, rank: int) -> tuple[ChunkPiece, ...]:
    """Which bytes of which weights make up rank `rank`'s chunk of `unit`; what no piece covers is padding, zero."""
    if unit.is_sliced:
        return tuple(
            ChunkPiece(one.weight, rank * one.num_bytes, (rank + 1) * one.num_bytes, one.offset) for one in unit.slices
        )
    begin = rank * unit.chunk_bytes
    end = begin + unit.chunk_bytes
    pieces = []
    for view in unit.views:
        first = max(begin, view.offset)
        last = min(end, view.offset + view.num_bytes)
        if first < last:
            pieces.append(ChunkPiece(view.weight, first - view.offset, last - view.offset, first - begin))
    return tuple(pieces)


def _check_request(plan: Plan) -> None:
    alignment = plan.alignment_bytes
    if alignment < MIN_ALIGNMENT_BYTES or alignment & (alignment - 1):
        raise SpecError(f"alignment_bytes {alignment} is refused: use a power of two >= {MIN_ALIGNMENT_BYTES} B")
    if plan.world_size < 1:
        raise SpecError(f"world_size {plan.world_size} is refused: a plan needs at least one rank")
    placed: set[str] = set()
    for index, unit in enumerate(plan.units):
        if unit.index != index:
            raise SpecError(f"unit {unit.name} has index {unit.index} but is unit {index} of the plan")
        for name in unit.weights:
            if name in placed:
                raise SpecError(f"weight {name} is placed twice, the second time in unit {unit.name}")
            placed.add(name)


def _unit_layout(model: ModelSpec, unit: Unit, plan: Plan, chunk_offset: int) -> UnitLayout:
    views, end = _place([model.weight(name) for name in unit.weights], plan.alignment_bytes)
    if end == 0:
        raise SpecError(f"unit {unit.index} ({unit.name}) has no bytes, so no gather; keep its weights resident")
    if unit.is_sliced:
        return _sliced_layout(model, unit, plan, chunk_offset, views, end)
    num_bytes = align_up(end, plan.world_size * plan.alignment_bytes)
    chunk_bytes = num_bytes // plan.world_size
    copies = tuple(
        Copy(
            source_rank=rank,
            source_offset=chunk_offset,
            source_pitch=0,
            slot_offset=rank * chunk_bytes,
            slot_pitch=0,
            rows=1,
            row_bytes=chunk_bytes,
        )
        for rank in range(plan.world_size)
    )
    return UnitLayout(unit.index, num_bytes, chunk_bytes, chunk_offset, views, copies)


def _sliced_layout(
    model: ModelSpec, unit: Unit, plan: Plan, chunk_offset: int, views: tuple[WeightView, ...], num_bytes: int
) -> UnitLayout:
    weights, world_size = [model.weight(name) for name in unit.weights], plan.world_size
    reason = why_not_sliced(weights, world_size)
    if reason:
        raise SpecError(f"unit {unit.index} ({unit.name}) cannot be sliced over {world_size} ranks: {reason}")
    slices, chunk_bytes = _place(
        [replace(weight, shape=(weight.shape[0] // world_size, *weight.shape[1:])) for weight in weights],
        plan.alignment_bytes,
    )
    copies = tuple(
        Copy(
            source_rank=rank,
            source_offset=chunk_offset + one.offset,
            source_pitch=0,
            slot_offset=view.offset + rank * one.num_bytes,
            slot_pitch=0,
            rows=1,
            row_bytes=one.num_bytes,
        )
        for rank in range(world_size)
        for view, one in zip(views, slices, strict=True)
    )
    return UnitLayout(unit.index, num_bytes, chunk_bytes, chunk_offset, views, copies, slices)


def _slot_layouts(plan: Plan, units: Sequence[UnitLayout]) -> tuple[SlotLayout, ...]:
    sizes = [0] * plan.num_slots
    for residency in plan.residencies:
        sizes[residency.slot] = max(sizes[residency.slot], units[residency.unit].num_bytes)
    slots = []
    offset = 0
    for slot, size in enumerate(sizes):
        slots.append(SlotLayout(slot, offset, size))
        offset += size
    return tuple(slots)


def _place(weights: Sequence[WeightSpec], alignment: int) -> tuple[tuple[WeightView, ...], int]:
    """Lay `weights` end to end, each padded to `alignment`; the views and the bytes that they take."""
    views = []
    offset = 0
    for weight in weights:
        size = weight.num_bytes
        views.append(WeightView(weight.name, offset, size, weight.shape, weight.dtype, weight.strides))
        offset += align_up(size, alignment)
    return tuple(views), offset
