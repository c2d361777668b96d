"""`graphshard trace`: one step of every rank in time, for ui.perfetto.dev and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from graphshard.bench.stats import summarize
from graphshard.cli.common import COUNT, Output, answering, check_writable, rank_values
from graphshard.cli.planning import depth_option, head_option, units_option
from graphshard.cli.prompts import PROMPTS, Codec
from graphshard.core.timeline import Span, Timeline, unit_times
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.hardware_file import load_hardware
from graphshard.models.config import load_llama_config
from graphshard.report.perfetto import write_perfetto
from graphshard.report.tables import table_of

RUN_TIMEOUT_S = 600.0
ENTRY = "graphshard.cli.trace_rank:trace"
NUM_TOKENS = 8
EXECUTORS = ("auto", "cooperative", "threaded")

JSON_HELP = """JSON keys: `rows` has one row for each span {rank, lane, kind, name, begin_us, end_us, unit, layer,
segment}; times count from the first rank's first op. `ranks` {rank, step_us, compute_us, copy_us, wait_us, timed_ms};
`units` {unit, name, gather_us, compute_us} of rank 0; `plan`; `predicted` has rows as
`rows` (with --predict)."""


@click.command("trace", epilog=JSON_HELP)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama checkpoint instead of SmolLM2-135M.")
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option("--batch-size", type=COUNT, default=1, show_default=True, help="Sequences of the step.")
@click.option("--cache-length", type=COUNT, default=64, show_default=True, help="Positions of the KV cache.")
@depth_option
@units_option("auto")
@head_option
@click.option(
    "--executor", type=click.Choice(EXECUTORS), default="auto", show_default=True, help="What runs graphs on the host."
)
@click.option(
    "--out",
    "trace_path",
    type=click.Path(path_type=Path),
    default="graphshard-trace.json",
    show_default=True,
    help="The trace.",
)
@click.option("--png", type=click.Path(path_type=Path), help="Draw the lanes too.")
@click.option(
    "--predict", "hardware", metavar="FILE", help="Add the step that the model predicts by `calibrate`'s file."
)
@answering
def command(
    out: Output,
    model: Path | None,
    world_size: int,
    batch_size: int,
    cache_length: int,
    prefetch_depth: int | str,
    units: str,
    head: str,
    executor: str,
    trace_path: Path,
    png: Path | None,
    hardware: str | None,
) -> None:
    """Capture one step once more with an event after every op, replay it on all ranks, and write when each was done.

    That graph has more nodes than the real one, so it is never the one that is timed; the real one's time is beside it.
    """
    for option, path in (("--out", trace_path), ("--png", png)):
        if path is not None:
            check_writable(option, path)
    machine = None if hardware is None else load_hardware(hardware)
    folder = model or _smollm2()
    prompt = Codec(folder).encode(PROMPTS[0], load_llama_config(folder).vocab_size)
    request = {
        "model": str(folder),
        "prompts": [prompt],
        "num_tokens": NUM_TOKENS,
        "batch_size": batch_size,
        "cache_length": cache_length,
        "choices": {"units": units, "prefetch_depth": prefetch_depth, "head": head, "executor": executor},
    }
    values = rank_values(out, ENTRY, world_size, request, RUN_TIMEOUT_S)
    plan = values[0]["plan"]
    title = (
        f"{folder.name}: one traced step, {world_size} ranks, batch {batch_size}, units {plan['units']}, depth "
        f"{plan['prefetch_depth']}, {plan['executor']}"
    )
    timelines = [_timeline(value["timeline"]) for value in values]
    predicted = [] if machine is None else [_predicted(folder, values, request, machine)]
    write_perfetto(timelines, trace_path, {"title": title, **plan}, predicted)
    if png is not None:
        from graphshard.report.timeline import draw_timelines

        draw_timelines(timelines, png, title)
    _answer(out, timelines, values, title, predicted)
    out.say(f"open {trace_path} in ui.perfetto.dev" + (f"; picture: {png}" if png is not None else ""))


def _predicted(
    folder: Path, values: Sequence[dict[str, Any]], request: dict[str, Any], machine: HardwareSpec
) -> Timeline:
    """The step that the model predicts; every rank's is alike."""
    from graphshard.cli.bench_predict import Predictor

    batch_size = request["batch_size"]
    predictor = Predictor(folder, len(values), batch_size, request["cache_length"], machine)
    return predictor.step(batch_size, **values[0]["plan"]).timeline


def _answer(
    out: Output,
    timelines: Sequence[Timeline],
    values: Sequence[dict[str, Any]],
    title: str,
    predicted: Sequence[Timeline],
) -> None:
    ranks = [_rank_row(one, value) for one, value in zip(timelines, values, strict=True)]
    columns = {"rank": "rank", "step_us": "traced step us", "compute_us": "compute", "copy_us": "copies"}
    out.say(table_of(ranks, {**columns, "wait_us": "waits", "timed_ms": "untraced step ms"}, title))
    for one in predicted:
        out.say(f"predicted: a step of {one.duration_us:,.0f} us; every rank's is alike")
    names = values[0]["unit_names"]
    units = [
        {"unit": one.unit, "name": names[one.unit], "gather_us": one.gather_us, "compute_us": one.compute_us}
        for one in unit_times(timelines[0].spans)
    ]
    first = min(one.offset_us for one in timelines)
    rows = [_span_row(one.rank, span, one.offset_us - first) for one in timelines for span in one.spans]
    theirs = [_span_row(one.rank, span, 0.0) for one in predicted for span in one.spans]
    out.emit(rows, title=title, ranks=ranks, units=units, plan=values[0]["plan"], predicted=theirs)


def _rank_row(timeline: Timeline, value: dict[str, Any]) -> dict[str, Any]:
    total = dict.fromkeys(("compute", "copy", "wait"), 0.0)
    for span in timeline.spans:
        total[span.kind] += span.duration_us
    sums = {f"{kind}_us": us for kind, us in total.items()}
    timed_ms = summarize(value["step_ms"]).median
    return {"rank": timeline.rank, "step_us": timeline.duration_us, **sums, "timed_ms": timed_ms}


def _span_row(rank: int, span: Span, shift_us: float) -> dict[str, Any]:
    return {
        "rank": rank,
        "lane": span.lane,
        "kind": span.kind,
        "name": span.name,
        "begin_us": span.begin_us + shift_us,
        "end_us": span.end_us + shift_us,
        "unit": span.unit,
        "layer": span.layer,
        "segment": span.segment,
    }


def _timeline(told: dict[str, Any]) -> Timeline:
    return Timeline(told["rank"], tuple(Span(**span) for span in told["spans"]), told["offset_us"])


def _smollm2() -> Path:
    from graphshard.models.smollm2 import prepare_smollm2

    return prepare_smollm2()
