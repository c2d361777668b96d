"""`graphshard tune`: measure blocks gathered and in slices into a file that `compile(dual="auto", tune=FILE)` reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from graphshard.cli.common import COUNT, Output, answering, check_writable, rank_values
from graphshard.cli.counts import Counts
from graphshard.cli.planning import RANKS, depth_option, transport_option, units_option
from graphshard.core.errors import GraphshardError
from graphshard.core.plan import Transport
from graphshard.report.tables import table_of
from graphshard.schedule.options import AUTO
from graphshard.schedule.tune_file import load_tuned, parse_tuned
from graphshard.schedule.tuned import MODES, Tuned, TunedRow

ENTRY = "graphshard.cli.tune_rank:measure"
RUN_TIMEOUT_S = 7200.0
AFTER_FAILURE_S = 10.0
COLUMNS = {
    "tokens_per_rank": "tokens a rank",
    "gather": "gather ms",
    "gather_spread": "p10-p90",
    "tensor_parallel": "tensor_parallel ms",
    "tensor_parallel_spread": "p10-p90",
    "faster": "faster",
    "x": "x",
}
MERGE_COLUMNS = {
    "tokens_per_rank": "tokens a rank",
    "separate_us": "reduce-scatter, all-gather us",
    "merged_us": "all-reduce us",
}

JSON_HELP = """JSON keys: `rows` {kind, tokens_per_rank, mode, median_ms, p10_ms, p90_ms, n, is_faster}: of a layer with
one such block, the slowest rank's; `path` of the file, `digest`, `kinds`, `tokens`, `not_sliced` (kinds that only
gathers can serve, and why), `settings`, `num_measured` and of them `num_before` (that the file held already); `merged`
{pairs, why_none, predicted: {tokens_per_rank, separate_us, merged_us}}: where an all-reduce could take the place of a
block's reduce-scatter and the next one's all-gather, and what either takes by formula."""


@click.command("tune", epilog=JSON_HELP)
@click.option(
    "-o",
    "--out",
    "path",
    type=click.Path(path_type=Path),
    default="tune.json",
    show_default=True,
    help="The file that is written, and gone on with if it is there.",
)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama or Kimi K3, not SmolLM2-135M.")
@click.option("--world-size", type=RANKS, default=2, show_default=True, help="Rank processes, all at work at once.")
@click.option("--tokens", type=Counts(), default="1,4,16,64,256", show_default=True, help="Of a rank in a step.")
@click.option("--steps", type=COUNT, default=30, show_default=True, help="Counted steps of each mode; medians count.")
@click.option("--layers", type=COUNT, default=4, show_default=True, help="With a block of each kind, at most.")
@click.option("--cache-length", type=COUNT, default=16, show_default=True, help="Positions of the KV cache.")
@transport_option
@units_option("auto")
@depth_option
@click.option(
    "--device", type=click.Choice(["host", "cuda"]), default="host", show_default=True, help="What the ranks run on."
)
@click.option("--hardware", metavar="NAME|FILE", help="A machine's figures for merged collectives, not measured ones.")
@answering
def command(
    out: Output,
    path: Path,
    model: Path | None,
    world_size: int,
    tokens: list[int],
    steps: int,
    layers: int,
    cache_length: int,
    transport: Transport,
    units: str,
    prefetch_depth: int | str,
    device: str,
    hardware: str | None,
) -> None:
    """Time blocks both ways that one stored shard serves: weights gathered, and tokens gathered instead.

    Equal blocks of several layers are measured once, in captured steps of a few layers, turn by turn. The file is
    replaced after every measurement, so a run that was ended loses none: the same command goes on where it stopped.
    """
    check_writable("--out", path)
    before = load_tuned(path).num_measured if path.exists() else 0
    asked = {"units": units, "prefetch_depth": prefetch_depth}
    job: dict[str, Any] = {
        "path": str(path.resolve()),
        "model": str(_folder(model)),
        "tokens": tokens,
        "num_steps": steps,
        "num_layers": layers,
        "cache_length": cache_length,
        "transport": transport,
        "device": device,
        "choices": {name: value for name, value in asked.items() if value != AUTO},
        "hardware": hardware,
    }
    if before:
        out.say(f"{path} has {before} measurements: going on with it")
    with _saying_what_stays(out, path, before):
        ranks = rank_values(out, ENTRY, world_size, job, RUN_TIMEOUT_S, AFTER_FAILURE_S)
    _answer(out, parse_tuned(ranks[0]), path, before)


def _folder(model: Path | None) -> Path:
    """The model's folder; refused here, before ranks are started, if it is none."""
    from graphshard.models.open import load_config

    if model is None:
        from graphshard.models.smollm2 import prepare_smollm2

        model = prepare_smollm2()
    load_config(model)
    return model


@contextmanager
def _saying_what_stays(out: Output, path: Path, before: int) -> Iterator[None]:
    """If the run does not come to its end: how far the file is, which held `before` measurements."""
    try:
        yield
    except KeyboardInterrupt:
        out.say(f"interrupted: {_stays(path)}")
        raise
    except GraphshardError:
        if path.exists() and load_tuned(path).num_measured > before:
            out.say(f"not finished: {_stays(path)}")
        raise


def _stays(path: Path) -> str:
    """What the next run will find."""
    if not path.exists():
        return "nothing was measured yet"
    tuned = load_tuned(path)
    total = tuned.num_measured + len(tuned.missing)
    return f"{path} has {tuned.num_measured} of {total} measurements, and the same command goes on from there"


def _answer(out: Output, tuned: Tuned, path: Path, before: int) -> None:
    for kind in tuned.kinds:
        rows = [_shown(*pair) for pair in _pairs(tuned, kind)]
        out.say(table_of(rows, COLUMNS, f"{kind}, a layer, {tuned.world_size} ranks, transport {tuned.transport}"))
    unclear = sum(_overlap(*pair) for kind in tuned.kinds for pair in _pairs(tuned, kind))
    if unclear:
        out.say(
            f"p10-p90 of both modes overlap in {unclear} of {tuned.num_measured} measurements: where that matters, "
            "quiet the machine, remove the file and measure again, with more --steps"
        )
    for why in tuned.notes["not_sliced"].values():
        out.say(f"always gathered: {why}")
    _say_merged(out, tuned.notes["merged"])
    out.say(f'{path} has {tuned.num_measured} measurements: graphshard.compile(..., dual="auto", tune="{path}")')
    rows = [
        {**asdict(row), "is_faster": row is _faster(gather, sliced)}
        for kind in tuned.kinds
        for gather, sliced in _pairs(tuned, kind)
        for row in (gather, sliced)
    ]
    facts: dict[str, Any] = {
        "kinds": tuned.kinds,
        "tokens": tuned.tokens,
        "settings": tuned.settings,
        "digest": tuned.digest,
    }
    facts |= {"num_measured": tuned.num_measured, "num_before": before, "merged": tuned.notes["merged"]}
    out.emit(rows, path=str(path), not_sliced=tuned.notes["not_sliced"], **facts)


def _pairs(tuned: Tuned, kind: str) -> list[tuple[TunedRow, TunedRow]]:
    """Gather and tensor_parallel of each number of tokens, in order."""
    rows = [row for row in tuned.rows if row.kind == kind]
    pairs = zip(rows[:: len(MODES)], rows[1 :: len(MODES)], strict=True)
    return sorted(pairs, key=lambda pair: pair[0].tokens_per_rank)


def _faster(gather: TunedRow, sliced: TunedRow) -> TunedRow:
    return gather if gather.median_ms <= sliced.median_ms else sliced


def _overlap(gather: TunedRow, sliced: TunedRow) -> bool:
    """Whether the spreads leave it open which is faster."""
    return gather.p10_ms <= sliced.p90_ms and sliced.p10_ms <= gather.p90_ms


def _shown(gather: TunedRow, sliced: TunedRow) -> dict[str, Any]:
    faster = _faster(gather, sliced)
    shown: dict[str, Any] = {"tokens_per_rank": gather.tokens_per_rank, "faster": faster.mode}
    for row in (gather, sliced):
        shown |= {row.mode: row.median_ms, f"{row.mode}_spread": f"{row.p10_ms:.3g}-{row.p90_ms:.3g}"}
    return {**shown, "x": max(gather.median_ms, sliced.median_ms) / faster.median_ms}


def _say_merged(out: Output, merged: dict[str, Any]) -> None:
    """Of the all-reduce that could stand for two collectives."""
    if merged["why_none"]:
        out.say(f"one all-reduce between two blocks: {merged['why_none']}")
    else:
        pairs = ", ".join(" and ".join(pair) for pair in merged["pairs"])
        out.say(f"one all-reduce between two blocks: possible between {pairs}; this version does not run it")
    if merged["predicted"]:
        title = "what it would take where nothing but a norm is between, by formula"
        out.say(table_of(merged["predicted"], MERGE_COLUMNS, title))
    else:
        out.say("what it would take: no figures of this machine are known; give --hardware")
