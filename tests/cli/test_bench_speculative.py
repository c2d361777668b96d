"""`graphshard bench speculative` at a small size: rows, trace, picture, exit code. Never its speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runner import apart, here
from test_trace import check_trace_events

from graphshard.core.errors import SpecError

SMALL = ("--fold-ms", 0.3, "--size", "64KiB", "--target-size", "128KiB", "--samples", 2)


def test_rows_trace_and_picture(tmp_path: Path) -> None:
    path, png = tmp_path / "trace.json", tmp_path / "steps.png"
    answer = here("bench", "speculative", *SMALL, "--trace", path, "--png", png, "--json", "-")
    told = answer.json
    assert answer.code == (0 if told["is_hidden"] else 1), answer.err
    rows = told["rows"]
    assert [(row["setting"], row["stream"]) for row in rows] == [
        ("own", "own"),
        ("beside", "own"),
        ("shared", "shared"),
    ]
    assert told["is_hidden"] == (rows[0]["overlap_share"] >= 0.9)
    assert all(row["n"] == len(row["samples"]) == 4 and 0 <= row["predicted_share"] <= 1 for row in rows)
    assert (told["draft_bytes"], told["target_bytes"], told["fold_ms"]) == (65536, 131072, 0.3)
    assert set(told["alone"]) == {"fold_us", "draft_us", "target_us"} and told["ranks"] in ("in turn", "at once")
    assert "prefetch_launch graph=draft unit=0 slot=0 stream=copy" in "\n".join(told["sequences"]["shared"])
    assert "64.0 KiB" in answer.err and "128.0 KiB" in answer.err and "queues behind" in answer.err
    assert "this run measured" in told["predicted_by"] and told["predicted_by"] in answer.err
    check_trace(path)
    assert png.read_bytes().startswith(b"\x89PNG\r\n") and png.stat().st_size > 10_000


def check_trace(path: Path) -> None:
    """Both ranks and the prediction: a process each, lanes of each graph, the fold and the gather by name."""
    events = json.loads(path.read_text())["traceEvents"]
    check_trace_events(events)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(processes.values()) == ["rank 0", "rank 0 predicted", "rank 1"]
    for pid in processes:
        mine = [event for event in events if event["pid"] == pid]
        lanes = {event["args"]["name"] for event in mine if event["name"] == "thread_name"}
        assert lanes >= {"draft.compute", "draft.copy", "draft.prefetch", "target.compute", "target.copy"}
        names = {event["name"] for event in mine if event["ph"] == "X"}
        assert names >= {"commit_fold", "prefetch draft unit=0", "prefetch target unit=0", "proj"}


def test_bad_requests_are_said_before_ranks_are_started(tmp_path: Path) -> None:
    for options in (("--draft-layers", 2), ("--fold-ms", 0), ("--trace", tmp_path / "no" / "trace.json")):
        answer = here("bench", "speculative", *options)
        assert answer.code == 2 and str(options[0]) in answer.err
    answer = here("bench", "speculative", "--ranks", "in-turn", "--transport", "nccl")
    assert answer.code == 2 and "needs all ranks at once" in answer.err
    missing = here("bench", "speculative", "--predict", tmp_path / "nothing.json")
    assert missing.code == SpecError.exit_code and "nothing.json" in missing.err


@pytest.mark.slow
def test_over_nccl() -> None:
    answer = apart("bench", "speculative", *SMALL, "--transport", "nccl", "--json", "-")
    assert answer.code == (0 if answer.json["is_hidden"] else 1), answer.err
    assert answer.json["ranks"] == "at once"
