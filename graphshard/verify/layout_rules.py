"""R7 and R11: the program against the layout of bytes, and against the weights that the model's segments read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from graphshard.core.layout import Layout, UnitLayout
from graphshard.core.ops import AgLaunch, Gemm
from graphshard.core.program import numbered_segments
from graphshard.core.specs import ModelSpec, SegmentSpec
from graphshard.verify.facts import Facts
from graphshard.verify.report import Violation, op_text


def unit_fits_slot(facts: Facts) -> Iterator[Violation]:
    """R7: every unit fits each slot that it is gathered into."""
    layout, program = facts.layout, facts.program
    if layout is None:
        return
    first: dict[tuple[int, int], int | None] = {
        (unit, slot): None for slot, unit in enumerate(program.entry) if unit is not None
    }
    for index, op in enumerate(program.ops):
        if isinstance(op, AgLaunch):
            first.setdefault((op.unit, op.slot), index)
    units = {unit.unit: unit.num_bytes for unit in layout.units}
    slots = {slot.slot: slot.num_bytes for slot in layout.slots}
    for (unit, slot), where in first.items():
        subject = "entry" if where is None else op_text(program, where)
        if unit not in units or slot not in slots:
            yield Violation(7, where, unit, slot, f"{subject}: the layout has no unit {unit} or no slot {slot}")
        elif units[unit] > slots[slot]:
            text = f"{subject}: unit {unit} has {units[unit]} B, slot {slot} has {slots[slot]} B"
            yield Violation(7, where, unit, slot, text + f"; give slot {slot} {units[unit]} B or use another slot")


def slots_are_apart(facts: Facts) -> Iterator[Violation]:
    """R7: slots are aligned, lie inside the slot window and share no byte; so do the shards in theirs."""
    layout = facts.layout
    if layout is None:
        return
    slots = [(f"slot {slot.slot}", slot.slot, slot.offset, slot.num_bytes) for slot in layout.slots]
    chunks = [(f"unit {unit.unit}'s chunk", None, unit.chunk_offset, unit.chunk_bytes) for unit in layout.units]
    for places, window_bytes in ((slots, layout.slot_bytes), (chunks, layout.shard_bytes)):
        end, before = 0, ""
        for name, slot, offset, num_bytes in sorted(places, key=lambda place: (place[2], place[3])):
            if offset % layout.alignment_bytes:
                text = f"{name} begins at byte {offset}, which is no multiple of {layout.alignment_bytes} B"
                yield Violation(7, None, None, slot, text)
            if offset < end and num_bytes:
                text = f"{name} begins at byte {offset}, inside {before}, which ends at {end}"
                yield Violation(7, None, None, slot, text)
            if offset + num_bytes > window_bytes:
                text = f"{name} ends at byte {offset + num_bytes} of a window of {window_bytes} B"
                yield Violation(7, None, None, slot, text)
            if num_bytes:
                end, before = max(end, offset + num_bytes), name


def copies_fill_unit(facts: Facts) -> Iterator[Violation]:
    """R7: a unit's copies lie inside their rank's chunk and fill the unit, byte for byte."""
    layout = facts.layout
    for unit in () if layout is None else layout.units:
        for problem in _copy_problems(layout, unit):
            yield Violation(7, None, unit.unit, None, f"unit {unit.unit}: {problem}")


def _copy_problems(layout: Layout | None, unit: UnitLayout) -> Iterator[str]:
    assert layout is not None
    if not unit.slices and unit.chunk_bytes * layout.world_size != unit.num_bytes:
        yield f"{layout.world_size} chunks of {unit.chunk_bytes} B are not its {unit.num_bytes} B"
    for number, copy in enumerate(unit.copies):
        begin = copy.source_offset - unit.chunk_offset
        source = begin + (copy.rows - 1) * copy.source_pitch + copy.row_bytes
        target = copy.slot_offset + (copy.rows - 1) * copy.slot_pitch + copy.row_bytes
        if not 0 <= copy.source_rank < layout.world_size:
            yield f"copy {number} reads rank {copy.source_rank} of {layout.world_size}"
        if begin < 0 or source > unit.chunk_bytes:
            yield f"copy {number} reads bytes {begin} to {source} of a chunk of {unit.chunk_bytes} B"
        if copy.slot_offset < 0 or target > unit.num_bytes:
            yield f"copy {number} writes bytes {copy.slot_offset} to {target} of {unit.num_bytes} B"
        due = copy.source_rank * unit.chunk_bytes + begin
        if not unit.slices and (copy.slot_offset != due or (copy.rows > 1 and copy.source_pitch != copy.slot_pitch)):
            yield f"copy {number} brings byte {due} to byte {copy.slot_offset}"
    if unit.slices:
        yield from _slice_problems(layout, unit)
        return
    total = sum(copy.rows * copy.row_bytes for copy in unit.copies)
    if total != unit.num_bytes:
        yield f"its copies move {total} B of {unit.num_bytes} B"
    flat = sorted((copy.slot_offset, copy.row_bytes) for copy in unit.copies if copy.rows == 1)
    for (offset, num_bytes), (following, _) in pairwise(flat):
        if offset + num_bytes > following:
            yield f"two copies write byte {following}"


def _slice_problems(layout: Layout, unit: UnitLayout) -> Iterator[str]:
    """A sliced unit: slices are apart in a chunk, and each copy brings one to its place in its weight, each once."""
    end = 0
    for one in unit.slices:
        if one.offset < end or one.offset % layout.alignment_bytes:
            yield f"its slice of {one.weight} begins at byte {one.offset} of a chunk, where {end} are taken"
        end = max(end, one.offset + one.num_bytes)
    if end > unit.chunk_bytes:
        yield f"its slices end at byte {end} of a chunk of {unit.chunk_bytes} B"
    if [one.weight for one in unit.slices] != [view.weight for view in unit.views]:
        yield "its slices are not of its weights"
        return
    due = Counter(
        (rank, unit.chunk_offset + one.offset, view.offset + rank * one.num_bytes, one.num_bytes)
        for rank in range(layout.world_size)
        for one, view in zip(unit.slices, unit.views, strict=True)
    )
    made = Counter((copy.source_rank, copy.source_offset, copy.slot_offset, copy.row_bytes) for copy in unit.copies)
    for rank, source, target, num_bytes in due - made:
        yield f"no copy brings rank {rank}'s {num_bytes} B from byte {source} to byte {target}"
    for rank, source, target, num_bytes in made - due:
        yield f"a copy brings {num_bytes} B from byte {source} of rank {rank} to byte {target}, where no slice of it is"
    if any(copy.rows != 1 for copy in unit.copies):
        yield "a copy of a slice has several rows"
    for one, view in zip(unit.slices, unit.views, strict=True):
        if one.num_bytes * layout.world_size != view.num_bytes:
            yield f"{layout.world_size} slices of {one.num_bytes} B are not the {view.num_bytes} B of {view.weight}"


def reads_inside_unit(facts: Facts) -> Iterator[Violation]:
    """R11: a unit's views are aligned, lie inside it and share no byte."""
    layout = facts.layout
    for unit in () if layout is None else layout.units:
        assert layout is not None
        end, before = 0, ""
        for view in sorted(unit.views, key=lambda v: (v.offset, v.num_bytes)):
            place = f"weight {view.weight} is bytes {view.offset} to {view.offset + view.num_bytes} of unit {unit.unit}"
            if view.offset < 0 or view.offset + view.num_bytes > unit.num_bytes:
                yield Violation(11, None, unit.unit, None, f"{place}, which has {unit.num_bytes} B")
            if view.offset % layout.alignment_bytes:
                text = f"{place}, which begins off {layout.alignment_bytes} B"
                yield Violation(11, None, unit.unit, None, text)
            if view.offset < end and view.num_bytes:
                yield Violation(11, None, unit.unit, None, f"{place}, inside weight {before}")
            if view.num_bytes:
                end, before = max(end, view.offset + view.num_bytes), view.weight


def views_are_the_weights(facts: Facts) -> Iterator[Violation]:
    """R11: a weight's place has its shape, dtype, strides and bytes."""
    model, layout = facts.model, facts.layout
    if model is None or layout is None:
        return
    weights = {weight.name: weight for weight in model.weights}
    placed = [(unit.unit, view) for unit in layout.units for view in unit.views]
    for unit, view in [*placed, *((None, view) for view in layout.resident)]:
        weight = weights.get(view.weight)
        if weight is None:
            yield Violation(11, None, unit, None, f"weight {view.weight} has a place, and the model has no such weight")
            continue
        found = (view.num_bytes, view.shape, view.dtype, view.strides)
        if found != (weight.num_bytes, weight.shape, weight.dtype, weight.strides):
            text = (
                f"weight {weight.name} has a place of {view.num_bytes} B for {view.dtype} {list(view.shape)}, strides "
                f"{view.strides}; it is {weight.num_bytes} B of {weight.dtype} {list(weight.shape)}, {weight.strides}"
            )
            yield Violation(11, None, unit, None, text)


def segments_read_their_units(facts: Facts) -> Iterator[Violation]:
    """R11: the weights of a gemm's segments lie in the units that the op names, or are resident."""
    model, layout, program = facts.model, facts.layout, facts.program
    if model is None or layout is None:
        return
    unit_of = {view.weight: unit.unit for unit in layout.units for view in unit.views}
    resident = {view.weight for view in layout.resident}
    segments = numbered_segments(model)
    sliced = {weight for block in program.blocks for weight in _slices(model, block.index)}
    for index, op in enumerate(program.ops):
        if not isinstance(op, Gemm):
            continue
        for weight in _weights(segments[op.begin : op.end]):
            if weight in sliced and op.begin >= program.num_segments:
                continue  # of this rank's shard: `block_rules.blocks_are_the_models`
            if weight not in unit_of and weight not in resident and weight not in model.borrowed:
                text = f"{op_text(program, index)} reads weight {weight}, which the layout does not place"
                yield Violation(11, index, None, None, text)
            elif weight in unit_of and unit_of[weight] not in op.units:
                text = f"{op_text(program, index)} reads weight {weight}, but does not name its unit {unit_of[weight]}"
                yield Violation(11, index, unit_of[weight], None, text)


def folds_read_no_unit(facts: Facts) -> Iterator[Violation]:
    """R11: what runs between steps reads no unit: slots hold whatever steps left there."""
    model, layout = facts.model, facts.layout
    if model is None or layout is None:
        return
    unit_of = {view.weight: unit.unit for unit in layout.units for view in unit.views}
    for fold in model.folds:
        for weight in fold.reads:
            if weight in unit_of:
                text = f"fold {fold.path} reads weight {weight}, which lies in unit {unit_of[weight]}: keep it resident"
                yield Violation(11, None, unit_of[weight], None, text)


def _slices(model: ModelSpec, block: int) -> tuple[str, ...]:
    """The weights of a block; none if there is no such block."""
    return model.blocks[block].weights if 0 <= block < len(model.blocks) else ()


def _weights(segments: Sequence[SegmentSpec]) -> Iterator[str]:
    for segment in segments:
        yield from segment.reads
