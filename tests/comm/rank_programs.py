"""Functions that rank processes of the tests run; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from graphshard.comm import rendezvous
from graphshard.comm.group import Group
from graphshard.comm.launch import RankProcesses
from graphshard.comm.rendezvous import init_group
from graphshard.core.errors import CommError, SpecError


def die_at(point: str) -> str:
    """A rank that makes its own group, and kills itself at `point`; rank 0 last, or the others would name it."""
    if point == "start":
        die()
    group = init_group(20.0)
    if point == "connected":
        die()
    group.barrier()
    if point == "used":
        die()
    if point == "in a call" and group.rank == 1:
        die()
    try:
        group.barrier()
    except CommError:
        die()
    group.close()
    return group.job


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def come_or_die() -> str:
    """Rank 1 says hello and dies; rank 2 never comes, so that nothing but the death can end rank 0's wait."""
    rank = int(os.environ["RANK"])
    if rank == 2:
        return "stayed away"
    if rank == 1:
        rendezvous._next_frames = lambda *_: die()  # type: ignore[assignment]
    try:
        init_group(600.0)
    except CommError as error:
        return str(error)
    return "connected"


def describe(group: Group, factor: int) -> dict[str, Any]:
    print(f"rank {group.rank} speaks")
    print(f"rank {group.rank} complains", file=sys.stderr)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    return {"product": group.rank * factor, "env": {name: os.environ[name] for name in names}, "pid": os.getpid()}


def leave_rank_0_alone(group: Group) -> int:
    """A group without a runtime: rank 0 stays until it is killed."""
    group.barrier()
    if group.rank == 0:
        signal.pause()
    return group.rank


def end_variously(rank_to_end: dict[str, str]) -> str:
    """Without a group: each rank ends as told, independent of the others."""
    how = rank_to_end.get(os.environ["RANK"], "return")
    if how == "kill":
        die()
    if how == "exit":
        sys.exit(7)
    if how == "spec":
        raise SpecError("cannot be built\nas asked")
    if how == "value":
        raise ValueError("no good")
    if how == "hang":
        signal.pause()
    if how == "write":
        print("x" * 200_000)
        print("the end", end="")
    return "fine"


def write_pid_and_wait(folder: str) -> None:
    """Leave a file named after the rank with the pid in it, then wait in native code for ever."""
    place = Path(folder) / os.environ["RANK"]
    place.with_suffix(".new").write_text(str(os.getpid()))
    place.with_suffix(".new").rename(place)
    signal.pause()


def parent_of_ranks(folder: str) -> None:
    """A launcher that a test kills."""
    with RankProcesses(f"{__file__}:write_pid_and_wait", 3, arguments=[folder], group_timeout_s=None) as ranks:
        ranks.wait(600.0)


if __name__ == "__main__":
    parent_of_ranks(sys.argv[1])
