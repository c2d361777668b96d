"""`demo --matrix`: the same comparison over world sizes, threads and processes, depths and head policies."""

from __future__ import annotations

from typing import Any

from graphshard.bench.threads import run_threads
from graphshard.cli import ranks
from graphshard.cli.common import Output
from graphshard.comm.launch import raise_first_failure, run_ranks
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


def run_matrix(out: Output, demo_request: dict[str, Any]) -> list[dict[str, Any]]:
    """Every world size, as threads and as processes, with every one of CHOICES, eager and graph: a row each."""
    rows: list[dict[str, Any]] = []
    for world_size in WORLD_SIZES:
        request = {
            "model": demo_request["model"],
            "prompts": [prompt[:NUM_PROMPT_TOKENS] for prompt in demo_request["prompts"][: 2 * world_size]],
            "num_tokens": min(NUM_TOKENS, demo_request["num_tokens"]),
            "choices": [{**choice, "units": demo_request["choices"]["units"]} for choice in CHOICES],
            "runs": ["eager", "graph"],
        }
        for kind in ("threads", "processes"):
            out.say(f"matrix: world size {world_size}, {kind} ...")
            rows += [{"ranks": kind, **row} for row in _run(kind, world_size, request)]
    columns = {"ranks": "ranks", "world_size": "N", "run": "run", "prefetch_depth": "depth", "head": "head"}
    more = {"num_slots": "slots", "executor": "executor", "median_ms": "ms a step", "identical": "same bits"}
    out.say(
        table_of(rows, {**columns, **more}, f"matrix: {sum(row['identical'] for row in rows)} of {len(rows)} identical")
    )
    return rows


def _run(kind: str, world_size: int, request: dict[str, Any]) -> list[dict[str, Any]]:
    if kind == "threads":
        return run_threads(lambda group: ranks.matrix(group, request), world_size, RUN_TIMEOUT_S)[0]
    results = run_ranks("graphshard.cli.ranks:matrix", world_size, arguments=[request], timeout_s=RUN_TIMEOUT_S)
    raise_first_failure(results)
    found: list[dict[str, Any]] = results[0].value
    return found
