"""From what ranks measured to a hardware file's figures. Plain Python.

Every figure is the mean over ranks. Segments and gathers are those of real steps, so for the model and the batch sizes
that were calibrated they go before any formula; formulas serve all else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphshard.bench.calibrate import FAN_OUT_BYTES
from graphshard.cost.hardware import HardwareSpec, Link, Measured, MeasuredWhat
from graphshard.cost.host_step import THREADED_PULL

Told = Mapping[str, Any]
"""What `cli.calibrate_rank.calibrate` returned on one rank."""

MAX_RANKS = 4096
"""Processes of one machine map each other's memory: there is no domain to end at."""
COPIED_TWICE = 2
"""A gather reads its source through the cache that it fills."""
MIN_RATE = 1.0
SEGMENTS_OF: dict[str, MeasuredWhat] = {"replicated": "segment", "gathered": "segment_cached"}
"""What the segments of a run's steps are."""


def host_hardware(ranks: Sequence[Told], machine: Mapping[str, Any], memory_bytes: int) -> HardwareSpec:
    """The machine that `ranks` measured; `machine` as `report.machine.machine_facts` gives it."""
    world_size = len(ranks)
    launch = _launch(ranks)
    handoff = max(0.0, launch["threaded"] - launch["cooperative"])
    t0 = launch["cooperative"]
    sizes = {int(size): _mean(ranks, "copy_us", size) for size in ranks[0]["copy_us"]}
    rates = {size: size / max(us - t0, 1e-3) * 1e6 for size, us in sizes.items()}
    best = max(rates.values())
    gemms, cached = _gemms(ranks, "gemm"), _gemms(ranks, "gemm_cached")
    peaks = _peaks(gemms)
    compute, copy = (_mean(ranks, "contention", what) for what in ("compute", "copy"))
    l3 = int(machine.get("l3_bytes") or 0)
    measured = [*_segments(ranks), *_gathers(ranks, world_size, handoff)]
    measured += [Measured("gemm", key, us) for key, us in gemms.items()]
    measured += [Measured("gemm_cached", key, us) for key, us in cached.items()]
    return HardwareSpec(
        name="host",
        kind="host",
        memory_bytes=memory_bytes,
        memory_bytes_per_s=_weight_rate(gemms, max),
        memory_efficiency=1.0,
        links=(Link("pull", best, t0), Link(THREADED_PULL, best, t0 + handoff)),
        derate=tuple((size // world_size, min(1.0, rate / best)) for size, rate in sorted(rates.items())),
        activation_bytes_per_s=best,
        activation_t0_us=t0,
        peak_flops=tuple(peaks.items()),
        gemm_efficiency=1.0,
        kernel_us=launch["op"],
        launch_us=_mean(ranks, "launch", "one_us", "cooperative"),
        launch_us_per_node=launch["op"],
        max_domain=MAX_RANKS,
        overlap_compute=compute,
        overlap_copy=copy,
        cache_bytes=l3 // (COPIED_TWICE * world_size),
        cache_bytes_per_s=_weight_rate(cached, min),
        measured=tuple(measured),
        sources=_sources(ranks, machine, world_size),
    )


def _launch(ranks: Sequence[Told]) -> dict[str, float]:
    """Us of a unit's ops by how a step is run, and of one op (`op`)."""
    names = ranks[0]["launch"]["per_unit_us"]
    found = {name: _mean(ranks, "launch", "per_unit_us", name) for name in names}
    return {**found, "op": found["cooperative"] / ranks[0]["launch"]["num_ops"]}


def _segments(ranks: Sequence[Told]) -> list[Measured]:
    """Whole segments, from memory and from the cache; those that no gather precedes are the same in both."""
    found: dict[tuple[MeasuredWhat, tuple[int | str, ...]], list[float]] = {}
    for told in ranks:
        for run in told["pieces"]:
            what = SEGMENTS_OF.get(run["run"])
            if what is None:
                continue
            for name, us in run["segments"].items():
                found.setdefault((what, (told["model"], name, run["batch_size"], 1)), []).append(us)
    for (what, key), each in list(found.items()):  # a step's first op has no beginning, so one run may lack it
        other: MeasuredWhat = "segment_cached" if what == "segment" else "segment"
        found.setdefault((other, key), each)
    return [Measured(what, key, sum(each) / len(each)) for (what, key), each in found.items()]


def _gathers(ranks: Sequence[Told], world_size: int, handoff_us: float) -> list[Measured]:
    """Gathers of the step's units: by the worker that computes, and by a thread that has to be woken."""
    found: dict[int, list[float]] = {}
    for told in ranks:
        for run in told["pieces"]:
            for size, us in run["gathers"].items():
                found.setdefault(int(size), []).append(us)
    measured = []
    for size, each in sorted(found.items()):
        us = sum(each) / len(each)
        measured.append(Measured("gather", ("pull", size, world_size), us))
        measured.append(Measured("gather", (THREADED_PULL, size, world_size), us + handoff_us))
    return measured


def _gemms(ranks: Sequence[Told], what: str) -> dict[tuple[int | str, ...], float]:
    found: dict[tuple[int | str, ...], list[float]] = {}
    for told in ranks:
        for *key, us in told[what]:
            found.setdefault(tuple(key), []).append(us)
    return {key: sum(each) / len(each) for key, each in found.items()}


def _peaks(gemms: Mapping[tuple[int | str, ...], float]) -> dict[str, float]:
    """Operations per second of the fastest gemm of each dtype."""
    peaks: dict[str, float] = {}
    for (m, n, k, dtype), us in gemms.items():
        rate = 2.0 * int(m) * int(n) * int(k) / us * 1e6
        peaks[str(dtype)] = max(peaks.get(str(dtype), MIN_RATE), rate)
    return peaks


def _weight_rate(
    gemms: Mapping[tuple[int | str, ...], float], which: Callable[[Sequence[tuple[int, float]]], tuple[int, float]]
) -> float:
    """Bytes per second of the weight of a gemm of few rows: the largest weight's, or the smallest one's."""
    fewest = min(int(key[0]) for key in gemms)
    sized = [
        (4 * int(n) * int(k), 4 * int(n) * int(k) / us * 1e6)
        for (m, n, k, dtype), us in gemms.items()
        if m == fewest and dtype == "float32"
    ]
    return which(sized)[1] if sized else MIN_RATE


def _sources(ranks: Sequence[Told], machine: Mapping[str, Any], world_size: int) -> tuple[tuple[str, str], ...]:
    where = f"calibrated on {world_size} ranks at once, {machine['cores']} cores of {machine['cpu']}"
    launch = _launch(ranks)
    fan_out = ", ".join(
        f"{streams}: {_mean(ranks, 'fan_out_us', streams):.0f} us" for streams in ranks[0]["fan_out_us"]
    )
    texts = {
        "memory_bytes": "what the system says",
        "memory_bytes_per_s": f"{where}: weights of a one-row gemm",
        "memory_efficiency": "part of memory_bytes_per_s",
        "links": f"{where}; {FAN_OUT_BYTES} B by copy streams: {fan_out}",
        "derate": f"{where}: gathers by size",
        "activation_bytes_per_s": "as gathers: a host has one link",
        "activation_t0_us": "as gathers",
        "peak_flops": f"{where}: the fastest gemm",
        "gemm_efficiency": "part of peak_flops",
        "kernel_us": f"{where}: an op that does nothing, one worker",
        "launch_us": f"{where}: a graph of one unit",
        "launch_us_per_node": f"{where}: captured; eager {launch['eager'] / ranks[0]['launch']['num_ops']:.2f} us",
        "max_domain": "processes of one machine map each other's memory",
        "overlap_compute": f"{where}: gemms beside a thread that copies",
        "overlap_copy": f"{where}: copies beside a thread of gemms",
        "cache_bytes": "the last cache, shared by ranks; a gather's source goes through it too",
        "cache_bytes_per_s": f"{where}: weights of a one-row gemm, read just before",
        "measured": f"{where}: segments and gathers inside captured steps",
    }
    return tuple(sorted(texts.items()))


def _mean(ranks: Sequence[Told], *keys: Any) -> float:
    """The mean over ranks of what lies under `keys`."""
    total = 0.0
    for one in ranks:
        value: Any = one
        for key in keys:
            value = value[key]
        total += value
    return total / len(ranks)
