"""`graphshard demo`: a real model decodes with sharded weights on rank processes, beside the replicated model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from graphshard.bench.stats import summarize
from graphshard.cli.common import COUNT, Names, Output, answering, check_writable, rank_values
from graphshard.cli.planning import depth_option, head_option, transport_option, units_option
from graphshard.cli.prompts import PROMPTS, Codec
from graphshard.core.counts import counted
from graphshard.core.sizes import format_bytes
from graphshard.models.config import load_llama_config
from graphshard.report.tables import table_of

RUN_TIMEOUT_S = 900.0
RUNS = ("eager", "graph")
PLAN_KEYS = ("units", "prefetch_depth", "head", "transport", "executor", "reasons")


JSON_HELP = """JSON keys: `rows` {run, weights, median_ms, p10_ms, p90_ms, n, pss_bytes (all ranks), identical}, with
--matrix one more for each run tried; `identical` (all of it), `logits_identical`, `tokens_equal_transformers` (null
without them); `tokens`, `tokens_replicated` and `tokens_transformers` by prompt, `text` of the first `prompt`;
`first_differences` by run and rank; `chunk_bytes`, `slot_bytes`, ... of one rank; `plan`, `graph_nodes`, `step_shape`,
`step_ms`, `samples_ms`, `pss_bytes`, `pss_saved_bytes`, `pss_by_rank`, `total_s`."""


@click.command("demo", epilog=JSON_HELP)
@click.option("--model", type=click.Path(path_type=Path), help="Folder of a llama checkpoint instead of SmolLM2-135M.")
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Rank processes.")
@click.option(
    "--tokens", type=COUNT, default=64, show_default=True, help="Tokens to generate for each of the 8 prompts."
)
@click.option(
    "--run", "runs", type=Names(RUNS), default="eager,graph", show_default=True, help="How sharded steps run."
)
@units_option("auto")
@depth_option
@head_option
@transport_option
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    default="graphshard-demo.png",
    show_default=True,
    help="Where one step is drawn.",
)
@click.option("--no-reference", is_flag=True, help="Leave out transformers' own generation.")
@click.option("--matrix", is_flag=True, help="Also try world sizes 1-4, threads and processes, depths and heads.")
@answering
def command(
    out: Output,
    model: Path | None,
    world_size: int,
    tokens: int,
    runs: list[str],
    units: str,
    prefetch_depth: int | str,
    head: str,
    transport: str,
    png: Path,
    no_reference: bool,
    matrix: bool,
) -> bool:
    """Generate greedily with 1/N of the layers' bytes on each of N ranks; compare with the whole model, bit by bit.

    Exit code 1: a bit of the logits, or a token, differs.
    """
    if not runs:
        raise click.UsageError("--run names at least one of eager, graph")
    check_writable("--png", png)
    begin = time.perf_counter()
    folder = model or _smollm2()
    codec, vocab_size = Codec(folder), load_llama_config(folder).vocab_size  # refused before anything is said
    _say_ready(out, folder, time.perf_counter() - begin, world_size)
    request: dict[str, Any] = {
        "model": str(folder),
        "prompts": [codec.encode(prompt, vocab_size) for prompt in PROMPTS],
        "num_tokens": tokens,
        "runs": runs,
        "choices": {"units": units, "prefetch_depth": prefetch_depth, "head": head, "transport": transport},
        "trace": True,
        "reference": not no_reference,
    }
    values = rank_values(out, "graphshard.cli.ranks:demo", world_size, request, RUN_TIMEOUT_S)
    answer = _answer(values, runs, folder, codec)
    _draw(values[0]["spans"], png, answer)
    rows = answer.pop("rows")
    _show(out, rows, answer)
    if matrix:
        from graphshard.cli.matrix import run_matrix

        tried = run_matrix(out, str(folder), request["prompts"], tokens, {"units": units, "transport": transport})
        answer["matrix_identical"] = all(row["identical"] for row in tried)
        answer["identical"] = answer["identical"] and answer["matrix_identical"]
        rows += tried
    answer["total_s"] = time.perf_counter() - begin
    out.say(f"{_verdict(answer)}; timeline: {png}; {answer['total_s']:.1f} s in all")
    out.emit(rows, **answer)
    return bool(answer["identical"])


def _say_ready(out: Output, folder: Path, seconds: float, world_size: int) -> None:
    out.say(f"model ready after {seconds:.1f} s: {folder.name}; starting {counted(world_size, 'rank')}")


def _smollm2() -> Path:
    from graphshard.models.smollm2 import prepare_smollm2

    return Path(prepare_smollm2())


def _answer(values: list[dict[str, Any]], runs: list[str], folder: Path, codec: Codec) -> dict[str, Any]:
    """The demo's JSON keys, from all ranks' results; lists by prompt are in the prompts' order."""
    made = {run: _by_prompt([value["tokens"][run] for value in values]) for run in ("replicated", *runs)}
    last = made[runs[-1]]
    theirs = None
    if values[0]["tokens_transformers"] is not None:
        theirs = _by_prompt([value["tokens_transformers"] for value in values])
    differences = {run: [value["differences"][run] for value in values] for run in runs}
    same_bits = all(at is None for found in differences.values() for at in found)
    samples = {run: [ms for value in values for ms in value["samples_ms"][run]] for run in made}
    pss = {run: sum(value["pss"][run]["total_bytes"] for value in values) for run in ("replicated", "sharded")}
    kept = {key: value for key, value in values[0].items() if key.endswith("_bytes") or key.startswith("num_")}
    rows = [_row(run, samples[run], pss, differences) for run in made]
    return {
        "model": folder.name,
        "device": "host",
        "world_size": len(values),
        "prompt": PROMPTS[0],
        "text": codec.decode(last[0]),
        "tokens": last,
        "tokens_replicated": made["replicated"],
        "tokens_transformers": theirs,
        "identical": same_bits and theirs in (None, last),
        "logits_identical": same_bits,
        "tokens_equal_transformers": None if theirs is None else theirs == last,
        "first_differences": differences,
        "min_top2_gap": min(value["min_gap"] for value in values),
        **kept,
        "plan": {key: values[0][key] for key in PLAN_KEYS},
        "graph_nodes": values[0]["graph_nodes"],
        "step_shape": values[0]["step_shape"],
        "step_ms": {run: summarize(samples[run]).median for run in made},
        "samples_ms": samples,
        "pss_bytes": pss,
        "pss_saved_bytes": pss["replicated"] - pss["sharded"],
        "pss_by_rank": [value["pss"] for value in values],
        "rows": rows,
    }


def _by_prompt(dealt: list[list[list[int]]]) -> list[list[int]]:
    """Undo the dealing: rank r's i-th sequence is prompt r + i * world_size; repeats are dropped."""
    return [dealt[i % len(dealt)][i // len(dealt)] for i in range(len(PROMPTS))]


def _row(run: str, samples: list[float], pss: dict[str, int], differences: dict[str, list[Any]]) -> dict[str, Any]:
    summary = summarize(samples)
    found = differences.get(run)
    return {
        "run": run,
        "weights": "replicated" if run == "replicated" else "sharded",
        "median_ms": summary.median,
        "p10_ms": summary.p10,
        "p90_ms": summary.p90,
        "n": summary.n,
        "pss_bytes": pss["replicated" if run == "replicated" else "sharded"],
        "identical": None if found is None else all(at is None for at in found),
    }


def _draw(spans: list[dict[str, Any]], png: Path, answer: dict[str, Any]) -> None:
    from graphshard.bench.trace import Span
    from graphshard.report.timeline import draw_timeline

    plan = answer["plan"]
    title = (
        f"{answer['model']}: one traced step of rank 0 of {answer['world_size']}, {answer['num_units']} units "
        f"({plan['units']}), depth {plan['prefetch_depth']}, {plan['executor']}"
    )
    draw_timeline([Span(**span) for span in spans], png, title)


def _show(out: Output, rows: list[dict[str, Any]], answer: dict[str, Any]) -> None:
    columns = {
        "run": "run",
        "weights": "weights",
        "median_ms": "ms a step",
        "p10_ms": "p10",
        "p90_ms": "p90",
        "n": "n",
        "pss_bytes": "memory of all ranks (PSS)",
        "identical": "same bits",
    }
    out.say()
    out.say(table_of(rows, columns, f"{counted(answer['world_size'], 'rank')}, step shape {answer['step_shape']}"))
    sizes = {key: format_bytes(answer[key]) for key in ("total_bytes", "shardable_bytes", "kept_bytes")}
    out.say(
        f"weights {sizes['total_bytes']}, of which {sizes['shardable_bytes']} are sharded and "
        f"{sizes['kept_bytes']} kept whole; each rank holds {format_bytes(answer['chunk_bytes'])} of chunks and "
        f"{format_bytes(answer['slot_bytes'])} of slots; measured saving {format_bytes(answer['pss_saved_bytes'])}"
    )
    for reason in answer["plan"]["reasons"]:
        out.say(f"  why: {reason}")


def _verdict(answer: dict[str, Any]) -> str:
    if answer["identical"]:
        also = "" if answer["tokens_equal_transformers"] is None else ", and tokens equal transformers' own"
        return f"identical: logits of every step equal the replicated model's, bit for bit{also}"
    if not answer["logits_identical"]:
        return f"NOT identical: first differing steps by rank {answer['first_differences']}"
    if answer.get("matrix_identical") is False:
        return "NOT identical: see the matrix"
    return f"NOT identical to transformers' tokens (the nearest tie was {answer['min_top2_gap']:.2g})"
