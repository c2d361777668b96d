"""What `bench dual` predicts by when nobody gives a machine's figures: durations that its own run measured.

Gemms of exactly the shapes that steps have, gathers of a block, and the exchange of blocks that compute almost nothing;
other weights of a step come between two uses of one, as in the step, or nothing does, as right after a gather. All
ranks measure at once, and go by the median, so that they predict, and choose, alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphshard.bench.calibrate import GemmShape, gemm_times
from graphshard.bench.calibrated import COPIED_TWICE
from graphshard.bench.gather import GatherRequest, measure_gather
from graphshard.bench.stats import quantile
from graphshard.comm.group import Group
from graphshard.cost.dual import Block
from graphshard.cost.hardware import HardwareSpec, Link, Measured

BY_RUN = "durations that this run measured: single gemms, one gather, an exchange without compute"
NUM_REPEATS = 8
MANY_RANKS = 4096
"""Processes of one machine map each other's memory."""


def gemm_shapes(block: Block, tokens: Sequence[int], world_size: int) -> list[GemmShape]:
    """All gemms of steps of `tokens` a rank: of whole weights for its own, of slices for those of all ranks."""
    found: dict[GemmShape, None] = {}
    for here in tokens:
        for gemm in block.gemms:
            n = gemm.n // world_size if gemm.split == "column" else gemm.n
            k = gemm.k // world_size if gemm.split == "row" else gemm.k
            found[here, gemm.n, gemm.k, gemm.dtype] = None
            found[here * world_size, n, k, gemm.dtype] = None
    return list(found)


def measure_figures(
    group: Group, block: Block, tokens: Sequence[int], transport: str, exchange_us: Callable[[], float], l3_bytes: int
) -> dict[str, Any]:
    """Medians over ranks (collective), in us.

    `gemm` [m, n, k, dtype, us], `gemm_cached` with the weight read just before; of a block `gather_us`, and
    `exchange_us` both ways; `cache_bytes` that each rank's gathers find on this machine.
    """
    step_bytes = block.num_bytes * block.layers
    cold, hot = gemm_times(group, gemm_shapes(block, tokens, group.world_size), NUM_REPEATS, step_bytes)
    rows = measure_gather(group, GatherRequest((block.num_bytes,), (), NUM_REPEATS, step_bytes, transport=transport))
    mine = {
        "gemm": [[*shape, us] for shape, us in cold.items()],
        "gemm_cached": [[*shape, us] for shape, us in hot.items()],
        "gather_us": float(str(rows[0]["us"])),
        "exchange_us": exchange_us(),
    }
    told: list[dict[str, Any]] = [value for value, _ in group.all_gather(mine, name="figures")]  # type: ignore[misc]
    return {
        **{name: _median_rows([one[name] for one in told]) for name in ("gemm", "gemm_cached")},
        "gather_us": _median([one["gather_us"] for one in told]),
        "exchange_us": _median([one["exchange_us"] for one in told]),
        "cache_bytes": l3_bytes // (COPIED_TWICE * group.world_size),
    }


def hardware_of(figures: Mapping[str, Any], block: Block, world_size: int, transport: str) -> HardwareSpec:
    """The machine that was measured. A host has one link: activations go as fast as gathers do."""
    rates = [2 * m * n * k / us for m, n, k, _, us in figures["gemm"]]
    streams = [n * k / us for m, n, k, _, us in figures["gemm"]]
    dtype = block.gemms[0].dtype
    rate = block.num_bytes / figures["gather_us"] * 1e6
    measured: list[Measured] = []
    for what in ("gemm", "gemm_cached"):
        measured += [Measured(what, (m, n, k, kind), us) for m, n, k, kind, us in figures[what]]
    measured.append(Measured("gather", (transport, block.num_bytes, world_size), figures["gather_us"]))
    elements = block.num_bytes / sum(gemm.n * gemm.k for gemm in block.gemms)
    return HardwareSpec(
        name="this run",
        kind="host",
        memory_bytes=2**40,
        memory_bytes_per_s=max(streams) * elements * 1e6,
        memory_efficiency=1.0,
        links=(Link(transport, rate, 0.0),),
        derate=(),
        activation_bytes_per_s=rate,
        activation_t0_us=figures["exchange_us"] / 2,
        peak_flops=((dtype, max(rates) * 1e6),),
        gemm_efficiency=1.0,
        kernel_us=0.0,
        launch_us=0.0,
        launch_us_per_node=0.0,
        max_domain=MANY_RANKS,
        cache_bytes=figures["cache_bytes"],
        measured=tuple(measured),
        sources=(),
    )


def _median_rows(ranks: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """[m, n, k, dtype, us] of all ranks, which have the same shapes."""
    return [[*rows[0][:4], _median([row[4] for row in rows])] for rows in zip(*ranks, strict=True)]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return quantile(ordered, 0.5)
