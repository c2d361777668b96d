"""Rows of `bench load`: what ranks measured, put together, and judged by the targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphshard.bench.peak import highest_sum, samples_of
from graphshard.bench.stats import summarize
from graphshard.core.sizes import format_bytes

MAX_READ_SHARE = 1.02
"""Bytes read by all ranks, over the checkpoint's: resident weights are read by each rank."""
MAX_TIME_SHARE = 1.3
"""Seconds, over those of the plain read of the same turn, the median over turns."""

WAYS = {
    "fsdp2": "every rank fills a whole module from the state dict of load_file, then fully_shard",
    "fsdp2_mapped": "fully_shard of a module without memory, then set_model_state_dict from load_file's mapped files",
}
"""How FSDP2 comes to its shards, by peer."""

Ranks = Sequence[Mapping[str, Any]]
Row = dict[str, Any]


def load_row(what: str, ranks: Ranks, run: str = "load") -> Row:
    """One row of what all ranks measured of `run`. Seconds are the slowest rank's of each turn, CPU seconds all ranks'.

    `peak_bytes` is the highest sum over ranks of sampled memory, less what they held before; it and `bytes_read` are
    those of a load, and None for plain reads.
    """
    samples_s, num_bytes = turns_s(ranks, run), int(ranks[0]["checkpoint_bytes"])
    one = summarize(samples_s)
    cpu_s = [sum(turn) for turn in zip(*(rank["samples_s"][f"{run}_cpu_s"] for rank in ranks), strict=True)]
    row = {
        "what": what,
        "checkpoint_bytes": num_bytes,
        "seconds": one.median,
        "p10_s": one.p10,
        "p90_s": one.p90,
        "n": one.n,
        "samples_s": samples_s,
        "cpu_s": summarize(cpu_s).median,
        "GBps": num_bytes / one.median / 1e9,
        **dict.fromkeys(("peak_bytes", "pss_bytes", "limit_bytes", "bytes_read", "x_checkpoint", "x_read")),
    }
    if run == "load":
        bytes_read = sum(rank["bytes_read"] for rank in ranks)
        row |= {"peak_bytes": peak_bytes(ranks), "bytes_read": bytes_read, "x_checkpoint": bytes_read / num_bytes}
        if all("limit_bytes" in rank for rank in ranks):
            row |= {key: sum(rank[key] for rank in ranks) for key in ("limit_bytes", "pss_bytes")}
    return row


def turns_s(ranks: Ranks, run: str) -> list[float]:
    """Seconds of `run` until the slowest rank was done, by turn."""
    return [max(turn) for turn in zip(*(rank["samples_s"][f"{run}_s"] for rank in ranks), strict=True)]


def peak_bytes(ranks: Ranks) -> int:
    """The most that all ranks held at one time beyond what they held before."""
    highest, before = (highest_sum([samples_of(rank[key]) for rank in ranks]) for key in ("sampled", "baseline"))
    return highest - before


def time_share(ranks: Ranks, run: str = "load") -> float:
    """The median over turns of the seconds of `run` over the plain read's of the same turn."""
    pairs = zip(turns_s(ranks, run), turns_s(ranks, "read"), strict=True)
    return summarize([one / read for one, read in pairs]).median


def missed(row: Mapping[str, Any], num_wrong: int) -> list[str]:
    """What `row`, with its `limit_bytes` and `x_read`, should have met and did not, a line each."""
    found = []
    if num_wrong:
        found.append(f"{num_wrong} pieces hold other bytes than the checkpoint")
    if row["peak_bytes"] > row["limit_bytes"]:
        found.append(f"peak {format_bytes(row['peak_bytes'])} is above {format_bytes(row['limit_bytes'])}")
    if row["x_checkpoint"] > MAX_READ_SHARE:
        found.append(f"{row['x_checkpoint']:.3f} x the checkpoint's bytes were read, at most {MAX_READ_SHARE} x may be")
    if row["x_read"] is not None and row["x_read"] > MAX_TIME_SHARE:
        found.append(f"{row['x_read']:.2f} x the plain read's time, at most {MAX_TIME_SHARE} x may be")
    return found
