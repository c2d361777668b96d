"""What rank processes run for the command line: entries for `graphshard.comm.launch`, JSON in, JSON out.

Rank 0 shares the terminal with the command: what it prints is what the user sees while it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from graphshard.bench.decode import Decoded, num_steps
from graphshard.bench.reference import greedy_tokens
from graphshard.bench.side_by_side import (
    Make,
    Workload,
    compare_choices,
    difference,
    measured,
    run_workload,
    step_ms,
)
from graphshard.bench.stats import summarize
from graphshard.bench.trace import trace_step
from graphshard.cli.loading import compile_shown
from graphshard.cli.prompts import Codec, Typewriter
from graphshard.cli.streams import forgive_encoding
from graphshard.comm.group import Group
from graphshard.models.llama import load_llama
from graphshard.runtime.runtime import Runtime

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class DemoRequest:
    """What the demo's ranks do; the same on all of them."""

    model: str
    prompts: list[list[int]]
    num_tokens: int
    runs: list[str]
    choices: dict[str, Any]
    trace: bool
    reference: bool


def gather(group: Group, request: dict[str, Any]) -> list[dict[str, object]]:
    """`bench gather` on one rank."""
    from graphshard.bench.gather import GatherRequest, measure_gather

    return measure_gather(group, GatherRequest(**request))


def demo(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """`demo` on one rank: replicated, then sharded; each is gone before the next is built."""
    forgive_encoding()
    request = DemoRequest(**values)
    torch.set_num_threads(1)
    workload = Workload.deal(request.prompts, request.num_tokens, group)
    make = maker(group, Path(request.model), workload)
    say = print if group.rank == 0 else _say_nothing
    decoded: dict[str, Decoded] = {}
    facts: dict[str, Any] = {}

    def replicated(runtime: Runtime) -> None:
        decoded["replicated"] = run_workload(runtime, workload, "graph")
        say(_line("replicated", decoded["replicated"]), flush=True)

    def sharded(runtime: Runtime) -> None:
        for run in request.runs:
            writer = _typewriter(group, request, run, say)
            decoded[run] = run_workload(runtime, workload, run, writer)
            say(("\n" if writer else "") + _line(run, decoded[run]), flush=True)
        facts.update(facts_of(runtime, workload))
        if request.trace:
            spans = trace_step(runtime, workload.shape)
            facts["spans"] = [asdict(span) for span in spans] if group.rank == 0 else []

    pss = {
        "replicated": measured(group, lambda: make(plan="replicated"), replicated),
        "sharded": measured(group, lambda: make(plan="auto", **request.choices), sharded),
    }
    tokens = None
    if request.reference:
        say("transformers' own greedy generation ...", flush=True)
        tokens = greedy_tokens(Path(request.model), workload.prompts, request.num_tokens)
    return {
        **facts,
        "tokens": {run: one.tokens for run, one in decoded.items()},
        "tokens_transformers": tokens,
        "differences": {run: difference(decoded["replicated"], decoded[run]) for run in request.runs},
        "min_gap": min(one.min_gap for one in decoded.values()),
        "samples_ms": {run: step_ms(one) for run, one in decoded.items()},
        "pss": {run: asdict(one) for run, one in pss.items()},
    }


def matrix(group: Group, values: dict[str, Any]) -> list[dict[str, Any]]:
    """`demo --matrix` on one rank (a process or a thread): a row for each of `choices` and `runs`."""
    torch.set_num_threads(1)
    workload = Workload.deal(values["prompts"], values["num_tokens"], group)
    make = maker(group, Path(values["model"]), workload)
    return compare_choices(group, make, workload, values["choices"], values["runs"])


def maker(group: Group, folder: Path, workload: Workload) -> Make:
    """Builds runtimes of the model in `folder` for `workload`, all of one cache length."""
    length = -(-num_steps(workload.prompts, workload.num_tokens) // 16) * 16
    longest = max(value for value, _ in group.all_gather(length, name="cache length"))  # type: ignore[type-var]
    model = load_llama(folder, workload.shape.batch_size, int(str(longest)))

    def make(*, plan: Any, **choices: Any) -> Runtime:
        sizes = [workload.shape.batch_size]
        ignore = model.redundant_tensors
        return compile_shown(
            model,
            group,
            checkpoint=folder,
            ignore=ignore,
            plan=plan,
            capture_sizes=sizes,
            timeout_s=TIMEOUT_S,
            **choices,
        )

    return make


def facts_of(runtime: Runtime, workload: Workload) -> dict[str, Any]:
    """What was planned, for the report."""
    plan, layout = runtime.plan, runtime.layout
    return {
        "total_bytes": sum(weight.num_bytes for weight in runtime.model.weights),
        "shardable_bytes": layout.shardable_bytes,
        "kept_bytes": layout.resident_bytes,
        "chunk_bytes": layout.shard_bytes,
        "slot_bytes": layout.slot_bytes,
        "largest_unit_bytes": layout.largest_unit_bytes,
        "num_units": len(plan.units),
        "num_slots": plan.num_slots,
        "units": plan.unit_policy,
        "prefetch_depth": plan.prefetch_depth,
        "head": plan.head,
        "transport": plan.transport,
        "executor": plan.executor,
        "reasons": list(plan.reasons),
        "step_shape": str(workload.shape),
        "graph_nodes": runtime.graph(workload.shape.batch_size).num_nodes(),
    }


def _typewriter(
    group: Group, request: DemoRequest, run: str, say: Callable[..., None]
) -> Callable[[int, int], None] | None:
    """Prints rank 0's first prompt and its continuation while the captured graph generates it."""
    if group.rank != 0 or run != "graph":
        return None
    codec = Codec(Path(request.model))
    writer = Typewriter(codec)
    say(f"\n    {codec.decode(request.prompts[0])}", end="", flush=True)
    return lambda sequence, token: writer.add(token) if sequence == 0 else None


def _line(run: str, decoded: Decoded) -> str:
    return f"{run:<10}  {len(decoded.step_s)} steps, {summarize(step_ms(decoded)).text('ms')} a step on rank 0"


def _say_nothing(*values: object, **options: object) -> None:
    del values, options
