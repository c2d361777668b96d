"""Sliced units: a rank keeps a range of rows of every weight, and a gather restores each weight bit for bit."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, UnitLayout, build_layout, chunk_pieces
from graphshard.core.plan import Plan, Residency, Unit
from graphshard.core.sizes import DTYPE_BITS, NARROW_DTYPES
from graphshard.core.slices import why_not_sliced
from graphshard.core.specs import ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.verify.facts import Facts
from graphshard.verify.layout_rules import copies_fill_unit, reads_inside_unit, slots_are_apart

WIDE = sorted(name for name in DTYPE_BITS if name not in NARROW_DTYPES)


def model_of(weights: Sequence[WeightSpec]) -> ModelSpec:
    return ModelSpec("m", tuple(weights), (SegmentSpec("s", 0, tuple(weight.name for weight in weights)),))


def plan_of(units: Sequence[Unit], world_size: int, alignment: int = 256) -> Plan:
    stays = tuple(Residency(unit.index, 0, 1, unit.index) for unit in units)
    shapes = (StepShape(1),)
    return Plan(
        "m",
        world_size,
        (),
        tuple(units),
        stays,
        len(units),
        0,
        "inside",
        "pull",
        "cooperative",
        shapes,
        "placed",
        alignment,
    )


def sliced(weights: Sequence[WeightSpec], world_size: int, alignment: int = 256) -> Layout:
    """The layout of one sliced unit with all of `weights`."""
    unit = Unit(0, "block", tuple(weight.name for weight in weights), is_sliced=True)
    return build_layout(model_of(weights), plan_of([unit], world_size, alignment))


def self_naming(weight: WeightSpec) -> bytes:
    return hashlib.shake_128(weight.name.encode()).digest(weight.num_bytes)


def windows_of(layout: Layout, weights: Sequence[WeightSpec]) -> list[bytes]:
    """Every rank's shard window, its slices cut row by row."""
    windows = []
    for rank in range(layout.world_size):
        window = bytearray(layout.shard_bytes)
        for unit in layout.units:
            for weight, view in zip(weights, unit.slices, strict=True):
                rows = weight.shape[0] // layout.world_size
                row_bytes = weight.num_bytes // weight.shape[0]
                data = self_naming(weight)[rank * rows * row_bytes : (rank + 1) * rows * row_bytes]
                begin = unit.chunk_offset + view.offset
                window[begin : begin + len(data)] = data
        windows.append(bytes(window))
    return windows


def gathered(unit: UnitLayout, windows: Sequence[bytes]) -> bytes:
    slot = bytearray(b"\xff" * unit.num_bytes)
    for copy in unit.copies:
        data = windows[copy.source_rank][copy.source_offset : copy.source_offset + copy.row_bytes]
        slot[copy.slot_offset : copy.slot_offset + copy.row_bytes] = data
    return bytes(slot)


def problems(layout: Layout, model: ModelSpec) -> list[str]:
    """What the verifier's rules over bytes find; they look at no program."""
    facts = Facts.__new__(Facts)
    object.__setattr__(facts, "layout", layout)
    object.__setattr__(facts, "model", model)
    return [str(one) for rule in (copies_fill_unit, reads_inside_unit, slots_are_apart) for one in rule(facts)]


@settings(deadline=None, max_examples=80)
@given(
    world_size=st.integers(2, 8),
    rows=st.integers(1, 9),
    widths=st.lists(st.lists(st.integers(1, 40), max_size=2), min_size=2, max_size=5),
    dtypes=st.lists(st.sampled_from(WIDE), min_size=5, max_size=5),
    alignment=st.sampled_from([16, 64, 256, 4096]),
)
def test_any_block_round_trips(
    world_size: int, rows: int, widths: list[list[int]], dtypes: list[str], alignment: int
) -> None:
    weights = [
        WeightSpec(f"w{i}", (16 * rows * world_size, *width), dtype)
        for i, (width, dtype) in enumerate(zip(widths, dtypes, strict=False))
    ]
    assert why_not_sliced(weights, world_size) == ""
    layout, model = sliced(weights, world_size, alignment), model_of(weights)
    (unit,) = layout.units
    assert problems(layout, model) == []
    assert [(copy.source_rank, copy.rows) for copy in unit.copies] == [
        (rank, 1) for rank in range(world_size) for _ in weights
    ]
    windows = windows_of(layout, weights)
    slot = gathered(unit, windows)
    padding = bytearray(slot)
    for weight, view, one in zip(weights, unit.views, unit.slices, strict=True):
        assert slot[view.offset : view.offset + view.num_bytes] == self_naming(weight)
        padding[view.offset : view.offset + view.num_bytes] = b"\xff" * view.num_bytes
        assert (view.shape, view.dtype, view.strides) == (weight.shape, weight.dtype, None)
        assert one.shape == (16 * rows, *weight.shape[1:]) and one.num_bytes * world_size == view.num_bytes
        assert view.offset % alignment == one.offset % alignment == 0
    assert padding == b"\xff" * unit.num_bytes, "a gather writes weights alone"
    assert layout.shard_bytes == unit.chunk_bytes and unit.chunk_bytes % alignment == 0
    for rank, window in enumerate(windows):
        chunk = bytearray(layout.shard_bytes)
        for name, begin, end, offset in chunk_pieces(unit, rank):
            whole = self_naming(model.weight(name))
            assert begin == rank * len(whole) // world_size and end == (rank + 1) * len(whole) // world_size
            chunk[offset : offset + end - begin] = whole[begin:end]
        assert bytes(chunk) == window


def test_flat_and_sliced_units_lie_beside_one_another() -> None:
    weights = [WeightSpec(name, (12, 8), "float32") for name in ("a", "b", "c", "d")]
    units = [Unit(0, "flat", ("a",)), Unit(1, "block", ("b", "c"), is_sliced=True), Unit(2, "last", ("d",))]
    layout = build_layout(model_of(weights), plan_of(units, 3))
    assert problems(layout, model_of(weights)) == []
    flat, block, last = layout.units
    assert (flat.chunk_offset, block.chunk_offset, last.chunk_offset) == (0, 256, 256 + 512)
    assert not flat.is_sliced and block.is_sliced and "slices" in layout.text()
    plain = build_layout(model_of(weights), plan_of([replace(unit, is_sliced=False) for unit in units], 3))
    assert "slices" not in plain.text() and plain.digest != layout.digest
    in_slots = [unit.views for unit in layout.units]
    assert [unit.views for unit in plain.units] == in_slots, "a gathered weight lies in its slot as ever"


@pytest.mark.parametrize(
    ("change", "world_size", "message"),
    [
        ({}, 1, "one rank keeps every row"),
        ({"shape": (6144, 8)}, 5, "6144 rows of up are no multiple of 5 ranks"),
        ({"shape": (20, 8)}, 5, "down has 20 rows, up has 10"),
        ({"shape": (10, 2), "dtype": "int8"}, 5, "a slice of down is 4 B, no multiple of 16 B"),
        ({"shape": (10, 64), "dtype": "float4_e2m1fn_x2"}, 5, "down is float4_e2m1fn_x2, of elements below a byte"),
        ({"shape": (10, 64), "dtype": "uint4"}, 5, "down is uint4, of elements below a byte"),
        ({"strides": (1, 10)}, 5, r"down is stored with strides \[1, 10\]"),
        ({"shape": (10, 0)}, 5, r"down \[10, 0\] has no rows to cut"),
        ({"shape": ()}, 5, r"down \[\] has no rows to cut"),
    ],
)
def test_what_cannot_be_sliced_has_a_reason(change: dict[str, object], world_size: int, message: str) -> None:
    down = replace(WeightSpec("down", (10, 8), "float32"), **change)  # type: ignore[arg-type]
    others = [WeightSpec("up", (down.shape[0] if down.shape and down.shape[0] == 6144 else 10, 8), "float32")]
    with pytest.raises(SpecError, match=rf"unit 0 \(block\) cannot be sliced over {world_size} ranks: .*{message}"):
        sliced([*others, down], world_size)
    with pytest.raises(SpecError):
        sliced([down, *others], world_size)
    assert why_not_sliced([*others, replace(others[0], name="same")], 2) == ""


def test_sliced_layouts_beyond_32_bits() -> None:
    weights = [WeightSpec(name, (2**20, 2**13), "bfloat16") for name in ("gate", "up", "down")]
    (unit,) = sliced(weights, 8).units
    assert unit.chunk_bytes == 3 * math.prod((2**17, 2**14)) and unit.num_bytes == 8 * unit.chunk_bytes
    assert unit.copies[-1].slot_offset == unit.num_bytes - 2**31 > 2**32


def test_every_wrong_piece_is_named() -> None:
    weights = [WeightSpec(name, (8, 12), "float32") for name in ("gate", "up", "down")]
    layout, model = sliced(weights, 2), model_of(weights)
    (unit,) = layout.units
    first, *others = unit.copies
    wrong = {
        "no copy brings": replace(unit, copies=tuple(others)),
        "where no slice of it is": replace(unit, copies=(*unit.copies, first)),
        "a copy brings": replace(unit, copies=(replace(first, slot_offset=first.slot_offset + 16), *others)),
        "of rank 1 to byte 0": replace(unit, copies=(replace(first, source_rank=1), *others)),
        "several rows": replace(unit, copies=(replace(first, rows=2, row_bytes=first.row_bytes), *others)),
        "are not of its weights": replace(unit, slices=unit.slices[::-1]),
        "are taken": replace(unit, slices=(unit.slices[0], *(replace(one, offset=0) for one in unit.slices[1:]))),
        "of a chunk of 16 B": replace(unit, chunk_bytes=16),
        "are not the": replace(unit, slices=(replace(unit.slices[0], num_bytes=96), *unit.slices[1:])),
    }
    for message, changed in wrong.items():
        found = problems(replace(layout, units=(changed,)), model)
        assert any(message in one for one in found), (message, found)
