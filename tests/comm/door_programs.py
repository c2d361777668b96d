"""What processes of the doorkeeper tests do; apart from the tests, so that they need not import pytest."""

from __future__ import annotations

import os
import signal
import sys

from graphshard._core import ControlPage
from graphshard.comm.control import LIVE
from graphshard.comm.doorkeeper import Doorkeeper
from graphshard.comm.doors import Door, RankRecord
from graphshard.comm.process import ProcessId


def open_for(job: str, rank: int = 0, world_size: int = 2, serial: int = 0) -> Doorkeeper:
    """A door of `rank` in this process; the other ranks are long dead."""
    records = []
    for one in range(world_size):
        page = ControlPage()
        page.set_state(LIVE)
        process = ProcessId.of(os.getpid()) if one == rank else ProcessId(2**22 - 1, 1)
        records.append(RankRecord(process, (7,), page, os.memfd_create("window")))
    return Doorkeeper(Door(job, "group", serial, rank, os.getpid()), {"certificate": "x"}, "digest", records)


def fork_and_wait(job: str) -> None:
    """Prints the pid of a child that holds whatever this process held, then waits to be killed."""
    keeper = open_for(job)
    child = os.fork()
    if child == 0:
        signal.pause()
    print(child, flush=True)
    signal.pause()
    keeper.close()


def leave_open(job: str) -> None:
    """The interpreter ends with the door open."""
    keeper = open_for(job)
    print(keeper.door.rank)


if __name__ == "__main__":
    {"fork": fork_and_wait, "leave": leave_open}[sys.argv[1]](sys.argv[2])
