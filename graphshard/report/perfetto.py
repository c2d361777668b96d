"""Timelines as Chrome's trace events, for ui.perfetto.dev: a process for each rank, a thread for each stream.

Predicted steps stand below the measured ones, as processes of their own.

Format: "Trace Event Format", JSON object form; complete events (ph X) and metadata (ph M), times in us.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphshard.core.timeline import Span, Timeline

PREDICTED_PID = 100_000
"""Process ids of predicted steps begin here, so that they follow all ranks."""


def trace_events(timelines: Sequence[Timeline], predicted: Sequence[Timeline] = ()) -> list[dict[str, Any]]:
    """The events of all ranks on one clock that begins with the first rank's step; predicted steps begin there too."""
    first = min((one.offset_us for one in timelines), default=0.0)
    events = [event for one in timelines for event in _events(one, one.offset_us - first, one.rank, f"rank {one.rank}")]
    for one in predicted:
        events += _events(one, 0.0, PREDICTED_PID + one.rank, f"rank {one.rank} predicted")
    return events


def write_perfetto(
    timelines: Sequence[Timeline], path: Path, about: Mapping[str, Any], predicted: Sequence[Timeline] = ()
) -> None:
    """Write the trace to `path`; `about` goes beside it, as JSON."""
    trace = {"traceEvents": trace_events(timelines, predicted), "displayTimeUnit": "ms", "otherData": dict(about)}
    path.write_text(json.dumps(trace, allow_nan=False))


def _events(timeline: Timeline, shift_us: float, pid: int, name: str) -> Iterator[dict[str, Any]]:
    thread_of = {lane: number for number, lane in enumerate(timeline.lanes, start=1)}
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": pid})
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
