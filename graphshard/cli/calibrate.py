"""`graphshard calibrate`: measure this machine into a file for `plan --hardware` and `bench step --predict`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import COUNT, Output, answering, check_writable, rank_values
from graphshard.cli.counts import Counts
from graphshard.cost.hardware import HardwareSpec
from graphshard.report.tables import table_of

ENTRY = "graphshard.cli.calibrate_rank:calibrate"
RUN_TIMEOUT_S = 600.0
QUIET_SHARE = 0.9
"""Below this share of time on a core, other programs are part of what is measured."""

JSON_HELP = """JSON keys: `rows` {what, value, unit, source}; `hardware` is the file's content, `path` the file;
`core_share` tells how quiet the machine was (1.0: nothing else ran)."""


@click.command("calibrate", epilog=JSON_HELP)
@click.option(
    "-o",
    "--out",
    "path",
    type=click.Path(path_type=Path),
    default="host.json",
    show_default=True,
    help="The file that is written.",
)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama checkpoint instead of SmolLM2-135M.")
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes, all at work at once.")
@click.option("--batch-sizes", type=Counts(), default="1,16", show_default=True, help="Step shapes that are measured.")
@click.option("--cache-length", type=COUNT, default=64, show_default=True, help="Positions of the KV cache.")
@click.option("--repeats", type=COUNT, default=15, show_default=True, help="Counted runs of each thing; medians count.")
@answering
def command(
    out: Output,
    path: Path,
    model: Path | None,
    world_size: int,
    batch_sizes: list[int],
    cache_length: int,
    repeats: int,
) -> None:
    """Measure copies by size and fan-out, launches, gemms, segments of real steps, and copies beside compute.

    Takes about a minute, one torch thread a rank. Quiet the machine first: what runs beside it is measured too.
    """
    from graphshard.bench.calibrated import host_hardware
    from graphshard.cost.hardware_file import hardware_json, save_hardware
    from graphshard.models.config import load_llama_config
    from graphshard.models.smollm2 import prepare_smollm2
    from graphshard.report.machine import machine_facts

    check_writable("--out", path)
    folder = model or prepare_smollm2()
    load_llama_config(folder)  # refused here, before ranks are started
    request: dict[str, Any] = {
        "model": str(folder),
        "batch_sizes": batch_sizes,
        "cache_length": cache_length,
        "repeats": repeats,
    }
    ranks = rank_values(out, ENTRY, world_size, request, RUN_TIMEOUT_S)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = host_hardware(ranks, machine_facts(), memory_bytes)
    save_hardware(found, path)
    rows = _rows(found)
    out.say(table_of(rows, {"what": f"{world_size} ranks at once", "value": "value", "unit": "", "source": "source"}))
    share = min(run["core_share"] for rank in ranks for run in rank["pieces"])
    if share < QUIET_SHARE:
        out.say(f"the machine is busy: steps had a core for as little as {share:.0%} of their time; better quiet it")
    out.say(f"wrote {path}: {len(found.measured)} measured times; compare with a step:")
    options = f"--world-size {world_size} --batch-sizes {','.join(map(str, batch_sizes))} --cache-length {cache_length}"
    named = f" --model {model}" if model is not None else ""
    out.say(f"  graphshard bench step --predict {path} {options}{named} --launches 3 --peers replicated --no-reference")
    out.emit(rows, hardware=hardware_json(found), path=str(path), core_share=share)


def _rows(found: HardwareSpec) -> list[dict[str, Any]]:
    pull = found.link("pull")
    rows: list[tuple[str, float, str, str]] = [
        ("memory", found.memory_bytes_per_s / 1e9, "GB/s", "memory_bytes_per_s"),
        ("cache", found.cache_bytes_per_s / 1e9, "GB/s", "cache_bytes_per_s"),
        ("gather", pull.bytes_per_s / 1e9, "GB/s", "links"),
        ("gather t0", pull.t0_us, "us", "links"),
        *((f"gemm {dtype}", rate / 1e9, "GFLOP/s", "peak_flops") for dtype, rate in found.peak_flops),
        ("graph launch", found.launch_us, "us", "launch_us"),
        ("node", found.launch_us_per_node, "us", "launch_us_per_node"),
        ("compute beside copies", found.overlap_compute, "times as long", "overlap_compute"),
        ("copies beside compute", found.overlap_copy, "times as long", "overlap_copy"),
    ]
    return [
        {"what": what, "value": value, "unit": unit, "source": found.source(source)}
        for what, value, unit, source in rows
    ]
