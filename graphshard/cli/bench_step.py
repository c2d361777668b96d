"""`graphshard bench step`: a whole decoding step, sharded, beside the replicated model and beside other tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from graphshard.bench.step_rows import chosen_rows, core_share, label_of, samples_of, step_rows
from graphshard.cli.common import COUNT, Names, Output, answering, check_writable, rank_values
from graphshard.cli.counts import Counts
from graphshard.cli.planning import transport_option
from graphshard.core.errors import SpecError
from graphshard.cost.hardware_file import load_hardware
from graphshard.models.config import load_llama_config
from graphshard.report.tables import table_of
from graphshard.schedule.units import unit_cap

LAUNCH_TIMEOUT_S = 1800.0
QUIET_SHARE = 0.9
"""Below this share of time on a core, other programs are part of what is measured."""
ENTRY = "graphshard.cli.step_ranks:step"
PEERS = ("replicated", "fsdp2")
EXECUTORS = ("cooperative", "threaded")
PLANS = "weight/0/cooperative,weight/1/cooperative,weight/1/threaded,layer/0/cooperative,layer/1/threaded"
COLUMNS = {
    "what": "run unit/depth/executor",
    "median_ms": "ms a step",
    "p10_ms": "p10",
    "p90_ms": "p90",
    "p99_ms": "p99",
    "n": "n",
    "x_replicated": "x replicated",
    "cpu_ms": "cpu ms",
    "x_replicated_cpu": "x",
    "same": "logits",
    "note": "",
}


class _Plans(click.ParamType[list[list[Any]]]):
    """Plans as `unit/depth/executor,...`."""

    name = "unit/depth/executor,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[list[Any]]:
        """[units, prefetch_depth, executor] of each; a malformed one is a usage error."""
        if not isinstance(value, str):
            return list(value)
        found: list[list[Any]] = []
        for text in (text for text in value.split(",") if text):
            parts = text.split("/")
            if len(parts) != 3 or not parts[1].isdecimal() or parts[2] not in EXECUTORS:
                self.fail(f"{text!r} is no plan: write weight/0/cooperative or layer/1/threaded", param, ctx)
            try:
                unit_cap(parts[0])
            except SpecError as error:
                self.fail(str(error), param, ctx)
            found.append([parts[0], int(parts[1]), parts[2]])
        return found


JSON_HELP = """JSON keys: `rows` has one row for each run and batch size {batch_size, run, unit, prefetch_depth,
executor, chosen, median_ms, p10_ms, p90_ms, p99_ms, n, launches, launch_medians_ms, x_replicated, cpu_ms,
x_replicated_cpu, identical, max_abs_diff, agrees}, with --predict what is predicted beside (`predicted_ms`, ...);
`chosen` has the chosen plan's rows beside its peers'; `agree`, `reasons`, `title`, and `samples` {batch_size, what,
samples_ms by launch and rank}."""


@click.command("step", epilog=JSON_HELP)
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option("--batch-sizes", type=Counts(), default="1,16", show_default=True, help="Sequences of a step.")
@click.option("--peers", type=Names(PEERS), default=",".join(PEERS), show_default=True, help="Run beside the plans.")
@click.option("--plans", type=_Plans(), default=PLANS, show_default=True, help="Run beside the plan that was chosen.")
@transport_option
@click.option("--launches", type=COUNT, default=3, show_default=True, help="Times that all ranks are started anew.")
@click.option("--steps", type=COUNT, default=30, show_default=True, help="Counted steps of each run, in each launch.")
@click.option("--cache-length", type=COUNT, default=64, show_default=True, help="Positions of the KV cache.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama checkpoint instead of SmolLM2-135M.")
@click.option("--png", type=click.Path(path_type=Path), help="Draw the distributions.")
@click.option("--predict", "hardware", metavar="FILE", help="Add what the model predicts by a file of `calibrate`.")
@click.option("--no-reference", is_flag=True, help="Leave out transformers' own forward.")
@answering
def command(
    out: Output,
    world_size: int,
    batch_sizes: list[int],
    peers: list[str],
    plans: list[list[Any]],
    transport: str,
    launches: int,
    steps: int,
    cache_length: int,
    model: Path | None,
    png: Path | None,
    hardware: str | None,
    no_reference: bool,
) -> bool:
    """Time decoding steps: the plan that is chosen without measuring, other plans, and peers, turn by turn.

    One torch thread a rank. A sample is one rank's step, from a barrier on; all ranks work at once. Exit code 1: logits
    differ, from the replicated run's in any bit, or from a peer's by more than rounding.
    """
    if png is not None:
        check_writable("--png", png)
    machine = None if hardware is None else load_hardware(hardware)
    folder = model or _smollm2()
    load_llama_config(folder)  # refused here, before ranks are started
    request = {
        "model": str(folder),
        "batch_sizes": batch_sizes,
        "num_steps": steps,
        "cache_length": cache_length,
        "peers": [*peers, *([] if no_reference else ["transformers"])],
        "plans": plans,
        "transport": transport,
    }
    found = [
        rank_values(out, ENTRY, world_size, {**request, "title": f"launch {i + 1} of {launches}"}, LAUNCH_TIMEOUT_S)
        for i in range(launches)
    ]
    rows = step_rows(found)
    if machine is not None:
        from graphshard.cli.bench_predict import Predictor, add_predictions

        add_predictions(rows, Predictor(folder, world_size, max(batch_sizes), cache_length, machine))
    title = f"{folder.name}, {world_size} ranks, cache {cache_length}, {launches} launches"
    return _answer(out, found, rows, title, png)


def _smollm2() -> Path:
    from graphshard.models.smollm2 import prepare_smollm2

    return prepare_smollm2()


def _answer(out: Output, launches: list[list[Any]], rows: list[dict[str, Any]], title: str, png: Path | None) -> bool:
    """Say and write all there is to say; whether the logits agree."""
    samples, reasons = samples_of(launches), launches[0][0]["reasons"]
    chosen = chosen_rows(rows)
    _show(out, rows, chosen, title)
    for reason in reasons:
        out.say(f"  why: {reason}")
    if png is not None:
        _draw(rows, samples, png, title)
    agree = all(row["agrees"] for row in rows)
    if "predicted_ms" in rows[0]:
        from graphshard.cli.bench_predict import say_predictions

        say_predictions(out, rows)
    out.say(_verdict(rows))
    out.emit(rows, title=title, chosen=chosen, agree=agree, reasons=reasons, samples=samples)
    return agree


def _show(out: Output, rows: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]], title: str) -> None:
    for batch_size in dict.fromkeys(row["batch_size"] for row in rows):
        here = [row for row in rows if row["batch_size"] == batch_size]
        shown = [
            {**row, "what": label_of(row), "same": _same(row), "note": "<- chosen" if row["chosen"] else ""}
            for row in here
        ]
        out.say()
        out.say(table_of(shown, COLUMNS, f"{title}, batch {batch_size}"))
    out.say()
    for row in chosen:
        parts = [f"{row['x_replicated']:.2f} x replicated"] if row["x_replicated"] is not None else []
        parts += [f"{value:.1f} x faster than {key[:-2]}" for key, value in row.items() if key.endswith("_x")]
        out.say(f"chosen at batch {row['batch_size']}: {', '.join(parts) or 'no peer to compare with'}")
    if (share := core_share(rows)) < QUIET_SHARE:
        out.say(f"the machine is busy: steps had a core for as little as {share:.0%} of their time; go by cpu ms")


def _same(row: dict[str, Any]) -> str:
    if row["identical"]:
        return "same bits"
    return f"{'within' if row['agrees'] else 'DIFFER BY'} {row['max_abs_diff']:.1g}"


def _verdict(rows: Sequence[dict[str, Any]]) -> str:
    bad = [f"{label_of(row)} at batch {row['batch_size']}" for row in rows if not row["agrees"]]
    if bad:
        return f"logits DIFFER from the replicated run's: {', '.join(bad)}"
    return "logits: ours equal the replicated run's bit for bit, peers' agree"


def _draw(rows: Sequence[dict[str, Any]], samples: Sequence[dict[str, Any]], png: Path, title: str) -> None:
    from graphshard.report.distributions import Distribution, draw_distributions

    panels: dict[str, list[Distribution]] = {}
    for row, one in zip(rows, samples, strict=True):
        pooled = [ms for launch in one["samples_ms"] for rank in launch for ms in rank]
        panel = panels.setdefault(f"batch {one['batch_size']}", [])
        panel.append(Distribution(one["what"], pooled, row["chosen"]))
    draw_distributions(panels, png, f"milliseconds a step: {title}")
