"""The same prompts through a replicated runtime and a sharded one, eager and captured: are the logits the same bits?

Both run the same segments at the same step shape, cache length and alignment; only where weights lie differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from graphshard.bench.decode import (
    Decoded,
    OnToken,
    cache_length,
    clear_state,
    decode,
    first_difference,
    num_steps,
    step_of,
)
from graphshard.bench.memory import Pss, read_pss, settle
from graphshard.bench.stats import summarize
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.runtime import Runtime

NUM_WARMUPS = 3
"""Steps at the beginning of a run that its times leave out."""


class Make(Protocol):
    """Builds and captures a runtime for the workload's step shape (collective)."""

    def __call__(self, *, plan: Any, **choices: Any) -> Runtime:
        """`plan` and `choices` as `graphshard.compile` takes them."""


@dataclass(frozen=True)
class Workload:
    """One rank's prompts, as tokens, and how many tokens to generate for each."""

    prompts: Sequence[Sequence[int]]
    num_tokens: int
    num_steps: int
    """Of the rank whose prompts are longest."""

    @property
    def shape(self) -> StepShape:
        """Of every step."""
        return StepShape(len(self.prompts))

    @staticmethod
    def deal(prompts: Sequence[Sequence[int]], num_tokens: int, group: Group) -> Workload:
        """Rank r takes prompts r, r + world_size, ...; all ranks get as many, the last ones repeat the first."""
        total = -(-len(prompts) // group.world_size) * group.world_size
        dealt = [prompts[i % len(prompts)] for i in range(total)]
        return Workload(dealt[group.rank :: group.world_size], num_tokens, num_steps(prompts, num_tokens))


def run_workload(runtime: Runtime, workload: Workload, run: str, on_token: OnToken | None = None) -> Decoded:
    """Decode from clean caches; `run` is eager or graph. Where steps need all ranks, all make as many."""
    clear_state(runtime, workload.shape)
    step = step_of(runtime, workload.shape, run)
    length = cache_length(runtime, workload.shape)
    decoded = decode(step, workload.prompts, workload.num_tokens, on_token, num_positions=length)
    for _ in range(workload.num_steps - len(decoded.step_s) if runtime.is_collective else 0):
        step.replay()
    return decoded


def measured(group: Group, make: Callable[[], Runtime], body: Callable[[Runtime], None]) -> Pss:
    """Build a runtime, run `body` on it, and read this rank's PSS while all ranks hold theirs; then close it."""
    with make() as runtime:
        body(runtime)
        settle()
        group.barrier("before PSS")
        pss = read_pss()
        group.barrier("after PSS")
    del runtime
    settle()
    return pss


def difference(reference: Decoded, other: Decoded) -> int | None:
    """The first step whose logits differ in any bit (or token in value); None if none does."""
    at = first_difference(reference.hashes, other.hashes)
    return 0 if at is None and reference.tokens != other.tokens else at


def step_ms(decoded: Decoded) -> list[float]:
    """Step times in milliseconds, warm-ups left out if there are others."""
    kept = decoded.step_s[NUM_WARMUPS:] or decoded.step_s
    return [seconds * 1e3 for seconds in kept]


def compare_choices(
    group: Group, make: Make, workload: Workload, choices: Sequence[Mapping[str, Any]], runs: Sequence[str]
) -> list[dict[str, Any]]:
    """One row for each of `choices` (as `make_plan` takes them) and `runs`: identical to replicated, or where not.

    `identical` speaks for all ranks (collective); times are this rank's.
    """
    with make(plan="replicated") as runtime:
        reference = run_workload(runtime, workload, "graph")
        group.barrier("replicated done")
    del runtime
    rows = []
    for choice in choices:
        with make(plan="auto", **choice) as runtime:
            for run in runs:
                decoded = run_workload(runtime, workload, run)
                told = group.all_gather(difference(reference, decoded), name="difference")
                rows.append(_row(runtime, run, decoded, [value for value, _ in told]))
        del runtime
        settle()
    return rows


def _row(runtime: Runtime, run: str, decoded: Decoded, differences: Sequence[object]) -> dict[str, Any]:
    plan, layout = runtime.plan, runtime.layout
    summary = summarize(step_ms(decoded))
    return {
        "world_size": plan.world_size,
        "run": run,
        "units": plan.unit_policy,
        "prefetch_depth": plan.prefetch_depth,
        "head": plan.head,
        "transport": plan.transport,
        "num_slots": plan.num_slots,
        "executor": plan.executor if run == "graph" else None,
        "identical": all(at is None for at in differences),
        "first_differences": list(differences),
        "median_ms": summary.median,
        "n": summary.n,
        "num_units": len(plan.units),
        "chunk_bytes": layout.shard_bytes,
        "slot_bytes": layout.slot_bytes,
    }
