"""The nodes of recipes: how a weight is made of a checkpoint's tensors, for `compile(recipes=...)`."""

from __future__ import annotations

from graphshard.load.recipe import (
    Cast,
    Concat,
    PackInt4,
    QuantizeFp8,
    Read,
    Recipe,
    Recipes,
    Reinterpret,
    RequantizeUe8m0,
    ScaleOf,
    Slice,
    Transpose,
)

__all__ = [
    "Cast",
    "Concat",
    "PackInt4",
    "QuantizeFp8",
    "Read",
    "Recipe",
    "Recipes",
    "Reinterpret",
    "RequantizeUe8m0",
    "ScaleOf",
    "Slice",
    "Transpose",
]
