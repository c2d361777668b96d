"""`graphshard doctor`: what this machine can do, each no with its reason, and memory that the dead still hold."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from graphshard.cli.common import COUNT, Output, answering
from graphshard.cli.doctor_checks import Check, machine_checks
from graphshard.cli.doctor_memory import WindowScan, scan_windows
from graphshard.cli.doctor_rank import EXECUTORS
from graphshard.comm.launch import run_ranks
from graphshard.core.errors import DeviceError, GraphshardError
from graphshard.core.sizes import format_bytes
from graphshard.report.tables import table_of

ENTRY = "graphshard.cli.doctor_rank:self_test"
NUM_RANKS = 2
LIMIT_S = 20.0

JSON_HELP = """JSON keys: `rows` {check, can, found, why_not}; `works` (the self-test's answer); `self_test_s`;
`windows` {num_windows, num_bytes, pinned [{inode, num_bytes, reader_pids, holder_pids}], pinned_bytes, blind_spots}."""


@click.command("doctor", epilog=JSON_HELP)
@click.option("--world-size", type=COUNT, default=2, show_default=True, help="Ranks that you mean to run here.")
@answering
def command(out: Output, world_size: int) -> None:
    """Look at this machine, and run two ranks that read each other's memory.

    Exit code 3: the host runtime does not work here. Anything else that is missing is said, with its reason.
    """
    scan = scan_windows()
    begin = time.perf_counter()
    tested = self_test()
    self_test_s = time.perf_counter() - begin
    checks = [*tested, *machine_checks(world_size)]
    rows = [{"check": one.check, "can": one.can, "found": one.found, "why_not": one.why_not} for one in checks]
    shown = [{**row, "text": row["found"] if row["why_not"] is None else row["why_not"]} for row in rows]
    out.say(table_of(shown, {"check": "what", "can": "here", "text": "found, or why not"}))
    _show_windows(out, scan)
    works = all(one.can for one in tested)
    out.emit(rows, works=works, self_test_s=self_test_s, windows=_windows(scan))
    if not works:
        reasons = "; ".join(f"{one.check}: {one.why_not}" for one in tested if not one.can)
        raise DeviceError(f"the host runtime does not work on this machine - {reasons}")
    out.say(f"the host runtime works here: {NUM_RANKS} ranks read each other's windows ({self_test_s:.2f} s)")


def self_test() -> list[Check]:
    """Two rank processes read each other's windows: a row for processes, and one for each way to run a list."""
    try:
        results = run_ranks(ENTRY, NUM_RANKS, timeout_s=LIMIT_S, group_timeout_s=LIMIT_S)
    except (GraphshardError, OSError) as error:
        return [Check("rank processes", "", f"{type(error).__name__}: {error}")]
    failed = [result.line(NUM_RANKS) for result in results if not result.is_good]
    if failed:
        return [Check("rank processes", "", "; ".join(failed))]
    checks = [Check("rank processes", f"{NUM_RANKS} met, and mapped each other's windows read-only")]
    for name in ("eager", *EXECUTORS):
        told = [f"rank {result.rank}: {result.value[name]}" for result in results if result.value[name]]
        what = "eager list" if name == "eager" else f"executor {name}"
        checks.append(Check(what, "copies of all windows, two streams", "; ".join(told) or None))
    return checks


def _windows(scan: WindowScan) -> dict[str, Any]:
    return {
        "num_windows": len(scan.windows),
        "num_bytes": sum(window.num_bytes for window in scan.windows),
        "pinned": [asdict(window) for window in scan.pinned],
        "pinned_bytes": sum(window.num_bytes for window in scan.pinned),
        "blind_spots": scan.blind_spots,
    }


def _show_windows(out: Output, scan: WindowScan) -> None:
    pinned = scan.pinned
    total = format_bytes(sum(window.num_bytes for window in scan.windows))
    out.say()
    out.say(f"windows of ranks on this machine: {len(scan.windows)}, {total}; without an owner: {len(pinned)}")
    for window in pinned:
        out.say(f"  {format_bytes(window.num_bytes)} of a rank that ended is held by {_pids(window)}")
    if pinned:
        out.say("  it is given back when a rank comes back in that place, or when those processes end")
    out.say(f"  not seen: {scan.blind_spots}")


def _pids(window: Any) -> str:
    holders: Sequence[int] = sorted({*window.reader_pids, *window.holder_pids})
    return "pid " + ", ".join(map(str, holders))
