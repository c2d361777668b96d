"""All steps' files as one results.json, and as a table for people."""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAILED = ("failed", "cut short", "not run")
HOST_DRIVER = "graphshard's host driver"
HOST_NCCL = "graphshard's host NCCL"
"""What a dry run is made over: its rows say so, for they show nothing of a GPU or of NVIDIA's NCCL."""

Row = dict[str, Any]


@dataclass
class StepResult:
    """How one step ended; its rows are in `file`, as far as it came."""

    step: str
    file: Path
    seconds: float
    reason: str = ""
    """Why it has not run to its end; empty if it has."""
    is_skipped: bool = False

    def rows(self) -> list[Row]:
        """The step's rows, and one for the step itself where it did not end well."""
        rows: list[Row] = []
        if self.file.is_file():
            rows = json.loads(self.file.read_text())["rows"]
        for row in rows:
            row["step"] = self.step
            if row["status"] == "running":
                row |= {"status": "cut short", "reason": self.reason or "its program ended"}
        if self.is_skipped:
            rows.append({"step": self.step, "check": "all", "status": "skipped", "reason": self.reason})
        elif not rows or (self.reason and all(row["status"] not in FAILED for row in rows)):
            rows.append({"step": self.step, "check": "all", "status": "not run", "reason": self.reason or "no results"})
        return rows


def outcome(result: StepResult) -> str:
    """A step's end in a line."""
    counts = Counter(row["status"] for row in result.rows())
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{told} in {result.seconds:.1f} s" + (f" ({result.reason})" if result.reason else "")


def write_results(
    out: Path, config: Mapping[str, Any], results: Sequence[StepResult], seconds: float
) -> tuple[str, bool]:
    """Write results.json and table.md; the table, and whether anything failed."""
    rows = [row for result in results for row in result.rows()]
    if config.get("device") == "host":
        for row in (row for row in rows if row["step"] != "build"):
            row["over"] = HOST_NCCL if row["step"] == "nccl" else HOST_DRIVER
    counts = {status: sum(row["status"] == status for row in rows) for status in ("passed", "skipped", *FAILED)}
    has_failed = any(counts[status] for status in FAILED)
    document = {
        "rows": rows,
        "machine": {"kernel": platform.release(), "cores": len(os.sched_getaffinity(0)), "host": platform.machine()},
        "config": dict(config),
        "steps": [{"step": result.step, "seconds": result.seconds, "reason": result.reason} for result in results],
        "counts": counts,
        "seconds": round(seconds, 1),
    }
    _replace(out / "results.json", json.dumps(document, indent=1) + "\n")
    table = table_text(rows, counts, seconds)
    _replace(out / "table.md", table + "\n")
    return table, has_failed


def table_text(rows: Sequence[Row], counts: Mapping[str, int], seconds: float) -> str:
    """A line a check; tests that passed are counted."""
    lines = ["| step | check | status | s | what |", "| --- | --- | --- | --- | --- |"]
    passed_tests = [row for row in rows if "::" in row["check"] and row["status"] == "passed"]
    for row in rows:
        if row in passed_tests:
            continue
        what = row.get("reason") or figures(row)
        what = f"{row['over']}: {what}" if "over" in row else what
        cells = (row["step"], row["check"], row["status"], str(row.get("seconds", "")), what)
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ")[:900] for cell in cells) + " |")
    for step, count in Counter(row["step"] for row in passed_tests).items():
        lines.append(f"| {step} | {count} tests | passed | | |")
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return "\n".join([*lines, "", f"{counted} in {seconds:.0f} s"])


def figures(row: Row) -> str:
    """What the table says of a check: the figures that are looked for."""
    return "; ".join(text for name, of in _FIGURES.items() if name in row for text in of(row))


def _latency(row: Row) -> list[str]:
    return [
        f"{one['what']} p50 {one['p50_us']:.1f} us, p99 {one['p99_us']:.1f} us (n={row['num_replays']})"
        for one in row["latency"]
    ]


def _sizes(row: Row) -> list[str]:
    texts = []
    for one in row["sizes"]:
        gathers = ", ".join(f"x{g['fan_out']} {g['GBps']:.0f} ({g['share']:.0%})" for g in one["gathers"])
        limits = f"{one['limit_by_chunks_GBps']:.0f} GB/s, as one copy {one['limit_GBps']:.0f}"
        texts.append(f"{one['num_bytes'] / 2**20:g} MiB: limit {limits}; gathers {gathers}")
    return texts


def _depths(row: Row) -> list[str]:
    return [f"depth {one['depth']}: {one['exposed_us_per_unit']:.1f} us exposed a unit" for one in row["depths"]]


_FIGURES: dict[str, Callable[[Row], list[str]]] = {
    "device": lambda row: [f"{row['device']}, driver {row['driver_version']}"],
    "is_equal": lambda row: [f"equal bytes, {'read-only' if row['is_read_only'] else 'writable'} mapping"],
    "imported_from": lambda row: [f"cuda.h {row['cuda_include']}; imported from {row['imported_from']}"],
    "weight_bytes": lambda row: [f"{row['weight_bytes'] / 1e9:.2f} GB of weights"],
    "runs": lambda row: ["bit-equal" if all(r["first_unlike_step"] is None for r in row["runs"]) else "not bit-equal"],
    "gather_copies": lambda row: [f"{row['gather_kernels']} kernels and {row['gather_copies']} copies in gathers"],
    "launch_us": lambda row: [f"launch {row['launch_us']:.0f} us"] if row["launch_us"] is not None else [],
    "exposed_us_per_unit": lambda row: [f"{row['exposed_us_per_unit']:.1f} us exposed a unit"],
    "replay_to_plain": lambda row: [f"{row['replay_to_plain']:.3f} x a plain graph"],
    "latency": _latency,
    "sizes": _sizes,
    "slow_down": lambda row: [f"gemm x{row['slow_down']:.3f} beside copies of {row['copies_GBps_alone']:.0f} GB/s"],
    "depths": _depths,
    "us_per_replay": lambda row: [f"{row['num_replays']} replays, {row['us_per_replay']:.1f} us each"],
    "num_wrong": lambda row: [f"{row['num_replays']} replays, {row['num_wrong']} wrong bytes"],
    "label": lambda row: [row["label"]],
    "version": lambda row: [f"{'it says that it is ' if 'over' in row else ''}NCCL {row['version']}"],
}


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
