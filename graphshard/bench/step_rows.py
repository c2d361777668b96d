"""From the samples of several launches to rows. Plain Python: the command line reads them without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphshard.bench.stats import quantile, summarize

Measured = Mapping[str, Any]
"""What one rank of one launch measured, see `graphshard.bench.step.measure_steps`."""

FACTS = ("run", "unit", "prefetch_depth", "executor", "chosen")


def label_of(facts: Measured) -> str:
    """`graph weight/0/cooperative`: what tells a row from the others of its batch size."""
    parts = [str(facts[key]) for key in ("unit", "prefetch_depth", "executor") if facts[key] is not None]
    return " ".join([facts["run"], "/".join(parts)]).rstrip()


def step_rows(launches: Sequence[Sequence[Measured]]) -> list[dict[str, Any]]:
    """A row for each batch size and contender; `launches[i][rank]` is what that rank measured.

    `median_ms` is the median of the launches' medians, other quantiles are over all samples of all launches and ranks.
    `x_replicated` is the median over launches of a launch's median beside that of its replicated run; the same for
    processor time is `x_replicated_cpu`, the better judge while other programs want the cores.
    """
    rows = []
    for b, batch_size in enumerate(launches[0][0]["batch_sizes"]):
        medians = _launch_medians(launches, b, "samples_ms")
        cpu_medians = _launch_medians(launches, b, "cpu_ms")
        for c, facts in enumerate(launches[0][0]["contenders"]):
            found = [rank["contenders"][c]["batches"][b] for launch in launches for rank in launch]
            samples = sorted(ms for one in found for ms in one["samples_ms"])
            rows.append(
                {
                    "batch_size": batch_size,
                    **{key: facts[key] for key in FACTS},
                    "median_ms": quantile(sorted(medians[c]), 0.5),
                    "p10_ms": quantile(samples, 0.1),
                    "p90_ms": quantile(samples, 0.9),
                    "p99_ms": quantile(samples, 0.99),
                    "n": len(samples),
                    "launches": len(launches),
                    "launch_medians_ms": medians[c],
                    "x_replicated": _ratio(medians[c], _medians_of(launches, medians, "replicated")),
                    "cpu_ms": quantile(sorted(cpu_medians[c]), 0.5),
                    "x_replicated_cpu": _ratio(cpu_medians[c], _medians_of(launches, cpu_medians, "replicated")),
                    "identical": all(one["max_abs_diff"] == 0 for one in found),
                    "max_abs_diff": max(one["max_abs_diff"] for one in found),
                    "agrees": all(one["agrees"] for one in found),
                }
            )
    return rows


def chosen_rows(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """For each batch size the chosen row beside its peers: how much slower than replicated, faster than FSDP2."""
    found = []
    for row in (row for row in rows if row["chosen"]):
        peers = {peer["run"]: peer for peer in rows if peer["batch_size"] == row["batch_size"]}
        times_faster = {
            f"{run}_x": _ratio(peers[run]["launch_medians_ms"], row["launch_medians_ms"])
            for run in ("fsdp2", "transformers")
            if run in peers
        }
        ours = {key: row[key] for key in ("batch_size", "x_replicated", "x_replicated_cpu")}
        found.append({**ours, **times_faster})
    return found


def samples_of(launches: Sequence[Sequence[Measured]]) -> list[dict[str, Any]]:
    """Raw samples: for each batch size and contender a list by launch of lists by rank, in the order of the steps."""
    return [
        {
            "batch_size": batch_size,
            "what": label_of(facts),
            "samples_ms": [[rank["contenders"][c]["batches"][b]["samples_ms"] for rank in ranks] for ranks in launches],
        }
        for b, batch_size in enumerate(launches[0][0]["batch_sizes"])
        for c, facts in enumerate(launches[0][0]["contenders"])
    ]


def _launch_medians(launches: Sequence[Sequence[Measured]], b: int, what: str) -> list[list[float]]:
    """For each contender its median in each launch, over that launch's ranks together."""
    return [
        [
            summarize([ms for rank in launch for ms in rank["contenders"][c]["batches"][b][what]]).median
            for launch in launches
        ]
        for c in range(len(launches[0][0]["contenders"]))
    ]


def core_share(rows: Sequence[Measured]) -> float:
    """The share of their time in which steps had a core, in the worst row of one busy thread a rank.

    Steps below 10 ms are left out: what they wait for is mostly their own threads' waking.
    """
    judged = (row for row in rows if row["executor"] == "cooperative" and row["median_ms"] >= 10)
    return min((row["cpu_ms"] / row["median_ms"] for row in judged), default=1.0)


def _medians_of(
    launches: Sequence[Sequence[Measured]], medians: Sequence[Sequence[float]], run: str
) -> Sequence[float] | None:
    for c, facts in enumerate(launches[0][0]["contenders"]):
        if facts["run"] == run:
            return medians[c]
    return None


def _ratio(ours: Sequence[float], theirs: Sequence[float] | None) -> float | None:
    """The median of launch by launch ratios: launches differ more than steps within one do."""
    if theirs is None:
        return None
    return quantile(sorted(a / b for a, b in zip(ours, theirs, strict=True)), 0.5)
