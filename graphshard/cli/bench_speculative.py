"""`graphshard bench speculative`: the draft's first gather beside the fold, on its own stream and on a shared one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graphshard.cli.common import COUNT, Output, Size, answering, check_writable, rank_values
from graphshard.cli.planning import transport_option
from graphshard.core.plan import Transport
from graphshard.core.sizes import format_bytes
from graphshard.core.timeline import Span, Timeline
from graphshard.cost.hardware_file import load_hardware
from graphshard.report.perfetto import write_perfetto
from graphshard.report.tables import table_of

if TYPE_CHECKING:
    from graphshard.bench.speculative import SpeculativeRequest
    from graphshard.bench.speculative_predict import SpeculativePredictor
    from graphshard.cost.hardware import HardwareSpec

RUN_TIMEOUT_S = 900.0
ENTRY = "graphshard.bench.speculative:measure_speculative"
THREADS = 3
"""Of a rank under a fold: the fold, the draft's gather, the target's."""
BUSY = 1.3
"""Of the fold's p90 over its p10, alone; its work is always the same."""
LAYERS = click.IntRange(min=3)
"""With fewer the first unit would still lie in its slot, and nothing would be gathered."""
COLUMNS = {
    "stream": "stream",
    "target_gather": "target's gather",
    "prefetch_us": "prefetch us",
    "fold_us": "fold us",
    "overlap_us": "overlap us",
    "late_us": "late us",
    "overlap_share": "share",
    "spread": "p10-p90",
    "n": "n",
    "predicted_share": "predicted",
}

JSON_HELP = """JSON keys: `rows` {setting: own, beside or shared, stream: own or shared, target_gather (where the
target's own first gather is), prefetch_us, fold_us, overlap_us, late_us (that the gather ends
after the fold) (medians), overlap_share (the median of overlap_us / prefetch_us), p10 and p90 of it, n, samples {rank,
and those of one step}, predicted_share}; `is_hidden` (own is 0.9 at least); `alone` {fold_us, draft_us, target_us:
median, p10, p90, n, samples by rank, with nothing
beside them}; `event_us` (between two events in a row, that is, what one costs);
`draft_bytes`, `target_bytes`, `fold_ms` (asked for), `num_records` of the fold, `ranks` (at once or in turn),
`sequences` (what was issued, by setting), `predicted_by`, `steps_us` (a traced step of each rank; predicted)."""


@click.command("speculative", epilog=JSON_HELP)
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option(
    "--fold-ms", type=click.FloatRange(min=0.05), default=4.0, show_default=True, help="Of the fold, calibrated."
)
@click.option("--size", type=Size(), default="14MiB", show_default=True, help="Of a unit of the draft.")
@click.option("--target-size", type=Size(), default="28MiB", show_default=True, help="Of a unit of the target.")
@click.option("--draft-layers", type=LAYERS, default=3, show_default=True, help="Of the draft, a unit each.")
@click.option("--target-layers", type=LAYERS, default=3, show_default=True, help="Of the target, a unit each.")
@click.option("--samples", type=COUNT, default=30, show_default=True, help="Steps of each setting, on each rank.")
@transport_option
@click.option(
    "--ranks",
    type=click.Choice(("auto", "at-once", "in-turn")),
    default="auto",
    show_default=True,
    help="auto: in turn where there are fewer than 3 cores a rank, since a fold and two gathers need one each.",
)
@click.option("--predict", "hardware", metavar="FILE", help="Predict by a file of `calibrate`, not by this run.")
@click.option("--trace", "trace_path", type=click.Path(path_type=Path), help="Write a step for ui.perfetto.dev.")
@click.option("--png", type=click.Path(path_type=Path), help="Draw it.")
@answering
def command(
    out: Output,
    world_size: int,
    fold_ms: float,
    size: int,
    target_size: int,
    draft_layers: int,
    target_layers: int,
    samples: int,
    transport: Transport,
    ranks: str,
    hardware: str | None,
    trace_path: Path | None,
    png: Path | None,
) -> bool:
    """Time how much of the draft's first gather a commit fold hides: on a stream of its own, and on a shared one.

    A sample is a whole step on the host driver, executor threaded, one torch thread: the draft's graph, the target's,
    and then the fold, with the draft's gather beside it. The target's own first gather, for its next step, is issued
    under the draft's graph; or beside the fold too; or there and on the same stream, so that the draft's queues behind
    it (shared). All take turns in one run. Times are those of events on the streams, taken by the driver's workers.
    Exit code 1: on its own stream the fold hides less than 90 % of the gather's time, in the median.
    """
    for option, path in (("--trace", trace_path), ("--png", png)):
        if path is not None:
            check_writable(option, path)
    is_in_turn = _is_in_turn(ranks, world_size, transport)
    machine = None if hardware is None else load_hardware(hardware)
    from graphshard.bench.speculative import SpeculativeRequest  # imports torch

    request = SpeculativeRequest(
        fold_ms, size, target_size, draft_layers, target_layers, samples, transport, is_in_turn
    )
    found = rank_values(out, ENTRY, world_size, asdict(request), RUN_TIMEOUT_S)
    return _Answer(out, request, found, machine).give(trace_path, png)


def _is_in_turn(ranks: str, world_size: int, transport: Transport) -> bool:
    if ranks == "in-turn" and transport == "nccl":
        raise click.UsageError("--ranks in-turn: a gather of transport nccl needs all ranks at once")
    few = len(os.sched_getaffinity(0)) < THREADS * world_size
    return ranks == "in-turn" or (ranks == "auto" and few and world_size > 1 and transport == "pull")


class _Answer:
    """What is said and written of one run."""

    def __init__(
        self, out: Output, request: SpeculativeRequest, ranks: list[dict[str, Any]], machine: HardwareSpec | None
    ) -> None:
        from graphshard.bench.speculative import ENOUGH, alone, speculative_rows
        from graphshard.bench.speculative_predict import SpeculativePredictor

        self._out, self._request, self._ranks = out, request, ranks
        self._predictor: SpeculativePredictor = SpeculativePredictor(request, ranks, machine)
        self._rows = speculative_rows(ranks)
        self._alone = alone(ranks)
        for row in self._rows:
            row["predicted_share"] = self._predictor.overlap(row["setting"]).share
        self._is_hidden: bool = self._rows[0]["overlap_share"] >= ENOUGH
        self._mode = "in turn" if request.in_turn else "at once"

    def give(self, trace_path: Path | None, png: Path | None) -> bool:
        """Say and write all there is to say; whether the fold hides enough."""
        title = f"prefetch beside a fold, {len(self._ranks)} ranks {self._mode}, {self._request.transport}, threaded"
        shown = [{**row, "spread": f"{row['p10']:.2f}-{row['p90']:.2f}"} for row in self._rows]
        self._out.say(table_of(shown, COLUMNS, title))
        self._explain()
        measured = [_timeline(rank["timeline"]) for rank in self._ranks]
        predicted = self._predictor.step("own").timeline
        steps_us = {"measured": [one.duration_us for one in measured], "predicted": predicted.duration_us}
        self._draw(measured, predicted, title, trace_path, png)
        self._out.emit(
            self._rows,
            is_hidden=self._is_hidden,
            alone={key: {**asdict(one), "samples": self._alone_samples(key)} for key, one in self._alone.items()},
            event_us=self._event_us,
            fold_ms=self._request.fold_ms,
            ranks=self._mode,
            steps_us=steps_us,
            predicted_by=self._predictor.source,
            **{key: self._ranks[0][key] for key in ("num_records", "draft_bytes", "target_bytes", "sequences")},
        )
        return self._is_hidden

    @property
    def _event_us(self) -> float:
        return max(float(rank["event_us"]) for rank in self._ranks)

    def _alone_samples(self, key: str) -> list[list[float]]:
        return [rank["samples"][key] for rank in self._ranks]

    def _explain(self) -> None:
        say, one = self._out.say, self._ranks[0]
        fold = self._alone["fold_us"]
        draft, target = format_bytes(one["draft_bytes"]), format_bytes(one["target_bytes"])
        say(f"fold alone: {fold.text('us')}, {one['num_records']} records; asked for "
            f"{self._request.fold_ms:g} ms")  # fmt: skip
        say(f"the draft's gather, {draft}, alone: {self._alone['draft_us'].text('us')}")
        say(f"the target's gather, {target}, alone: {self._alone['target_us'].text('us')}")
        say("shared: the draft's gather queues behind the target's own first gather, for its next step")
        say(f"times are of events on the streams; two events in a row are {self._event_us:.2f} us apart")
        if self._request.in_turn:
            say("ranks take turns: a fold and gathers need a core each, too many for all ranks at once")
        if fold.p90 > BUSY * fold.p10:
            say("the machine is busy: even alone the fold took unlike times, and time slices decide what overlaps")
        say(f"predicted by {self._predictor.source}")
        hidden = self._rows[0]["overlap_share"]
        say(f"{'ok' if self._is_hidden else 'NO'}: on its own stream the fold hides {hidden:.1%} of the gather's time")

    def _draw(
        self, measured: Sequence[Timeline], predicted: Timeline, title: str, trace_path: Path | None, png: Path | None
    ) -> None:
        if trace_path is not None:
            about = {"title": title, "predicted_by": self._predictor.source}
            write_perfetto(measured, trace_path, about, [predicted])
            self._out.say(f"open {trace_path} in ui.perfetto.dev")
        if png is not None:
            from graphshard.bench.speculative_predict import MARKED
            from graphshard.report.timeline import draw_timelines

            draw_timelines(measured, png, title, [predicted], MARKED)
            self._out.say(f"picture: {png}")


def _timeline(told: dict[str, Any]) -> Timeline:
    return Timeline(told["rank"], tuple(Span(**span) for span in told["spans"]), told["offset_us"])
