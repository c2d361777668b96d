"""Blocks in specs and plans: what is refused, and texts that only they change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from graphshard.core.errors import SpecError
from graphshard.core.plan import Plan, Unit
from graphshard.core.specs import BlockSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec

WEIGHTS = tuple(WeightSpec(name, (8, 4), "float32") for name in ("norm", "gate", "up", "down", "other"))


def block(**changes: object) -> BlockSpec:
    """Segments 1 and 2 of `model`."""
    spec = BlockSpec(
        name="mlp",
        layer=0,
        begin=1,
        end=3,
        columns=("gate", "up"),
        rows=("down",),
        width_in=4,
        width_out=4,
        dtype="float32",
        prepare=SegmentSpec("tp_prepare", 0, ("norm",)),
        compute=SegmentSpec("tp_compute", 0, ("gate", "up", "down")),
        finish=SegmentSpec("tp_finish", 0, ()),
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def named(name: str, **changes: object) -> BlockSpec:
    """`block` with names of its own."""
    parts = {
        "prepare": SegmentSpec(f"{name}_prepare", 0, ("norm",)),
        "compute": SegmentSpec(f"{name}_compute", 0, ("gate", "up", "down")),
        "finish": SegmentSpec(f"{name}_finish", 0, ()),
    }
    return block(name=name, **(parts | changes))


def model(*blocks: BlockSpec) -> ModelSpec:
    """Four segments of one layer."""
    segments = (
        SegmentSpec("before", 0, ("other",)),
        SegmentSpec("gate_up", 0, ("norm", "gate", "up")),
        SegmentSpec("down", 0, ("down",)),
        SegmentSpec("after", 0, ("other",)),
    )
    return ModelSpec("small", WEIGHTS, segments, blocks=blocks)


def plan(**changes: object) -> Plan:
    """A plan with nothing in it but `changes`."""
    bare = Plan("small", 2, (), (), (), 0, 0, "inside", "pull", "cooperative", (StepShape(1),), "placed")
    return dataclasses.replace(bare, **changes)  # type: ignore[arg-type]


def test_block_weights_lie_columns_first() -> None:
    assert block().weights == ("gate", "up", "down")


def test_texts_without_blocks_do_not_know_of_them() -> None:
    assert "block" not in model().text()
    assert "modes" not in plan().text() and "block" not in plan().text()
    assert "is_sliced" not in plan(units=(Unit(0, "mlp", ("gate",)),)).text()


def test_texts_tell_blocks_units_and_modes_apart() -> None:
    text = model(block()).text()
    assert "    BlockSpec name=mlp layer=0 begin=1 end=3 columns=[gate,up] rows=[down] width_in=4 width_out=4" in text
    assert "SegmentSpec name=tp_compute layer=0 reads=[gate,up,down]" in text
    sliced = plan(units=(Unit(0, "mlp", ("gate",), is_sliced=True),), modes=((StepShape(4, 2), ("gather",)),))
    assert "is_sliced=true" in sliced.text()
    assert "modes=[[StepShape(batch_size=4,tokens_per_sequence=2),[gather]]]" in sliced.text()
    texts = {
        made.digest
        for made in (
            plan(),
            plan(modes=((StepShape(1), ("gather",)),)),
            plan(modes=((StepShape(1), ("tensor_parallel",)),)),
            plan(modes=((StepShape(2), ("gather",)),)),
            plan(block_reasons=("why",)),
        )
    }
    assert len(texts) == 5
    assert model(block()).digest != model(block(width_in=8)).digest


def test_modes_are_found_by_step_shape() -> None:
    made = plan(modes=((StepShape(1), ("gather", "tensor_parallel")), (StepShape(2), ("gather", "gather"))))
    assert made.modes_of(StepShape(1)) == ("gather", "tensor_parallel")
    with pytest.raises(SpecError, match="no modes for step shape 3x1; it has some for 1x1, 2x1"):
        made.modes_of(StepShape(3))
    assert plan().modes_of(StepShape(3)) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: block(begin=3), "segments"),
        (lambda: block(columns=()), "each once"),
        (lambda: block(rows=("gate",)), "each once"),
        (lambda: block(width_out=0), "both start at 1"),
        (lambda: block(dtype="int4x"), "unknown dtype"),
        (lambda: model(block(end=5)), "the model has 4 segments"),
        (lambda: model(block(), named("second", begin=2)), "the block before ends at 3"),
        (lambda: model(block(begin=2)), "gate_up reads as a whole"),
        (lambda: model(block(prepare=SegmentSpec("tp_prepare", 0, ("gate",)))), "layers.0.tp_prepare reads as a whole"),
        (lambda: model(block(prepare=SegmentSpec("tp_prepare", 1, ()))), "not of its layer 0"),
        (lambda: model(block(compute=SegmentSpec("tp_compute", 0, ("gate",)))), "does not read its weights"),
        (lambda: model(block(compute=SegmentSpec("tp_compute", 0, ("gate", "up", "down", "x")))), "unknown weights"),
        (lambda: model(block(finish=SegmentSpec("after", 0, ()))), "two segments are called layers.0.after"),
    ],
)
def test_what_is_no_block_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()


def test_a_fold_reads_no_slice() -> None:
    spec = model(block())
    with pytest.raises(SpecError, match="which fold reads as a whole"):
        dataclasses.replace(spec, folds=(SegmentSpec("fold", None, ("down",)),))


def test_two_blocks_of_one_name_are_refused() -> None:
    second = block(
        begin=3,
        end=4,
        columns=("other",),
        rows=("norm",),
        prepare=SegmentSpec("p", 0, ()),
        compute=SegmentSpec("c", 0, ("other", "norm")),
        finish=SegmentSpec("f", 0, ()),
    )
    segments = (SegmentSpec("before", 0, ()), *model().segments[1:3], SegmentSpec("after", 0, ("other",)))
    first = block(prepare=SegmentSpec("tp_prepare", 0, ()))
    segments = (segments[0], SegmentSpec("gate_up", 0, ("gate", "up")), *segments[2:])
    with pytest.raises(SpecError, match="two blocks have one name"):
        ModelSpec("small", WEIGHTS, segments, blocks=(first, second))
    ModelSpec("small", WEIGHTS, segments, blocks=(first, dataclasses.replace(second, name="second")))
