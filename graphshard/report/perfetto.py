"""Timelines as Chrome's trace events, for ui.perfetto.dev: a process for each rank, a thread for each stream.

Format: "Trace Event Format", JSON object form; complete events (ph X) and metadata (ph M), times in us.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphshard.core.timeline import Span, Timeline


def trace_events(timelines: Sequence[Timeline]) -> list[dict[str, Any]]:
    """The events of all ranks on one clock that begins with the first rank's step."""
    first = min((one.offset_us for one in timelines), default=0.0)
    return [event for one in timelines for event in _events(one, one.offset_us - first)]


def write_perfetto(timelines: Sequence[Timeline], path: Path, about: Mapping[str, Any]) -> None:
    """Write the trace to `path`; `about` goes beside it, as JSON."""
    trace = {"traceEvents": trace_events(timelines), "displayTimeUnit": "ms", "otherData": dict(about)}
    path.write_text(json.dumps(trace, allow_nan=False))


def _events(timeline: Timeline, shift_us: float) -> Iterator[dict[str, Any]]:
    pid = timeline.rank
    thread_of = {lane: number for number, lane in enumerate(timeline.lanes, start=1)}
    yield _metadata("process_name", pid, 0, {"name": f"rank {timeline.rank}"})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": timeline.rank})
    for lane, tid in thread_of.items():
        yield _metadata("thread_name", pid, tid, {"name": lane})
        yield _metadata("thread_sort_index", pid, tid, {"sort_index": tid})
    for span in timeline.spans:
        yield {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "ts": shift_us + span.begin_us,
            "dur": span.duration_us,
            "pid": pid,
            "tid": thread_of[span.lane],
            "args": _arguments(span),
        }


def _metadata(name: str, pid: int, tid: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": arguments}


def _arguments(span: Span) -> dict[str, Any]:
    known = {"unit": span.unit, "layer": span.layer, "segment": span.segment}
    return {key: value for key, value in known.items() if value is not None}
