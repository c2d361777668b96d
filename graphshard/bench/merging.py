"""What `tune` says of merged collectives: pairs of blocks that could, and what one would take beside two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphshard.bench.gather import GatherRequest, measure_gather
from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec
from graphshard.cost.merged import Rates, merge_pairs, merge_times, rates_between, why_no_pair

SIZES = (64 * 2**10, 2 * 2**20)
COLD_BYTES = 16 * 2**20
NUM_REPEATS = 9


def measured_rates(group: Group, transport: str) -> Rates:
    """Of the ranks of a host, from two gathers (collective)."""
    request = GatherRequest(SIZES, (), NUM_REPEATS, COLD_BYTES, transport=transport)
    rows = {int(str(row["num_bytes"])): float(str(row["us"])) for row in measure_gather(group, request)}
    few, many = (min(rows), rows[min(rows)]), (max(rows), rows[max(rows)])
    return rates_between(few, many)


def merging_note(model: ModelSpec, tokens: Sequence[int], world_size: int, rates: Rates | None) -> dict[str, Any]:
    """`pairs` of blocks by name, `why_none`, and `predicted` {tokens_per_rank, separate_us, merged_us}."""
    block = model.blocks[0] if model.blocks else None
    times = (
        [merge_times(block, n, world_size, rates) for n in tokens] if block is not None and rates is not None else []
    )
    return {
        "pairs": [[one.name, other.name] for one, other in merge_pairs(model)],
        "why_none": why_no_pair(model),
        "predicted": [
            {"tokens_per_rank": one.tokens_per_rank, "separate_us": one.separate_us, "merged_us": one.merged_us}
            for one in times
        ],
    }
