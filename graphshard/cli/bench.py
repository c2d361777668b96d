"""`graphshard bench`: what the pieces cost on this machine, each beside its yardstick."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from graphshard.bench.compile import CompileRequest, measure_compile
from graphshard.bench.stats import summarize
from graphshard.cli.bench_dual import command as dual
from graphshard.cli.bench_load import command as load
from graphshard.cli.bench_speculative import command as speculative
from graphshard.cli.bench_step import command as step
from graphshard.cli.common import COUNT, Names, Output, Size, Sizes, answering, rank_values
from graphshard.cli.planning import LAYERS, RANKS, SHAPES, head_option, transport_option, units_option
from graphshard.core.sizes import format_bytes
from graphshard.report.tables import table_of

RUN_TIMEOUT_S = 600.0
DEPTH = click.IntRange(min=0)
EXECUTORS = ("cooperative", "threaded")


@click.group("bench")
def command() -> None:
    """Measure one piece at a time. Raw samples are in the JSON."""


command.add_command(step)
command.add_command(load)
command.add_command(speculative)
command.add_command(dual)


GATHER_JSON = """JSON keys: `rows` {what, num_bytes, us, p10_us, p90_us, n, GBps, share_of_memcpy, samples_us,
units_per_sample}, `world_size`."""
DISPATCH_JSON = """JSON keys: `rows` {run, executor, ns_per_op, p10_ns, p90_ns, n, samples_ns, num_ops, num_bound_ops};
`gemm`, `ops_per_unit`, and what was asked for."""
COMPILE_JSON = """JSON keys: `rows`, one a repeat {total_s, plan_s, layout_s, programs_s, verify_s, num_units,
num_programs, num_ops, units, prefetch_depth, head}; `total_s`, the median."""


@command.command("gather", epilog=GATHER_JSON)
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option("--sizes", type=Sizes(), default="1MiB,14MiB,64MiB", show_default=True, help="Bytes of a unit.")
@click.option(
    "--peers", type=Names(("memcpy", "gloo")), default="memcpy,gloo", show_default=True, help="Run beside it."
)
@transport_option
@click.option("--repeats", type=COUNT, default=20, show_default=True, help="Samples of each.")
@click.option("--cold-size", type=Size(), default="96MiB", show_default=True, help="Bytes gathered in one sample.")
@click.option("--executor", type=click.Choice(EXECUTORS), default="cooperative", show_default=True, help="Of graphs.")
@answering
def gather(
    out: Output,
    world_size: int,
    sizes: list[int],
    peers: list[str],
    transport: str,
    repeats: int,
    cold_size: int,
    executor: str,
) -> None:
    """Gather units over rank processes, beside C's memcpy of as many bytes and gloo's all-gather.

    GBps is bytes of the unit / time (1e9). All ranks work at once, on slots that are not in any cache.
    """
    request = {"sizes": sizes, "peers": peers, "num_repeats": repeats, "cold_bytes": cold_size}
    request |= {"executor": executor, "transport": transport}
    rows = rank_values(out, "graphshard.cli.ranks:gather", world_size, request, RUN_TIMEOUT_S)[0]
    shown = [{**row, "size": format_bytes(row["num_bytes"]), "spread": _spread(row)} for row in rows]
    columns = {"size": "unit", "what": "what", "us": "us", "spread": "p10-p90", "GBps": "GB/s"}
    out.say(table_of(shown, {**columns, "share_of_memcpy": "x memcpy"}, f"gather, {world_size} ranks"))
    out.emit(rows, world_size=world_size)


@command.command("dispatch", epilog=DISPATCH_JSON)
@click.option("--units", type=COUNT, default=200, show_default=True, help="Units of a step, 4 ops each.")
@click.option("--unit-size", type=Size(), default="4KiB", show_default=True, help="Bytes of one.")
@click.option(
    "--prefetch-depth", type=DEPTH, default=1, show_default=True, help="0: the two streams take strict turns."
)
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Ranks, as threads; rank 0 steps.")
@click.option("--repeats", type=COUNT, default=50, show_default=True, help="Samples of each.")
@answering
def dispatch(out: Output, units: int, unit_size: int, prefetch_depth: int, world_size: int, repeats: int) -> None:
    """Time an op that does nothing: eager issue and captured replay, launch and synchronise included.

    An op is one of a unit's four (ag_launch, wait_once, gemm, record_gate); the gemm is a C function that returns.
    """
    from graphshard.bench.dispatch import DispatchRequest, measure_dispatch  # imports torch
    from graphshard.bench.threads import run_threads

    request = DispatchRequest(units, unit_size, prefetch_depth, repeats)
    rows = run_threads(lambda group: measure_dispatch(group, request), world_size)[0]
    columns = {"run": "run", "executor": "executor", "ns_per_op": "ns/op", "p10_ns": "p10", "p90_ns": "p90", "n": "n"}
    out.say(table_of(rows, columns, f"dispatch, {units} units, {4 * units} ops"))
    out.emit(rows, gemm="C function (free(NULL))", ops_per_unit=4, **asdict(request))


@command.command("compile", epilog=COMPILE_JSON)
@click.option("--layers", type=LAYERS, default=93, show_default=True, help="Of the model.")
@click.option("--capture-sizes", type=SHAPES, default=16, show_default=True, help="Batch sizes 1 to this.")
@click.option("--world-size", type=RANKS, default=8, show_default=True, help="Ranks that are planned for.")
@units_option("layer")
@click.option("--prefetch-depth", type=DEPTH, default=1, show_default=True, help="Units gathered ahead.")
@head_option
@click.option("--repeats", type=COUNT, default=3, show_default=True, help="Samples.")
@answering
def compile_(
    out: Output,
    layers: int,
    capture_sizes: int,
    world_size: int,
    units: str,
    prefetch_depth: int,
    head: str,
    repeats: int,
) -> None:
    """Time plan, layout, programs and verification of all step shapes; a layer has an 8B llama's nine weights."""
    request = CompileRequest(layers, capture_sizes, world_size, units, prefetch_depth, head)
    rows = [measure_compile(request) for _ in range(repeats)]
    columns = {"total_s": "total s", "plan_s": "plan", "layout_s": "layout", "programs_s": "programs"}
    out.say(table_of(rows, {**columns, "verify_s": "verify", "num_units": "units", "num_ops": "ops"}, "compile"))
    out.emit(rows, total_s=summarize([float(str(row["total_s"])) for row in rows]).median)


def _spread(row: dict[str, Any]) -> str:
    return f"{row['p10_us']:,.0f}-{row['p90_us']:,.0f}"
