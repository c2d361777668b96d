"""The benchmarks' functions at small sizes: the rows they promise, never their speed."""

from __future__ import annotations

import pytest
from cli_runner import apart, here

from graphshard.bench.memory import read_pss
from graphshard.bench.stats import summarize


def test_gather_rows_over_two_processes() -> None:
    options = ("--sizes", "64KiB,1MiB", "--repeats", 2, "--cold-size", "2MiB")
    answer = apart("bench", "gather", *options, "--json", "-")
    assert answer.code == 0, answer.err
    rows = answer.json["rows"]
    assert [(row["num_bytes"], row["what"]) for row in rows] == [
        (size, what) for size in (65536, 2**20) for what in ("pull", "memcpy", "gloo")
    ]
    for row in rows:
        assert row["GBps"] == pytest.approx(row["num_bytes"] / row["us"] / 1e3)
        assert len(row["samples_us"]) == row["n"] == 2
        assert row["p10_us"] <= row["us"] <= row["p90_us"]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_gather_of_three_ranks_without_peers(transport: str) -> None:
    """Three ranks: chunks are padded, and each slot is checked against what its owners wrote."""
    options = ["--world-size", 3, "--sizes", "100KiB", "--peers", "", "--repeats", 1, "--cold-size", "1MiB"]
    answer = apart("bench", "gather", *options, "--transport", transport, "--json", "-")
    assert answer.code == 0, answer.err
    assert [row["what"] for row in answer.json["rows"]] == [transport]


@pytest.mark.parametrize("depth", [0, 1])
def test_dispatch_rows(depth: int) -> None:
    answer = here("bench", "dispatch", "--units", 5, "--repeats", 3, "--prefetch-depth", depth, "--json", "-")
    assert answer.code == 0, answer.err
    runs = [(row["run"], row["executor"]) for row in answer.json["rows"]]
    assert runs == [("eager", None), ("graph", "cooperative"), ("graph", "threaded")]
    assert all(row["num_ops"] == 20 and row["ns_per_op"] > 0 and row["n"] == 3 for row in answer.json["rows"])


def test_compile_rows() -> None:
    answer = here("bench", "compile", "--layers", 6, "--capture-sizes", 3, "--repeats", 2, "--json", "-")
    assert answer.code == 0
    for row in answer.json["rows"]:
        parts = row["plan_s"] + row["layout_s"] + row["programs_s"] + row["verify_s"]
        assert row["total_s"] == pytest.approx(parts)
        assert row["num_units"] == 6 and row["num_programs"] == 3


def test_summaries_interpolate() -> None:
    summary = summarize([4.0, 1.0, 3.0, 2.0])
    assert (summary.median, summary.n) == (2.5, 4)
    assert summary.p10 == pytest.approx(1.3) and summary.p90 == pytest.approx(3.7)
    assert summarize([7.0]).p90 == 7.0


def test_pss_sees_what_is_touched() -> None:
    before = read_pss()
    held = bytearray(32 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    after = read_pss()
    assert after.anon_bytes - before.anon_bytes >= 30 * 2**20
    assert after.total_bytes > after.file_bytes
    del held
