"""The largest magnitudes of a weight of which each rank has rows: what online FP8 is scaled by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from graphshard.comm.group import Group
from graphshard.core.errors import SpecError
from graphshard.runtime.engine.cut import ShardId
from graphshard.runtime.engine.rows import RowSlice
from graphshard.runtime.weights.quantize import amax_of_rows

AmaxPer = Literal["tensor", "channel"]


def combined_amax(
    name: str, row_of: Callable[[str], RowSlice], per: AmaxPer, shard_id: ShardId | None, group: Group
) -> Tensor:
    """See `Prepared.combined_amax` (collective). `row_of` finds a weight, or raises."""
    local = group.agree(f"amax of {name}", lambda: _local(row_of(name), per, shard_id))
    if per == "channel":
        return local
    largest = torch.zeros(1, dtype=torch.float32, device="cpu") if not local.numel() else local.max().reshape(1)
    told = group.all_gather(largest.numpy().tobytes(), name=f"amax of {name}")
    values = [torch.frombuffer(bytearray(value), dtype=torch.float32) for value, _ in told if isinstance(value, bytes)]
    return torch.cat(values).max().reshape(1)


def _local(slice_: RowSlice, per: AmaxPer, shard_id: ShardId | None) -> Tensor:
    """Of each of this rank's rows, or of those that belong to one part."""
    if per not in ("tensor", "channel"):
        raise SpecError(f"amax per {per!r} is unknown; known: tensor, channel")
    rows = slice_.standing()
    if shard_id is not None:
        begin, end = slice_.parts.rows_of(shard_id)
        rows = rows[max(0, begin - slice_.begin) : max(0, min(end, slice_.end) - slice_.begin)]
    width = rows[0].numel() if rows.shape[0] else 0
    return amax_of_rows(rows.reshape(rows.shape[0], width), f"weight {slice_.spec.name}")
