"""`graphshard compare`: one program eagerly and captured, op by op and side by side in time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from graphshard.bench.compare import RUNS
from graphshard.bench.stats import quantile
from graphshard.cli.common import COUNT, Output, answering, rank_values, refuse_given
from graphshard.cli.compare_ranks import SHAPE, CompareRequest, check_unit
from graphshard.cli.compare_stage import Stage, Staged
from graphshard.cli.planning import ANY_DEVICE, LAYERS, RANKS, depth_option, transport_option, units_option
from graphshard.comm.group import LONGEST_TIMEOUT_S
from graphshard.core.counts import counted, which_ranks
from graphshard.core.errors import CommError, DeviceError
from graphshard.device import host_driver_environment
from graphshard.device.cuda import cuda_index
from graphshard.models.llama import Llama
from graphshard.report.tables import table_of
from graphshard.runtime.evidence.sequence import SeenOp
from graphshard.runtime.evidence.walk import why_no_bindings
from graphshard.schedule.auto import make_plan
from graphshard.schedule.options import AUTO

ENTRY = "graphshard.cli.compare_ranks:compare"
LAUNCH_TIMEOUT_S = 600.0
LAST_WAITS_S = 5.0  # for ranks that are waiting when one fails, beyond the limit of a wait
MAX_SHOWN_ROWS = 60
SEQUENCE_COLUMNS = {
    "order": "order",
    "kind": "op",
    "op": "of op",
    "unit": "unit",
    "slot": "slot",
    "bytes": "bytes",
    "stream": "stream",
    "after": "after",
    "graph": "graph",
}
TIME_COLUMNS = {
    "run": "run",
    "median_ms": "ms a step",
    "p99_ms": "p99",
    "host_us": "host us a step",
    "launch_us": "of that in the driver",
    "n": "n",
}


JSON_HELP = """JSON keys: `rows` has one row for each op {run, rank, order, kind, op, unit, slot, bytes, stream, after},
then one for each time; `sequences_equal`, `first_difference`, `outputs_equal`, `ran`, `problems`, `never_met` (staged
faults); by rank `claims`, `reports` (of the captured graph), `samples`; `plan`; `error` where the staged fault ended
all."""


@click.command("compare", epilog=JSON_HELP)
@transport_option
@click.option("--world-size", type=RANKS, default=2, show_default=True, help="Rank processes.")
@click.option("--layers", type=LAYERS, default=6, show_default=True, help="Layers of a small random llama.")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama checkpoint instead.")
@units_option("layer")
@depth_option
@click.option("--steps", type=COUNT, default=50, show_default=True, help="Timed steps of each run on each rank.")
@click.option(
    "--device", type=click.Choice(["host", "cuda"]), default="host", show_default=True, help="What the ranks run on."
)
@click.option("--stage", type=Stage(), help=Stage.HELP)
@click.option("--timeout-s", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="Of each wait.")
@answering
def command(
    out: Output,
    transport: str,
    world_size: int,
    layers: int,
    model: Path | None,
    units: str,
    prefetch_depth: int | str,
    steps: int,
    device: str,
    stage: str | None,
    timeout_s: float,
) -> bool:
    """Read what a captured step does from its graph and what an eager one does from its driver calls; compare them.

    Nothing is run where ranks captured unlike sequences. Exit code 1: sequences or outputs differ, a gather has kernel
    nodes, a staged fault was found, or it was never met.
    """
    if not timeout_s <= LONGEST_TIMEOUT_S:  # not a number, neither
        raise click.UsageError(f"--timeout-s {timeout_s}: give seconds, at most {LONGEST_TIMEOUT_S:.0f} (a day)")
    staged = Staged.parse(stage)
    staged.check(transport, device, world_size)
    if model is not None:
        refuse_given(["layers"], "--model has its own layers")
    if device == "cuda":
        cuda_index(world_size - 1)  # refused here, with one reason for all ranks
    if (reason := why_no_bindings()) is not None:
        raise DeviceError(f"captured graphs cannot be looked at: {reason}")
    with tempfile.TemporaryDirectory(prefix="graphshard-compare-") as met_folder:
        request = CompareRequest(
            model=None if model is None else str(model),
            layers=layers,
            num_steps=steps,
            device=device,
            timeout_s=timeout_s,
            choices={"transport": transport, "units": units, "prefetch_depth": prefetch_depth, "min_shard_bytes": 0},
            skip=staged.skip,
            library_stage=staged.library,
            met_folder=met_folder,
        )
        _check_model(request, world_size)  # refused here, before ranks are started
        return _run(out, staged, request, world_size)


def _check_model(request: CompareRequest, world_size: int) -> None:
    """Refuse a model's folder without a config, and a unit that is not in the plan where no device decides on units."""
    config = request.llama_config()
    if request.skip is not None and request.choices["units"] != AUTO:
        choices = {**request.choices, "step_shapes": [SHAPE]}
        plan = make_plan(Llama(config, SHAPE.batch_size).spec(), world_size, ANY_DEVICE, **choices)
        check_unit(request.skip[1], len(plan.units))


def _run(out: Output, staged: Staged, request: CompareRequest, world_size: int) -> bool:
    """Run the ranks and answer; an error of theirs is the answer where the library's faults may have made it."""
    env = host_driver_environment() if request.device == "host" else {}
    patience_s = request.timeout_s + LAST_WAITS_S
    try:
        values = rank_values(out, ENTRY, world_size, asdict(request), LAUNCH_TIMEOUT_S, patience_s, env)
    except CommError as error:
        if not staged.may_explain(Path(request.met_folder)):
            raise
        text, never_met = f"{type(error).__name__}: {error}", staged.never_met(Path(request.met_folder), world_size)
        out.say(text)
        _say_never_met(out, never_met)
        out.emit([], sequences_equal=None, first_difference=None, error=text, never_met=never_met)
        return False
    never_met = staged.never_met(Path(request.met_folder), world_size)
    title = f"{request.choices['transport']}, {counted(world_size, 'rank')}"
    return _answer(out, values, title, never_met)


def _say_never_met(out: Output, never_met: Sequence[str]) -> None:
    if never_met:
        out.say(f"the staged fault was never met: {', '.join(never_met)}")


def _answer(out: Output, values: Sequence[dict[str, Any]], title: str, never_met: Sequence[str]) -> bool:
    """Say and write all there is to say; whether all is as it should be."""
    difference, ran = values[0]["difference"], values[0]["ran"]
    problems = [
        f"rank {rank}: {problem}" for rank, value in enumerate(values) for problem in value["report"]["problems"]
    ]
    outputs_equal = all(value["outputs_equal"] for value in values) if ran else None
    summary = summary_rows(values) if ran else []
    rows = [*sequence_rows(values), *summary]
    _show_sequences(out, values, title)
    if summary:
        out.say()
        out.say(table_of(summary, TIME_COLUMNS, f"{title}: times of all ranks"))
    out.say()
    for line in [*claims(values), *verdict(difference, ran, outputs_equal, len(values))]:
        out.say(line)
    _say_never_met(out, never_met)
    out.emit(
        rows,
        sequences_equal=difference is None,
        first_difference=difference,
        outputs_equal=outputs_equal,
        ran=ran,
        problems=problems,
        never_met=never_met,
        claims=[value["claim"] for value in values],
        reports=[value["report"] for value in values],
        plan=values[0]["plan"],
        samples=[value["samples"] for value in values],
    )
    return difference is None and outputs_equal is True and not problems and not never_met


def sequence_rows(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each op of each run on each rank."""
    return [
        {"run": run, "rank": rank, "order": order, **_named(op)}
        for rank, value in enumerate(values)
        for run in RUNS
        for order, op in enumerate(value["rows"][run])
    ]


def summary_rows(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each run, over all ranks' samples."""
    rows = []
    for run in RUNS:
        pooled = {
            name: sorted(one for value in values for one in value["samples"][run][name])
            for name in ("step_ms", "host_us", "launch_us")
        }
        rows.append(
            {
                "run": run,
                "kind": "summary",
                "median_ms": quantile(pooled["step_ms"], 0.5),
                "p50_ms": quantile(pooled["step_ms"], 0.5),
                "p99_ms": quantile(pooled["step_ms"], 0.99),
                "host_us": quantile(pooled["host_us"], 0.5),
                "launch_us": quantile(pooled["launch_us"], 0.5),
                "n": len(pooled["step_ms"]),
            }
        )
    return rows


def claims(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the graphs show, and what is wrong with them; ranks that say the same in one."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault((value["claim"], *value["report"]["problems"]), []).append(rank)
    lines = []
    for (claim, *problems), which in ranks.items():
        lines.append(f"{which_ranks(which)}: {claim}")
        lines += [f"  {problem}" for problem in problems]
    return lines


def verdict(difference: Mapping[str, Any] | None, ran: bool, outputs_equal: bool | None, num_ranks: int) -> list[str]:
    """The answer, in lines."""
    lines = []
    if difference is not None:
        lines.append(f"sequences DIFFER at {difference['text']}")
        if not ran:
            lines.append("nothing was run: unlike gathers make ranks wait in vain, or leave other bytes in a slot")
    else:
        lines.append(f"sequences equal: eager and captured, on {counted(num_ranks, 'rank')}")
    if outputs_equal is False:
        lines.append("outputs DIFFER between the eager run and the replay")
    return lines


def _named(op: Mapping[str, Any]) -> dict[str, Any]:
    """An op's row as the answer has it."""
    return {"bytes" if key == "num_bytes" else key: value for key, value in op.items()}


def _show_sequences(out: Output, values: Sequence[Mapping[str, Any]], title: str) -> None:
    """The sequence of rank 0, and of a rank that differs from it."""
    difference = values[0]["difference"]
    for rank in sorted({0, difference["rank"] if difference is not None else 0}):
        eager, graph = (values[rank]["rows"][run] for run in RUNS)
        shown = [
            _side_by_side(order, one, other)
            for order, (one, other) in enumerate(zip_longest(eager, graph))
            if order < MAX_SHOWN_ROWS
        ]
        how = "eager and captured" if values[0]["ran"] else "as bound, not run, and captured"
        out.say()
        out.say(table_of(shown, SEQUENCE_COLUMNS, f"{title}: the step of rank {rank}, {how}"))
        if len(eager) > MAX_SHOWN_ROWS:
            out.say(f"... and {len(eager) - MAX_SHOWN_ROWS} more ops: --json has all")


def _side_by_side(order: int, eager: Mapping[str, Any] | None, graph: Mapping[str, Any] | None) -> dict[str, Any]:
    row = {"order": order, **_named(eager or graph or {})}
    row["after"] = " ".join(map(str, row["after"])) or None
    if row["kind"] != "gather":
        row["bytes"] = None
    if graph is None:
        row["graph"] = "nothing"
    elif eager is None:
        row["graph"] = "only here"
    else:
        alike = {**eager, "after": None} == {**graph, "after": None}
        row["graph"] = "same" if alike else str(SeenOp.of(graph))
    return row
