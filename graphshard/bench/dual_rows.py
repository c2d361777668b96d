"""Rows of `bench dual` from what ranks measured, and where two ways cross. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from typing import Any

from graphshard.bench.stats import summarize

MODES = ("replicated", "gather", "tensor_parallel", "chosen")
SLICED = ("gather", "tensor_parallel")
"""The two ways to use one stored shard."""
GOOD = 1.05
"""Of the better of the two: what is chosen should take no longer."""
Measured = Mapping[str, Any]
"""What one rank measured, see `graphshard.bench.dual.measure_dual`; or a row."""


def tokens_per_rank(tokens_per_group: int, world_size: int) -> int:
    """As many on every rank: rounded up, so that a group has at least as many as were asked for."""
    return -(-tokens_per_group // world_size)


def dual_rows(launches: Sequence[Sequence[Measured]], tokens_per_group: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each number of tokens and mode; `launches` has what each rank of each launch measured.

    Times are of all ranks' steps of all launches together; `x_better` is a mode's median beside the better of gather
    and tensor_parallel.
    """
    rows, ranks = [], [rank for launch in launches for rank in launch]
    for tokens in tokens_per_group:
        here = tokens_per_rank(tokens, len(launches[0]))
        medians: dict[str, float] = {}
        found = []
        for mode in MODES:
            told = [rank[str(here)][mode] for rank in ranks]
            samples = [ms for one in told for ms in one["samples_ms"]]
            summary = summarize(samples)
            medians[mode] = summary.median
            found.append(
                {
                    "tokens_per_group": tokens,
                    "tokens_per_rank": here,
                    "mode": mode,
                    "runs": told[0]["runs"],
                    "median_ms": summary.median,
                    "p10_ms": summary.p10,
                    "p90_ms": summary.p90,
                    "n": summary.n,
                    "identical": all(one["difference"] == 0 for one in told),
                    "difference": max(one["difference"] for one in told),
                    "agrees": all(one["agrees"] for one in told),
                    "launches": len(launches),
                    "samples_ms": [[rank[str(here)][mode]["samples_ms"] for rank in launch] for launch in launches],
                }
            )
        better = min(medians[mode] for mode in SLICED)
        rows += [{**row, "x_better": row["median_ms"] / better} for row in found]
    return rows


def measured_crossover(rows: Sequence[Measured]) -> dict[str, Any]:
    """Where gather becomes no slower than tensor_parallel, going by medians.

    `tokens_per_group` is where the ratio of both would be 1, linear in logarithms between the two measured numbers in
    `between`; None if it is not crossed upwards of the first: then `between` says up to where, or down to where, it is.
    """
    ratios: dict[int, dict[str, float]] = {}
    for row in rows:
        ratios.setdefault(row["tokens_per_group"], {})[row["mode"]] = row["median_ms"]
    points = sorted((tokens, one["gather"] / one["tensor_parallel"]) for tokens, one in ratios.items())
    last = next((i for i in reversed(range(len(points))) if points[i][1] > 1), None)
    if last is None:
        return {"tokens_per_group": None, "between": [0, points[0][0]]}
    if last + 1 == len(points):
        return {"tokens_per_group": None, "between": [points[last][0], None]}
    (low, above), (high, below) = points[last], points[last + 1]
    at = log(above) / (log(above) - log(below))
    return {"tokens_per_group": round(exp(log(low) + at * (log(high) - log(low)))), "between": [low, high]}


def worst_choice(rows: Sequence[Measured]) -> Measured:
    """The row of what was chosen that is furthest from the better of gather and tensor_parallel."""
    return max((row for row in rows if row["mode"] == "chosen"), key=lambda row: float(row["x_better"]))
