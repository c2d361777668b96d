"""`graphshard doctor`: what this machine can do, each no with its reason, and memory that the dead still hold."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from graphshard.cli.common import COUNT, PLAIN_WIDTH, Output, answering
from graphshard.cli.doctor_checks import Check, machine_checks
from graphshard.cli.doctor_memory import Window, WindowScan, scan_windows
from graphshard.cli.doctor_rank import EXECUTORS
from graphshard.comm.launch import run_ranks
from graphshard.core.errors import DeviceError, GraphshardError
from graphshard.core.sizes import format_bytes

ENTRY = "graphshard.cli.doctor_rank:self_test"
NUM_RANKS = 2
LIMIT_S = 20.0
MIN_TEXT_WIDTH = 30

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
    for line in check_lines(checks, shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns):
        out.say(line)
    _show_windows(out, scan)
    works = all(one.can for one in tested)
    out.emit(rows, works=works, self_test_s=self_test_s, windows=_windows(scan))
    if not works:
        reasons = "; ".join(f"{one.check}: {one.why_not}" for one in tested if not one.can)
        raise DeviceError(f"the host runtime does not work on this machine - {reasons}")
    out.say(f"the host runtime works here: {NUM_RANKS} ranks read each other's windows ({self_test_s:.2f} s)")


def check_lines(checks: Sequence[Check], width: int) -> list[str]:
    """A table, wrapped at `width` between words alone: a path can be copied as it stands."""
    name_width = max(len(check.check) for check in checks)
    rows = [("what", "here", "found, or why not")]
    rows += [(one.check, "yes" if one.can else "no", one.why_not or one.found) for one in checks]
    lines = []
    for name, can, text in rows:
        head = f"{name:<{name_width}}  {can:<4}  "
        room = max(MIN_TEXT_WIDTH, width - len(head))
        pieces = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        lines += [head + pieces[0], *(" " * len(head) + piece for piece in pieces[1:])]
    return lines


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
    for line in holder_lines(pinned):
        out.say(f"  {line}")
    if pinned:
        out.say("  it is given back when a rank comes back in that place, or when those processes end")
    out.say(f"  not seen: {scan.blind_spots}")


def holder_lines(pinned: Sequence[Window]) -> list[str]:
    """What each process holds of ranks that ended; a window that several hold counts for each."""
    held: dict[int, list[int]] = {}
    for window in pinned:
        for pid in {*window.reader_pids, *window.holder_pids}:
            held.setdefault(pid, []).append(window.num_bytes)
    lines = []
    for pid, sizes in sorted(held.items()):
        whose = "of a rank that ended" if len(sizes) == 1 else f"in {len(sizes)} windows of ranks that ended"
        lines.append(f"{format_bytes(sum(sizes))} {whose} is held by pid {pid}")
    return lines
