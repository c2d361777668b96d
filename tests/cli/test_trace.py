"""`graphshard trace`: valid trace events, spans that do not overlap, and a picture."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_runner import Answer, apart, here
from small_llama import CONFIG, write_small_llama

from graphshard.core.timeline import Span, Timeline, unit_times
from graphshard.report.perfetto import trace_events

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_llama(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module", params=["threaded", pytest.param("cooperative", marks=pytest.mark.slow)])
def traced(request: pytest.FixtureRequest, folder: Path) -> tuple[Answer, Path, Path]:
    path, png = (folder.parent / f"{request.param}.{ending}" for ending in ("json", "png"))
    plan = ["--units", "layer", "--prefetch-depth", 1, "--executor", request.param]
    answer = apart("trace", "--model", folder, *plan, "--out", path, "--png", png, "--json", "-")
    assert answer.code == 0, answer.err
    return answer, path, png


def by_lane(rows: list[dict[str, Any]]) -> dict[tuple[int, str], list[dict[str, Any]]]:
    lanes: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["begin_us"]):
        lanes.setdefault((row["rank"], row["lane"]), []).append(row)
    return lanes


def test_spans_of_a_stream_do_not_overlap(traced: tuple[Answer, Path, Path]) -> None:
    lanes = by_lane(traced[0].json["rows"])
    assert set(lanes) == {(rank, lane) for rank in range(WORLD_SIZE) for lane in ("compute", "copy")}
    for spans in lanes.values():
        assert all(span["begin_us"] < span["end_us"] for span in spans)
        assert all(one["end_us"] <= other["begin_us"] + 1e-6 for one, other in pairwise(spans))


def test_every_unit_is_gathered_and_read_on_every_rank(traced: tuple[Answer, Path, Path]) -> None:
    rows = traced[0].json["rows"]
    for rank in range(WORLD_SIZE):
        mine = [row for row in rows if row["rank"] == rank]
        copied = [row["unit"] for row in mine if row["kind"] == "copy"]
        assert copied == [unit for unit in range(CONFIG.num_layers) for _ in range(WORLD_SIZE)]
        computed = [row for row in mine if row["kind"] == "compute"]
        assert [row["layer"] for row in computed if row["unit"] is not None] == list(range(CONFIG.num_layers))
        assert {"embed", "head"} <= {row["segment"] for row in computed}
        for unit in range(CONFIG.num_layers):  # what is read was gathered before
            end = max(row["end_us"] for row in mine if row["kind"] == "copy" and row["unit"] == unit)
            begin = min(row["end_us"] for row in computed if row["unit"] == unit)
            assert end <= begin
    assert all(row["step_us"] > 0 and row["timed_ms"] > 0 for row in traced[0].json["ranks"])
    assert [unit["name"] for unit in traced[0].json["units"]] == ["layers.0", "layers.1", "layers.2"]


def test_the_file_is_what_perfetto_reads(traced: tuple[Answer, Path, Path]) -> None:
    answer, path, png = traced
    trace = json.loads(path.read_text())
    check_trace_events(trace["traceEvents"])
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(answer.json["rows"])
    assert {event["cat"] for event in complete} >= {"compute", "copy"}
    names = {(e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {(rank, f"rank {rank}") for rank in range(WORLD_SIZE)}
    assert png.read_bytes().startswith(b"\x89PNG\r\n") and png.stat().st_size > 10_000


def check_trace_events(events: list[dict[str, Any]]) -> None:
    """By the trace event format: every event has these, complete ones have a duration, threads have names."""
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert events and {event["ph"] for event in events} <= {"M", "X"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"] in ("compute", "copy", "wait")
            assert (event["pid"], event["tid"]) in threads
            assert set(event["args"]) <= {"unit", "layer", "segment"}


def test_ranks_share_a_clock() -> None:
    def timeline(rank: int, offset_us: float) -> Timeline:
        return Timeline(rank, (Span("compute", "compute", "q_proj", 1.0, 3.0, 4, 2, "q_proj"),), offset_us)

    events = [event for event in trace_events([timeline(0, 1e9 + 10), timeline(1, 1e9)]) if event["ph"] == "X"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in events] == [(0, 11.0, 2.0), (1, 1.0, 2.0)]
    assert events[0]["args"] == {"unit": 4, "layer": 2, "segment": "q_proj"}


def test_units_sum_their_copies_and_their_compute() -> None:
    spans = [
        Span("copy", "copy", "unit=1", 0.0, 2.0, 1),
        Span("copy1", "copy", "unit=1", 0.0, 3.0, 1),
        Span("compute", "wait", "wait", 0.0, 3.0, 1),
        Span("compute", "compute", "q_proj", 3.0, 7.0, 1),
        Span("compute", "compute", "head", 7.0, 8.0),
    ]
    (one,) = unit_times(spans)
    assert (one.unit, one.gather_us, one.compute_us) == (1, 5.0, 4.0)


def test_bad_requests_are_said_before_ranks_are_started(folder: Path, tmp_path: Path) -> None:
    assert here("trace", "--model", folder, "--out", tmp_path / "no" / "trace.json").code == 2
    answer = here("trace", "--model", folder, "--batch-size", 0)
    assert answer.code == 2 and "--batch-size" in answer.err
