"""What the ranks of the control page tests do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import os
import signal
from typing import Any

from graphshard.comm.control import CLOSED, ControlTable
from graphshard.comm.group import Group
from graphshard.core.errors import CommError

DIGEST = bytes(range(32))


def report_progress(group: Group) -> list[Any]:
    table = ControlTable.exchange(group, DIGEST)
    if group.rank == 1:
        table.mine.set_progress(417, 27)
        table.mine.set_epoch(6)
    group.barrier()
    seen = [table.state(rank) for rank in range(3)], table.progress(0), table.progress(1), table.pages[1].epoch
    group.barrier()
    if group.rank == 2:
        table.mine.set_state(CLOSED)
    group.barrier()
    return [*seen, table.state(2), table.dead()]


def read_the_page_of_a_dead_rank(group: Group) -> list[Any]:
    table = ControlTable.exchange(group, DIGEST)
    if group.rank == 1:
        table.mine.set_progress(3, 9)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except CommError:
        return [table.state(1), table.dead(), table.describe()]
    return []


def bring_another_layout(group: Group) -> None:
    ControlTable.exchange(group, bytes([group.rank == 1]) * 32)
