"""Recipes between the forms in which Kimi K3's weights are kept: fused, unfused, and as published.

Published tensors are unfused, and routed experts stand alone there (`experts.7.w1.weight`). Fused weights are made of
them, one after the other; unfused ones can be cut out of fused ones. All of it is a mapping of bytes, but for weights
that a dual model stores the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.recipe import Concat, Read, Recipe, Reinterpret, Slice, Transpose
from graphshard.models.kimi_k3.model import KimiK3


def kimi_k3_recipes(model: KimiK3, tensors: Collection[str]) -> dict[str, Recipe]:
    """How to make the weights of `model` from a checkpoint that has `tensors`, in whichever form they are.

    Raises:
        LoadError: they are in neither form; it names weights that cannot be made.
    """
    fused = KimiK3(model.config, 1, 1, fused=True)
    inside, made_of, transposed = _places(fused), model.pieces, model.transposed
    recipes: dict[str, Recipe] = {}
    missing = []
    for weight in model.spec().weights:
        pieces = made_of[weight.name]
        if weight.name in tensors:
            if weight.name in transposed:
                recipes[weight.name] = Transpose(Read(weight.name))
            continue
        if all(piece.name in tensors for piece in pieces):
            recipes[weight.name] = joined(weight, pieces)
        elif len(pieces) == 1 and inside[pieces[0].name][0] in tensors:
            holder, begin, end = inside[pieces[0].name]
            recipes[weight.name] = Slice(Read(holder), 0, begin, end)
        else:
            missing.append(weight.name)
    if missing:
        raise LoadError(
            f"{len(missing)} weights of kimi_k3 are neither among the checkpoint's {len(tensors)} tensors nor made of "
            f"them, {missing[0]} for one: give a checkpoint with the names of `KimiK3.pieces`, or a fused one"
        )
    return recipes


def joined(weight: WeightSpec, pieces: tuple[WeightSpec, ...]) -> Recipe:
    """`weight` from its published pieces."""
    reads = tuple(Read(piece.name) for piece in pieces)
    rows: Recipe = reads[0] if len(reads) == 1 else Concat(reads)
    return rows if len(weight.shape) == len(pieces[0].shape) else Reinterpret(rows, weight.shape, weight.dtype)


def _places(model: KimiK3) -> Mapping[str, tuple[str, int, int]]:
    """For each published tensor the weight of `model` that holds it, and its rows there."""
    found = {}
    for weight, pieces in model.pieces.items():
        row = 0
        for piece in pieces:
            found[piece.name] = (weight, row, row + piece.shape[0])
            row += piece.shape[0]
    return found
