"""A model with two kinds of blocks, and measurements of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphshard.core.specs import BlockSpec, DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.tuned import MODES, Tuned, TunedRow, kinds_of

HOST = DeviceSpec("host", "some cpu", memory_bytes=2**40)
NARROW, WIDE = (64, 32), (128, 32)


def blocks_model(*, spaced: bool = True) -> ModelSpec:
    """Layers 0 and 1 have a narrow block each, layer 2 a wide one; with `spaced` another segment before each."""
    weights: list[WeightSpec] = []
    segments: list[SegmentSpec] = []
    blocks: list[BlockSpec] = []
    for layer, shape in enumerate((NARROW, NARROW, WIDE)):
        at = f"layers.{layer}"
        names = (f"{at}.gate", f"{at}.down")
        weights += [WeightSpec(name, shape, "float32") for name in (*names, f"{at}.mixer")]
        if spaced:
            segments.append(SegmentSpec("mixer", layer, (f"{at}.mixer",)))
        begin = len(segments)
        segments += [SegmentSpec("gate", layer, names[:1]), SegmentSpec("down", layer, names[1:])]
        prepare, compute, finish = (SegmentSpec(f"mlp_{what}", layer, ()) for what in ("prepare", "compute", "finish"))
        block = BlockSpec(
            f"{at}.mlp", layer, begin, len(segments), names[:1], names[1:], shape[1], shape[1], "float32",
            prepare, replace(compute, reads=names), finish,
        )  # fmt: skip
        blocks.append(block)
    return ModelSpec("three-blocks", tuple(weights), tuple(segments), blocks=tuple(blocks))


def rows_of(kind: str, times: dict[int, tuple[float, float]]) -> tuple[TunedRow, ...]:
    """Rows with these (gather, tensor_parallel) ms by tokens of a rank."""
    return tuple(
        TunedRow(kind, tokens, mode, ms, 0.9 * ms, 1.1 * ms, 5)
        for tokens, pair in times.items()
        for mode, ms in zip(MODES, pair, strict=True)
    )


def tuned_of(model: ModelSpec, times: dict[int, tuple[float, float]], **changes: Any) -> Tuned:
    """Times of every kind of `model`'s blocks, over two ranks of HOST."""
    kinds = tuple(kinds_of(model))
    whole = Tuned(
        model=model.name,
        model_digest=model.digest,
        world_size=2,
        transport="pull",
        device_kind="host",
        device="some cpu",
        settings={"units": "weight", "prefetch_depth": 0, "executor": "cooperative", "num_layers": 2},
        kinds=kinds,
        tokens=tuple(times),
        rows=tuple(row for kind in kinds for row in rows_of(kind, times)),
        notes={"machine": {"cores": 2}},
    )
    return replace(whole, **changes)
