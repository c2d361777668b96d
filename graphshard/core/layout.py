"""Where each byte lives. The only module that adds offsets; all of them are Python ints, so 64 bits and more.

A unit's weights are laid end to end in one byte buffer T, each padded to `alignment_bytes`, the total padded to
`world_size * alignment_bytes`. T is cut into `world_size` equal chunks; rank i keeps `T[i * C : (i + 1) * C]` in its
shard window. A gathered slot holds T whole. Padding is zero.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    """Unit `unit`: `num_bytes` whole (padding included), `chunk_bytes` a rank, at `chunk_offset` of each shard window."""

    unit: int
    num_bytes: int
    chunk_bytes: int
    chunk_offset: int
    views: tuple[WeightView, ...]
    copies: tuple[Copy, ...]
    """By source rank, 0 first; a transport starts at its own rank + 1 and ends with its own."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """A slot: `[offset, offset + num_bytes)` of the slot window, as large as its largest unit."""

    slot: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
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
