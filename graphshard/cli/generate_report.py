"""Figures of `generate`: latency, what each unit costs, what fits beside the weights; sharded beside replicated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from graphshard.bench.stats import quantile, summarize
from graphshard.cli.common import Output
from graphshard.cli.generate_job import RankStory
from graphshard.core.sizes import format_bytes
from graphshard.report.tables import table_of

MAX_UNIT_ROWS = 40
"""More units than this are shown by kind; JSON has all."""
NUM_WARMUPS = 3
"""Steps at the beginning of each batch that times leave out if there are others."""
WAYS = ("sharded", "replicated")


def summary_of(stories: Sequence[RankStory], rows: Sequence[dict[str, Any]], order: Sequence[int]) -> dict[str, Any]:
    """What the answer says of the whole job."""
    step_s = [batch["step_s"] for story in stories for batch in story.batches or ()]
    return {
        "tokens": [row["tokens"] for row in rows],
        "lost": lost_of(stories, rows),
        "restarts": [{"rank": story.rank, "reason": reason} for story in stories for reason in story.ended],
        "order": list(order),
        "time_per_token_ms": _times([s * 1e3 for steps in step_s for s in steps[NUM_WARMUPS:] or steps]),
        "ttft_ms": _times([row["ttft_ms"] for row in rows if row["ttft_ms"] is not None]),
    }


def lost_of(stories: Sequence[RankStory], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The prompts that ranks took with them, by rank; one without prompts has lost none."""
    lost = [story for story in stories if story.batches is None]
    by_rank = {story.rank: [row["prompt_index"] for row in rows if row["rank"] == story.rank] for story in lost}
    return [
        {"rank": story.rank, "prompt_indices": by_rank[story.rank], "reason": story.lost}
        for story in lost
        if by_rank[story.rank]
    ]


def report_of(stories: Sequence[RankStory], memory_bytes: int, cache_length: int) -> dict[str, Any]:
    """The report, from what each rank measured; `memory_bytes` is what one rank may use."""
    reports = [story.report for story in stories if story.report is not None]
    units = [
        max(same, key=lambda one: one["gather_us"]) for same in zip(*(one["units"] for one in reports), strict=True)
    ]
    ways = {way: [_of_rank(one[way], memory_bytes, cache_length) for one in reports] for way in WAYS}
    return {
        "identical": all(one["identical"] for one in reports),
        "memory_bytes": memory_bytes,
        "units": units,
        "plan": reports[0]["plan"],
        "kv_tokens": _kv_tokens(ways),
        **ways,
    }


def _kv_tokens(ways: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
    """Tokens whose keys and values fit on every rank, by way, and the gain; `updating`: while all weights change."""
    fit = {way: min(one["kv_tokens"] for one in ranks) for way, ranks in ways.items()}
    updating = {way: min(one["kv_tokens_updating"] for one in ranks) for way, ranks in ways.items()}
    return {
        **fit,
        "gained": fit["sharded"] - fit["replicated"],
        **{f"{way}_updating": tokens for way, tokens in updating.items()},
        "gained_updating": updating["sharded"] - updating["replicated"],
    }


def show_report(out: Output, answer: dict[str, Any], report: dict[str, Any] | None, no_report: str) -> None:
    """Say it in tables."""
    out.say()
    if report is None:
        out.say(f"no report: {no_report}")
        return
    _show_units(out, report)
    rows = [_row(way, report[way]) for way in WAYS]
    columns = {
        "way": "weights",
        "median": "ms a token",
        "p99": "p99",
        "weight_bytes": "weights a rank",
        "kv_bytes": "KV a sequence",
        "concurrency": "sequences that fit",
        "kv_tokens": "KV tokens",
        "startup_peak_rss_bytes": "start-up RSS",
        "startup_peak_pss_bytes": "PSS",
        "pss_bytes": "PSS of all ranks",
    }
    out.say(table_of(rows, columns, f"a rank of {len(report['sharded'])}, {format_bytes(report['memory_bytes'])} each"))
    _say_kv_tokens(out, report["kv_tokens"])
    ttft = answer["ttft_ms"]
    if ttft is not None:
        out.say(f"first token after {ttft['median']:.3g} ms (p99 {ttft['p99']:.3g}, {ttft['n']} prompts)")
    for reason in report["plan"]["reasons"]:
        out.say(f"  why: {reason}")
    same = "identical to the replicated model's, bit for bit" if report["identical"] else "NOT the replicated model's"
    out.say(f"logits of every step are {same}")


def _say_kv_tokens(out: Output, tokens: dict[str, int]) -> None:
    out.say(
        f"KV tokens that fit: {tokens['sharded']:,} beside sharded weights, {tokens['replicated']:,} beside replicated "
        f"ones: {tokens['gained']:+,}; with room to update all weights at once {tokens['sharded_updating']:,}, "
        f"{tokens['replicated_updating']:,}: {tokens['gained_updating']:+,}"
    )


def _show_units(out: Output, report: dict[str, Any]) -> None:
    """One row a unit, or, if they are many, one for all whose names differ in numbers only."""
    units = report["units"]
    if not units:
        return
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in units:
        name = re.sub(r"[0-9]+", "*", one["name"]) if len(units) > MAX_UNIT_ROWS else one["name"]
        groups.setdefault(name, []).append(one)
    rows = [
        {"name": name, "num": len(same), **{key: _median(same, key) for key in ("gather_us", "compute_us")}}
        | {"unit_bytes": max(one["num_bytes"] for one in same)}
        for name, same in groups.items()
    ]
    sums = {key: sum(one[key] for one in units) for key in ("gather_us", "compute_us")}
    rows.append({"name": "all", "num": len(units), **sums, "unit_bytes": sum(one["num_bytes"] for one in units)})
    columns = {"name": "units", "num": "n", "unit_bytes": "bytes", "gather_us": "gather us", "compute_us": "compute us"}
    out.say(table_of(rows, columns, "a traced step, not a timed one (medians, and the sum)"))


def _median(rows: Sequence[dict[str, Any]], key: str) -> float:
    return summarize([row[key] for row in rows]).median


def _row(way: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst = {key: max(one[key] for one in ranks) for key in ("weight_bytes", "kv_bytes_per_sequence")}
    peaks = {key: max(one[key] for one in ranks) for key in ("startup_peak_rss_bytes", "startup_peak_pss_bytes")}
    times = [one["time_per_token_ms"] for one in ranks if one["time_per_token_ms"] is not None]
    return {
        "way": way,
        **worst,
        "kv_bytes": worst["kv_bytes_per_sequence"],
        **peaks,
        "median": max(one["median"] for one in times),
        "p99": max(one["p99"] for one in times),
        "concurrency": min(one["concurrency"] for one in ranks),
        "kv_tokens": min(one["kv_tokens"] for one in ranks),
        "pss_bytes": sum(one["pss_bytes"] for one in ranks),
    }


def _of_rank(found: dict[str, Any], memory_bytes: int, cache_length: int) -> dict[str, Any]:
    """One rank's figures; sequences that fit are what is left beside weights and other buffers, in KV caches.

    An update stages the bytes that the rank keeps, its chunks and whole weights, before it replaces them.
    """
    left = memory_bytes - found["weight_bytes"] - found["other_bytes"]
    staged, a_sequence = found["chunk_bytes"] + found["resident_bytes"], found["kv_bytes_per_sequence"]
    step_s = found["step_s"]
    return {
        **{key: value for key, value in found.items() if key != "step_s"},
        "concurrency": max(0, left // a_sequence),
        "kv_tokens": max(0, left * cache_length // a_sequence),
        "kv_tokens_updating": max(0, (left - staged) * cache_length // a_sequence),
        "staged_bytes": staged,
        "time_per_token_ms": _times([seconds * 1e3 for seconds in step_s[NUM_WARMUPS:] or step_s]),
    }


def _times(samples_ms: Sequence[float]) -> dict[str, float] | None:
    if not samples_ms:
        return None
    one = summarize(samples_ms)
    p99 = quantile(sorted(samples_ms), 0.99)
    return {"median": one.median, "p10": one.p10, "p90": one.p90, "p99": p99, "n": one.n}
