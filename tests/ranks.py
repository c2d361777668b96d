"""Run a function on n ranks, as threads or as processes, with one code path; bounded; results by rank.

    def step(group, factor):
        return sum(value for value, _ in group.all_gather(group.rank * factor))

    assert run_on_ranks(step, 3, 10, mode="threads") == [30, 30, 30]

The function is a module's top-level one; for processes its arguments and result are JSON.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.comm.group import LocalGroup
from graphshard.comm.launch import RankProcesses, failure_text

TESTS = Path(__file__).parent
MODES = ("threads", "processes")


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    error_type: str = ""
    error: str = ""
    """The message; empty if the rank returned."""
    traceback: str = ""
    ended: float = 0.0


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *arguments: Any, mode: str = "threads", timeout_s: float = 120.0
) -> list[Any]:
    """What `function(group, *arguments)` returns on each rank; AssertionError with the first failure in full."""
    outcomes = try_on_ranks(function, world_size, *arguments, mode=mode, timeout_s=timeout_s)
    failed = sorted((outcome for outcome in outcomes if outcome.error), key=lambda outcome: outcome.ended)
    if failed:
        lines = [f"rank {failed[0].rank} of {world_size} failed first ({mode}): {failed[0].error}", failed[0].traceback]
        lines += [f"rank {o.rank}: {o.error_type}: {o.error.splitlines()[0]}" for o in failed[1:]]
        raise AssertionError("\n".join(lines))
    return [outcome.value for outcome in outcomes]


def try_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    mode: str = "threads",
    timeout_s: float = 120.0,
    group_timeout_s: float | None = None,
    after_failure_s: float | None = None,
) -> list[Outcome]:
    """How `function(group, *arguments)` ended on each rank. The group's own waits end a little before `timeout_s`.

    Processes that still run `after_failure_s` after one has failed are killed.
    """
    limit_s = 0.8 * timeout_s if group_timeout_s is None else group_timeout_s
    if mode == "threads":
        return _run_threads(function, world_size, arguments, timeout_s, limit_s)
    assert mode == "processes", f"mode {mode!r} is none of {MODES}"
    with start_processes(function, world_size, *arguments, group_timeout_s=limit_s) as processes:
        results = processes.wait(timeout_s, after_failure_s)
        return [Outcome(r.rank, r.value, r.error_type, r.error, r.traceback, r.ended_s) for r in results]


@contextlib.contextmanager
def start_processes(
    function: Callable[..., Any], world_size: int, *arguments: Any, group_timeout_s: float | None = 30.0, **more: Any
) -> Iterator[RankProcesses]:
    """Running rank processes of `function`, for tests that signal them; `more` goes to RankProcesses."""
    with RankProcesses(
        entry_of(function),
        world_size,
        arguments=arguments,
        group_timeout_s=group_timeout_s,
        env=rank_environment(),
        **more,
    ) as ranks:
        yield ranks


def entry_of(function: Callable[..., Any]) -> str:
    """The `file.py:function` by which a rank process finds a test's function."""
    return f"{inspect.getfile(function)}:{function.__qualname__}"


def rank_environment() -> dict[str, str]:
    """PYTHONPATH for rank processes: the package, and the tests' helpers."""
    folders = sorted(str(path) for path in TESTS.iterdir() if path.is_dir())
    places = [str(TESTS.parent), str(TESTS), *folders, os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(place for place in places if place)}


def _run_threads(
    function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], timeout_s: float, group_timeout_s: float
) -> list[Outcome]:
    outcomes = [Outcome(rank, error="still running") for rank in range(world_size)]
    groups = LocalGroup(world_size, timeout_s=group_timeout_s)

    def run(rank: int) -> None:
        try:
            with groups[rank] as group:
                outcomes[rank] = Outcome(rank, function(group, *arguments))
        except BaseException as error:
            text = str(error) or type(error).__name__
            outcomes[rank] = Outcome(rank, None, type(error).__name__, text, traceback.format_exc(), time.monotonic())

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            frame = sys._current_frames().get(thread.ident or 0)
            where = "".join(traceback.format_stack(frame)) if frame else ""
            text = f"did not end within {timeout_s:.1f} s"
            outcomes[rank] = Outcome(rank, None, "Timeout", text, where, time.monotonic())
    groups.close()
    return outcomes


__all__ = [
    "MODES",
    "Outcome",
    "entry_of",
    "failure_text",
    "rank_environment",
    "run_on_ranks",
    "start_processes",
    "try_on_ranks",
]
