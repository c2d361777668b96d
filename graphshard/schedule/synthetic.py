"""Models without a model: specs of a given size, for printing programs and timing the compiler."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec

LLAMA_WEIGHTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("input_norm", (4096,)),
    ("q_proj", (4096, 4096)),
    ("k_proj", (1024, 4096)),
    ("v_proj", (1024, 4096)),
    ("o_proj", (4096, 4096)),
    ("post_norm", (4096,)),
    ("gate_proj", (14336, 4096)),
    ("up_proj", (14336, 4096)),
    ("down_proj", (4096, 14336)),
)
"""A layer of a llama with 8 billion parameters: name and shape of each weight, in reading order."""

ONE_WEIGHT: tuple[tuple[str, tuple[int, ...]], ...] = (("proj", (4096, 4096)),)


def synthetic_model(
    num_layers: int,
    weights: Sequence[tuple[str, tuple[int, ...]]] = ONE_WEIGHT,
    dtype: str = "bfloat16",
    vocab_size: int = 0,
) -> ModelSpec:
    """A model of `num_layers` equal layers, one segment a weight.

    With `vocab_size` an embedding and a head lie outside the layers; their width is the last weight's first dimension.
    """
    if num_layers < 0:
        raise SpecError(f"{num_layers} layers are refused: layers start at 0")
    specs: list[WeightSpec] = []
    segments: list[SegmentSpec] = []

    def add(layer: int | None, name: str, shape: tuple[int, ...]) -> None:
        weight = name if layer is None else f"layers.{layer}.{name}"
        specs.append(WeightSpec(weight, shape, dtype))
        segments.append(SegmentSpec(name, layer, (weight,)))

    hidden = weights[-1][1][0] if weights else 1
    if vocab_size:
        add(None, "embed", (vocab_size, hidden))
    for layer in range(num_layers):
        for name, shape in weights:
            add(layer, name, shape)
    if vocab_size:
        add(None, "head", (vocab_size, hidden))
    return ModelSpec(f"synthetic-{num_layers}", tuple(specs), tuple(segments))
