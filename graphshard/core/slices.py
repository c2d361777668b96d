"""Whether weights can lie in slices: rank r keeps the r-th of world_size equal ranges of rows of each, and no more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graphshard.core.sizes import has_narrow_elements
from graphshard.core.specs import WeightSpec

SLICE_BYTES_MULTIPLE = 16
"""Of every slice: a gather then reads and writes whole vectors, and no slice begins inside another's."""


def why_not_sliced(weights: Sequence[WeightSpec], world_size: int) -> str:
    """Why `weights` of one block cannot lie in slices of `world_size` ranks, one clause; empty if they can.

    A row is everything with one index of the first dimension, and stands for one feature inside the block.
    """
    if world_size < 2:
        return "one rank keeps every row"
    num_rows = weights[0].shape[0] if weights[0].shape else 0
    for weight in weights:
        if not math.prod(weight.shape) or not weight.shape:
            return f"{weight.name} {list(weight.shape)} has no rows to cut"
        if weight.strides is not None:
            return f"{weight.name} is stored with strides {list(weight.strides)}: its rows are no ranges of bytes"
        if has_narrow_elements(weight.dtype):
            return f"{weight.name} is {weight.dtype}, of elements below a byte"
        if weight.shape[0] != num_rows:
            return f"{weight.name} has {weight.shape[0]} rows, {weights[0].name} has {num_rows}"
        if num_rows % world_size:
            return f"{num_rows} rows of {weight.name} are no multiple of {world_size} ranks"
        size = weight.num_bytes // world_size
        if size % SLICE_BYTES_MULTIPLE:
            return f"a slice of {weight.name} is {size} B, no multiple of {SLICE_BYTES_MULTIPLE} B"
    return ""
