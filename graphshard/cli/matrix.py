"""`demo --matrix`: the same comparison over world sizes, threads and processes, depths and head policies."""

from __future__ import annotations

from typing import Any

from graphshard.bench.threads import run_threads
from graphshard.cli import ranks
from graphshard.cli.common import Output, rank_values
from graphshard.report.tables import table_of

WORLD_SIZES = (1, 2, 3, 4)
NUM_PROMPT_TOKENS = 5
NUM_TOKENS = 4
RUN_TIMEOUT_S = 600.0
CHOICES: tuple[dict[str, Any], ...] = (
    {"prefetch_depth": 0, "head": "inside"},
    {"prefetch_depth": 1, "head": "inside"},
    {"prefetch_depth": 2, "head": "inside"},
    {"prefetch_depth": 1, "head": "outside"},
    {"prefetch_depth": 1, "head": "tail"},
    {"prefetch_depth": 2, "head": "tail"},
)


def run_matrix(
    out: Output, model: str, prompts: list[list[int]], num_tokens: int, common: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every world size, as threads and as processes, with every one of CHOICES, eager and graph: a row each.

    `common` are choices that all have.
    """
    rows: list[dict[str, Any]] = []
    for world_size in WORLD_SIZES:
        request = matrix_request(model, prompts, num_tokens, common, world_size)
        for kind in ("threads", "processes"):
            out.say(f"matrix: world size {world_size}, {kind} ...")
            rows += [{"ranks": kind, **row} for row in _run(out, kind, world_size, request)]
    columns = {"ranks": "ranks", "world_size": "N", "run": "run", "prefetch_depth": "depth", "head": "head"}
    more = {"num_slots": "slots", "executor": "executor", "median_ms": "ms a step", "identical": "same bits"}
    out.say(
        table_of(rows, {**columns, **more}, f"matrix: {sum(row['identical'] for row in rows)} of {len(rows)} identical")
    )
    return rows


def matrix_request(
    model: str, prompts: list[list[int]], num_tokens: int, common: dict[str, Any], world_size: int
) -> dict[str, Any]:
    """What `ranks.matrix` takes: two short prompts a rank, a few tokens. One rank shards nothing: it has one plan."""
    choices = CHOICES if world_size > 1 else CHOICES[:1]
    return {
        "model": model,
        "prompts": [prompt[:NUM_PROMPT_TOKENS] for prompt in prompts[: 2 * world_size]],
        "num_tokens": min(NUM_TOKENS, num_tokens),
        "choices": [{**choice, **common} for choice in choices],
        "runs": ["eager", "graph"],
    }


def _run(out: Output, kind: str, world_size: int, request: dict[str, Any]) -> list[dict[str, Any]]:
    if kind == "threads":
        return run_threads(lambda group: ranks.matrix(group, request), world_size, RUN_TIMEOUT_S)[0]
    found: list[dict[str, Any]] = rank_values(out, "graphshard.cli.ranks:matrix", world_size, request, RUN_TIMEOUT_S)[0]
    return found
