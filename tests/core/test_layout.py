"""Every byte has one place: gathered from chunks, each weight is bit for bit itself, and the rest is zero."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, UnitLayout, build_layout, chunk_pieces
from graphshard.core.plan import Plan, Residency, Unit, WeightDecision
from graphshard.core.specs import ModelSpec, SegmentSpec, StepShape, WeightSpec


def model_of(*weights: WeightSpec) -> ModelSpec:
    return ModelSpec("m", weights, tuple(SegmentSpec(f"s{i}", i, (w.name,)) for i, w in enumerate(weights)))


def plan_of(
    model: ModelSpec, units: Sequence[Sequence[str]], world_size: int, alignment_bytes: int = 256, num_slots: int = 2
) -> Plan:
    unit_of = {name: index for index, names in enumerate(units) for name in names}
    return Plan(
        model=model.name,
        world_size=world_size,
        decisions=tuple(WeightDecision(w.name, unit_of.get(w.name), "test") for w in model.weights),
        units=tuple(Unit(index, f"u{index}", tuple(names)) for index, names in enumerate(units)),
        residencies=tuple(Residency(index, index, index + 1, index % num_slots) for index in range(len(units))),
        num_slots=num_slots,
        prefetch_depth=1,
        head="inside",
        transport="pull",
        executor="cooperative",
        step_shapes=(StepShape(1),),
        unit_policy="layer",
        alignment_bytes=alignment_bytes,
    )


def bytes_model(sizes: Sequence[int]) -> ModelSpec:
    return model_of(*(WeightSpec(f"w{i}", (size,), "uint8") for i, size in enumerate(sizes)))


def check_tiling(unit: UnitLayout, world_size: int) -> None:
    """The pieces of all ranks tile every weight once, in order, and lie inside their chunks."""
    reached = dict.fromkeys((view.weight for view in unit.views), 0)
    for rank in range(world_size):
        end = 0
        for piece in chunk_pieces(unit, rank):
            assert piece.weight_begin == reached[piece.weight] < piece.weight_end
            assert end <= piece.chunk_offset
            end = piece.chunk_offset + piece.weight_end - piece.weight_begin
            assert end <= unit.chunk_bytes
            reached[piece.weight] = piece.weight_end
    assert reached == {view.weight: view.num_bytes for view in unit.views}


def check_arithmetic(layout: Layout, alignment: int) -> None:
    window = 0
    for unit in layout.units:
        assert unit.num_bytes == unit.chunk_bytes * layout.world_size > 0
        assert unit.num_bytes - sum(v.num_bytes for v in unit.views) < alignment * (layout.world_size + len(unit.views))
        assert unit.chunk_bytes % alignment == 0 and unit.chunk_offset == window
        window += unit.chunk_bytes
        assert all(view.offset % alignment == 0 for view in unit.views)
        assert sum(copy.rows * copy.row_bytes for copy in unit.copies) == unit.num_bytes
        assert [copy.source_rank for copy in unit.copies] == list(range(layout.world_size))
        check_tiling(unit, layout.world_size)
    assert window == layout.shard_bytes
    for slot, following in zip(layout.slots, layout.slots[1:], strict=False):
        assert slot.offset % alignment == 0 and following.offset == slot.offset + slot.num_bytes
    assert layout.slot_bytes == sum(slot.num_bytes for slot in layout.slots)


def gather(layout: Layout, unit: UnitLayout, windows: Sequence[bytes]) -> bytes:
    slot = bytearray(b"\xff" * unit.num_bytes)  # poison: what no copy writes shows
    for copy in unit.copies:
        for row in range(copy.rows):
            source = copy.source_offset + row * copy.source_pitch
            target = copy.slot_offset + row * copy.slot_pitch
            slot[target : target + copy.row_bytes] = windows[copy.source_rank][source : source + copy.row_bytes]
    return bytes(slot)


def check_round_trip(model: ModelSpec, layout: Layout, seed: int = 0) -> None:
    generator = random.Random(seed)
    content = {weight.name: generator.randbytes(weight.num_bytes) for weight in model.weights}
    windows = []
    for rank in range(layout.world_size):
        window = bytearray(layout.shard_bytes)
        for unit in layout.units:
            for name, begin, end, offset in chunk_pieces(unit, rank):
                base = unit.chunk_offset + offset
                window[base : base + end - begin] = content[name][begin:end]
        windows.append(bytes(window))
    for unit in layout.units:
        slot = bytearray(gather(layout, unit, windows))
        for view in unit.views:
            assert slot[view.offset : view.offset + view.num_bytes] == content[view.weight]
            slot[view.offset : view.offset + view.num_bytes] = bytes(view.num_bytes)
        assert not any(slot), "padding is zero"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("alignment", [16, 256])
def test_small_totals_round_trip(world_size: int, alignment: int) -> None:
    for size in {1, world_size - 1, world_size, world_size + 1, 16 * world_size - 1} - {0}:
        model = bytes_model([size, 0])  # a zero-row tensor lies beside it
        layout = build_layout(model, plan_of(model, [["w0", "w1"]], world_size, alignment))
        check_arithmetic(layout, alignment)
        check_round_trip(model, layout)
        assert layout.units[0].num_bytes == -(-size // (alignment * world_size)) * alignment * world_size


@pytest.mark.parametrize("sizes", [[0], [0, 0], []])
def test_a_unit_with_no_bytes_is_refused(sizes: list[int]) -> None:
    model = bytes_model(sizes)
    with pytest.raises(SpecError, match=r"unit 0 \(u0\) has no bytes, so no gather"):
        build_layout(model, plan_of(model, [[w.name for w in model.weights]], 2))


@settings(deadline=None, max_examples=60)
@given(
    units=st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=4), max_size=5),
    resident=st.lists(st.integers(0, 300), max_size=3),
    world_size=st.integers(1, 8),
    alignment=st.sampled_from([16, 64, 256, 4096]),
    num_slots=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_any_model_round_trips(
    units: list[list[int]], resident: list[int], world_size: int, alignment: int, num_slots: int, seed: int
) -> None:
    sizes = [size for unit in units for size in unit]
    model = bytes_model(sizes + resident)
    names = iter(f"w{i}" for i in range(len(sizes)))
    plan = plan_of(model, [[next(names) for _ in unit] for unit in units], world_size, alignment, num_slots)
    layout = build_layout(model, plan)
    check_arithmetic(layout, alignment)
    check_round_trip(model, layout, seed)
    assert [view.weight for view in layout.resident] == [f"w{len(sizes) + i}" for i in range(len(resident))]
    assert layout.resident_bytes == sum(-(-size // alignment) * alignment for size in resident)
    for residency in plan.residencies:
        assert layout.slots[residency.slot].num_bytes >= layout.units[residency.unit].num_bytes
    assert layout.shardable_bytes == sum(sizes)
    assert build_layout(model, plan).digest == layout.digest


BIG = [2**31 - 1, 2**31, 2**32 + 16, 3 * 2**30, 5 * 2**30]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_beyond_32_bits_nothing_wraps(world_size: int) -> None:
    model = bytes_model(BIG)
    layout = build_layout(model, plan_of(model, [[f"w{i}" for i in range(5)]], world_size))
    check_arithmetic(layout, 256)
    alone = build_layout(model, plan_of(model, [[f"w{i}"] for i in range(5)], world_size))
    check_arithmetic(alone, 256)
    assert alone.units[4].chunk_offset == sum(unit.chunk_bytes for unit in alone.units[:4])
    last = layout.units[0].copies[-1]
    assert last.slot_offset == (world_size - 1) * layout.units[0].chunk_bytes
    assert world_size == 1 or last.slot_offset > 2**32


def test_odd_sizes_do_not_shift_what_follows() -> None:
    model = model_of(
        WeightSpec("odd", (3,), "uint8"),
        WeightSpec("scale", (1,), "float32"),
        WeightSpec("fp8", (5,), "float8_e4m3fn"),
        WeightSpec("bf16", (3, 5), "bfloat16"),
        WeightSpec("fp4", (7,), "float4_e2m1fn_x2"),
        WeightSpec("complex", (1,), "complex128"),
        WeightSpec("flag", (1,), "bool"),
    )
    for world_size in (1, 2, 3, 7):  # with 3 and 7 a chunk's border lies in the middle of an element's row
        for alignment in (16, 256):
            plan = plan_of(model, [[w.name for w in model.weights]], world_size, alignment)
            layout = build_layout(model, plan)
            check_round_trip(model, layout)
            for view, weight in zip(layout.units[0].views, model.weights, strict=True):
                assert view.offset % 16 == 0
                assert (view.shape, view.dtype) == (weight.shape, weight.dtype)


def test_chunk_borders_ignore_elements() -> None:
    model = model_of(WeightSpec("w", (5, 3), "float64"))  # 120 B over 3 ranks of 48 B
    layout = build_layout(model, plan_of(model, [["w"]], 3, 16))
    pieces = [chunk_pieces(layout.units[0], rank) for rank in range(3)]
    assert pieces == [(("w", 0, 48, 0),), (("w", 48, 96, 0),), (("w", 96, 120, 0),)]


def test_strides_are_recorded() -> None:
    model = model_of(WeightSpec("t", (4, 8), "bfloat16", (1, 4)))
    view = build_layout(model, plan_of(model, [["t"]], 2)).units[0].views[0]
    assert view.strides == (1, 4) and view.num_bytes == 64


@pytest.mark.parametrize("alignment", [0, 1, 8, 24, 100, -16])
def test_alignment_has_a_floor(alignment: int) -> None:
    model = bytes_model([64])
    with pytest.raises(SpecError, match=r"use a power of two >= 16 B"):
        build_layout(model, plan_of(model, [["w0"]], 2, alignment))


def test_plans_that_cannot_be_laid_out() -> None:
    model = bytes_model([64, 64])
    good = plan_of(model, [["w0"], ["w1"]], 2)
    bad = [
        (replace(good, world_size=0), "at least one rank"),
        (replace(good, units=(Unit(0, "a", ("w0",)), Unit(1, "b", ("w0",)))), "w0 is placed twice"),
        (replace(good, units=(Unit(1, "a", ("w0",)),)), "has index 1 but is unit 0"),
        (replace(good, units=(Unit(0, "a", ("w9",)), Unit(1, "b", ("w1",)))), "no weight 'w9'"),
        (replace(good, num_slots=1), r"2 units and 1 slots"),
    ]
    for plan, message in bad:
        with pytest.raises(SpecError, match=message):
            build_layout(model, plan)


def test_the_digest_sees_every_field() -> None:
    model = bytes_model([64, 640])
    plan = plan_of(model, [["w0"], ["w1"]], 2)
    layout = build_layout(model, plan)
    changed = [
        build_layout(model, replace(plan, world_size=3)),
        build_layout(model, replace(plan, alignment_bytes=512)),
        build_layout(model, plan_of(model, [["w1"], ["w0"]], 2)),
        build_layout(model, plan_of(model, [["w0", "w1"]], 2)),
        build_layout(model_of(WeightSpec("w0", (64,), "int8"), model.weights[1]), plan),
    ]
    assert len({layout.digest, *(other.digest for other in changed)}) == 1 + len(changed)


def test_reserved_bytes_round_each_area_up() -> None:
    model = bytes_model([64, 64, 64])
    layout = build_layout(model, plan_of(model, [["w0"], ["w1"]], 2))
    assert layout.reserved_bytes(4096) == 3 * 4096
    assert layout.reserved_bytes(1) == layout.shard_bytes + layout.slot_bytes + layout.resident_bytes
