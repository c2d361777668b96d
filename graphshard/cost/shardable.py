"""Weights that may be sharded, one by one and by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.errors import SpecError
from graphshard.core.sizes import align_up
from graphshard.core.specs import ModelSpec
from graphshard.cost.facts import ModelFacts


@dataclass(frozen=True, slots=True)
class Shardable:
    """A weight that may be sharded; `num_bytes` are padded to the alignment. Segments `[begin, end)` need it."""

    name: str
    num_bytes: int
    own_bytes: int
    """Without padding."""
    layer: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer that may be sharded, by index, in reading order. Layers of one kind are alike."""

    layer: int
    begin: int
    """The first segment that reads one of them."""
    weights: tuple[int, ...]
    kind: int


def shardable_weights(
    model: ModelSpec, facts: ModelFacts, alignment_bytes: int
) -> tuple[tuple[Shardable, ...], tuple[tuple[str, str], ...]]:
    """Weights that may be sharded, in reading order; and (weight, reason) of replicated ones that may not.

    Raises:
        SpecError: there are none.
    """
    readers: dict[str, list[int]] = {}
    runs: dict[int | None, int] = {}  # stretches of segments of a layer
    for index, segment in enumerate(model.segments):
        for name in segment.reads:
            readers.setdefault(name, []).append(index)
        if index == 0 or model.segments[index - 1].layer != segment.layer:
            runs[segment.layer] = runs.get(segment.layer, 0) + 1
    found: list[Shardable] = []
    kept: list[tuple[str, str]] = []
    for name in facts.replicated:
        read = readers.get(name, [])
        layers = {model.segments[index].layer for index in read}
        layer = next(iter(layers), None)
        size = model.weight(name).num_bytes
        if name in model.why_whole:
            kept.append((name, f"it is {model.why_whole[name]}"))
        elif len(layers) != 1 or layer is None:
            kept.append((name, "it is not read in exactly one layer"))
        elif runs[layer] > 1:
            kept.append((name, f"layer {layer} runs in {runs[layer]} pieces"))
        elif size == 0:
            kept.append((name, "it has no bytes"))
        else:
            padded = align_up(size, alignment_bytes)
            found.append(Shardable(name, padded, size, layer, read[0], read[-1] + 1))
    if not found:
        raise SpecError(
            f"no weight of {model.name} may be sharded under this deployment: nothing is replicated in a layer"
        )
    position = {weight.name: index for index, weight in enumerate(model.weights)}
    found.sort(key=lambda weight: (weight.begin, position[weight.name]))
    return tuple(found), tuple(kept)


def layers_of(weights: Sequence[Shardable]) -> tuple[LayerWeights, ...]:
    """The weights by their layers, in order."""
    by_layer: dict[int, list[int]] = {}
    for index, weight in enumerate(weights):
        by_layer.setdefault(weight.layer, []).append(index)
    kinds: dict[tuple[tuple[int, int, int], ...], int] = {}
    found = []
    for layer, members in by_layer.items():
        begin = weights[members[0]].begin
        alike = tuple((weights[i].num_bytes, weights[i].begin - begin, weights[i].end - begin) for i in members)
        found.append(LayerWeights(layer, begin, tuple(members), kinds.setdefault(alike, len(kinds))))
    return tuple(found)
