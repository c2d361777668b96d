"""`graphshard bench dual`: blocks replicated, gathered, in slices, and as a plan chose, by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from graphshard.bench.dual_rows import GOOD, MODES, dual_rows, measured_crossover, tokens_per_rank, worst_choice
from graphshard.cli.common import COUNT, Output, answering, rank_values
from graphshard.cli.counts import Counts
from graphshard.cli.planning import transport_option
from graphshard.core.errors import SpecError
from graphshard.cost.dual import DualEstimate
from graphshard.cost.hardware_file import load_hardware
from graphshard.report.tables import table_of

RUN_TIMEOUT_S = 1200.0
ENTRY = "graphshard.cli.dual_ranks:dual"
DTYPES = ("float32", "bfloat16")
COLUMNS = {
    "tokens_per_group": "tokens a group",
    "tokens_per_rank": "a rank",
    "mode": "mode",
    "shown_runs": "blocks run",
    "median_ms": "ms a step",
    "spread": "p10-p90",
    "n": "n",
    "x_better": "x better",
    "predicted_ms": "predicted",
    "same": "result",
}

JSON_HELP = """JSON keys: `rows` has one row for each number of tokens and mode {tokens_per_group, tokens_per_rank,
mode, runs (how the blocks run: what `chosen` chose), median_ms, p10_ms, p90_ms, n, launches, x_better (beside the
better of gather and tensor_parallel), predicted_ms, identical, difference (from replicated, of a token's largest
number), agrees, samples_ms by launch and rank}; `crossover` {measured, predicted: {tokens_per_group, between}} from
which gather is no slower than tensor_parallel; `is_well_chosen` (x_better of each chosen row is at most 1.05); `agree`;
`reasons` of the choice; `predicted_by`."""


@click.command("dual", epilog=JSON_HELP)
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option(
    "--tokens-per-group",
    type=Counts(),
    default="1,4,16,64,256,1024",
    show_default=True,
    help="Tokens of all ranks together in a step; rounded up to as many on each rank.",
)
@click.option("--hidden-size", type=COUNT, default=1024, show_default=True, help="Of the blocks' input and result.")
@click.option(
    "--intermediate-size",
    type=COUNT,
    default=288,
    show_default=True,
    help="Features of a block. The default has the proportions of a shared expert of 7168 x 2048.",
)
@click.option("--layers", type=COUNT, default=12, show_default=True, help="Blocks of a step.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", show_default=True, help="Of all.")
@click.option("--launches", type=COUNT, default=6, show_default=True, help="Times that all ranks are started anew.")
@click.option(
    "--steps",
    type=COUNT,
    default=20,
    show_default=True,
    help="Counted steps of each mode in a launch; of slow ones fewer are made, of fast ones more.",
)
@transport_option
@click.option(
    "--choose-by",
    type=click.Choice(("tune", "model")),
    default="tune",
    show_default=True,
    help="What `chosen` goes by: both ways measured before, as `graphshard tune` does, or what is predicted.",
)
@click.option("--predict", "hardware", metavar="FILE", help="Predict by a file of `calibrate`, not by this run.")
@answering
def command(
    out: Output,
    world_size: int,
    tokens_per_group: list[int],
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    dtype: str,
    launches: int,
    steps: int,
    transport: str,
    choose_by: str,
    hardware: str | None,
) -> bool:
    """Time steps of blocks in each way, turn by turn: where moving activations is cheaper than moving weights.

    A step is MLPs one after the other on the host driver, captured, one torch thread a rank. A sample is one rank's
    step, from a barrier on. `gather` and `tensor_parallel` force one way; `chosen` is a runtime of its own, whose plan
    took one of them for each number of tokens, in the first launch. Every launch finds its weights at other places of
    memory, which tells where caches hold them. Exit code 1: results differ from the replicated run's, gathered ones in
    any bit, sliced ones by more than rounding.
    """
    if world_size < 2:
        raise SpecError("--world-size 1: one rank has all weights and all tokens; dual mode begins at 2 ranks")
    for option, size in (("--intermediate-size", intermediate_size), ("--hidden-size", hidden_size)):
        if size % world_size:
            fits = -(-size // world_size) * world_size
            raise SpecError(f"{option} {size} is no multiple of {world_size} ranks: no slices; give {fits}")
    if hardware is not None:
        load_hardware(hardware)  # refused here, before ranks are started
    request = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_layers": layers,
        "dtype": dtype,
        "tokens": list(dict.fromkeys(tokens_per_rank(tokens, world_size) for tokens in tokens_per_group)),
        "num_steps": steps,
        "transport": transport,
    }
    with TemporaryDirectory() as folder:
        more = {"choose_by": choose_by, "tune_path": str(Path(folder) / "tune.json"), "hardware": hardware}
        found = [rank_values(out, ENTRY, world_size, {**request, **more}, RUN_TIMEOUT_S) for _ in range(launches)]
    first = found[0][0]
    rows = dual_rows([[rank["tokens"] for rank in launch] for launch in found], tokens_per_group)
    predicted_by, predicted = _predict(first["figures"], request, hardware, rows, world_size)
    blocks = f"{layers} blocks of {intermediate_size} x {hidden_size} {dtype}"
    title = f"{blocks}, {world_size} ranks, {transport}, {launches} launches"
    return _answer(out, rows, predicted, predicted_by, first["reasons"], title)


def _predict(
    figures: dict[str, Any] | None,
    request: dict[str, Any],
    hardware: str | None,
    rows: Sequence[dict[str, Any]],
    world_size: int,
) -> tuple[str, list[dict[str, Any]]]:
    """What predicts, and the predicted rows; adds `predicted_ms` to `rows`."""
    from graphshard.bench.dual import DualRequest  # imports torch
    from graphshard.bench.dual_figures import BY_RUN, hardware_of
    from graphshard.cli.dual_ranks import block_of, stack_of

    asked = DualRequest(**request)
    block = block_of(stack_of(asked))
    if hardware is not None:
        machine = load_hardware(hardware)
    else:
        assert figures is not None
        machine = hardware_of(figures, block, world_size, asked.transport)
    estimate = DualEstimate(block, machine, world_size, asked.transport)
    predicted = []
    for row in rows:
        times = estimate.times(row["tokens_per_rank"] * world_size)
        way = row["runs"] if row["mode"] == "chosen" else row["mode"]
        us = None if way == "mixed" else times.us(way)
        row["predicted_ms"] = None if us is None else us * block.layers / 1e3
        predicted.append({**row, "median_ms": row["predicted_ms"]})
    return (BY_RUN if hardware is None else f"figures of {machine.name}"), predicted


def _answer(
    out: Output,
    rows: list[dict[str, Any]],
    predicted: list[dict[str, Any]],
    predicted_by: str,
    reasons: list[str],
    title: str,
) -> bool:
    """Say and write all there is to say; whether the results agree."""
    shown = [
        {
            **row,
            "spread": f"{row['p10_ms']:.3g}-{row['p90_ms']:.3g}",
            "shown_runs": row["runs"] if row["mode"] == "chosen" else "",
            "same": _same(row),
        }
        for row in rows
    ]
    out.say(table_of(shown, COLUMNS, title))
    crossover = {"measured": measured_crossover(rows), "predicted": measured_crossover(predicted)}
    for what, found in crossover.items():
        out.say(f"gather is no slower than tensor_parallel, {what}: {_crossover_text(found)}")
    out.say(f"predicted by {predicted_by}")
    for reason in reasons:
        out.say(f"  why: {reason}")
    worst = worst_choice(rows)
    is_well_chosen = worst["x_better"] <= GOOD
    out.say(
        f"{'ok' if is_well_chosen else 'NO'}: what was chosen takes at most {worst['x_better']:.3f} x the better of "
        f"gather and tensor_parallel (at {worst['tokens_per_group']} tokens a group; wanted: {GOOD})"
    )
    agree = all(row["agrees"] for row in rows)
    bad = [f"{row['mode']} at {row['tokens_per_group']} tokens" for row in rows if not row["agrees"]]
    out.say(f"results DIFFER from the replicated run's: {', '.join(bad)}" if bad else "results agree with replicated")
    out.emit(
        rows,
        title=title,
        crossover=crossover,
        is_well_chosen=is_well_chosen,
        agree=agree,
        reasons=reasons,
        predicted_by=predicted_by,
        modes=list(MODES),
    )
    return agree


def _same(row: dict[str, Any]) -> str:
    if row["identical"]:
        return "same bits"
    return f"{'within' if row['agrees'] else 'DIFFERS BY'} {row['difference']:.1g}"


def _crossover_text(found: dict[str, Any]) -> str:
    low, high = found["between"]
    if found["tokens_per_group"] is not None:
        return f"from about {found['tokens_per_group']} tokens a group (between {low} and {high})"
    return f"not up to {low} tokens a group" if high is None else f"from {high} tokens a group on, the fewest measured"
