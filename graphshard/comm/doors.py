"""Doors: how a rank that was started again finds the ranks that live, and what the two tell each other.

A door is an abstract unix socket that a living rank listens on. Its name says whose it is, so that the list of this
machine's sockets is the only directory needed: nothing lies on disk, and a door is gone with its process.

    graphshard/USER/JOB/GROUP/SERIAL/RANK/PID
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphshard._core import ControlPage, Memory
from graphshard.comm.control import LIVE
from graphshard.comm.group import Group, group_tag
from graphshard.comm.process import ProcessId

HELLO, WELCOME, HERE, KNOWN = "hello", "welcome", "here", "known"
"""Frames by name: a newcomer asks and is answered; it says that it is ready and is told what the rank shows itself."""

_SOCKETS = "/proc/net/unix"
_LISTENING = "00010000"


@dataclass(frozen=True, slots=True, order=True)
class Door:
    """One rank's door. `serial` counts the runtimes that were made on one group, equally on all its ranks."""

    job: str
    group: str
    serial: int
    rank: int
    pid: int

    @staticmethod
    def of(group: Group, serial: int) -> Door:
        """The door of this rank of `group`."""
        return Door(group.job, group_key(group.path), serial, group.rank, os.getpid())

    @property
    def address(self) -> str:
        """The socket's name."""
        return f"\0graphshard/{os.getuid()}/{self.job}/{self.group}/{self.serial}/{self.rank}/{self.pid}"


def group_key(path: str) -> str:
    """The part of a door's name that tells the group `path` from others of its job."""
    return f"{group_tag(path):016x}"


def find_doors(job: str, group: str) -> list[Door]:
    """The doors of this user's `job` that are open now, in order of serial and rank, without those of the dead."""
    prefix = f"@graphshard/{os.getuid()}/{job}/{group}/"
    doors = []
    with open(_SOCKETS, encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split()
            if len(fields) < 8 or fields[3] != _LISTENING or not fields[7].startswith(prefix):
                continue
            serial, rank, pid = (int(part) for part in fields[7].removeprefix(prefix).split("/"))
            if ProcessId.of(pid).state() != "gone":  # a child that it forked can hold a dead rank's socket open
                doors.append(Door(job, group, serial, rank, pid))
    return sorted(doors)


@dataclass(slots=True)
class RankRecord:
    """What a rank shows its peers: who it is, its control page, and its shard window with the checksums of its chunks.

    Owns its descriptor.
    """

    process: ProcessId
    checksums: tuple[int, ...]
    page: ControlPage
    window_fd: int | None
    """None if nothing is sharded."""

    @property
    def is_present(self) -> bool:
        """Whether the rank runs (or is stopped) and has not closed its runtime."""
        return self.page.state == LIVE and self.process.state() != "gone"

    def told(self) -> list[Any]:
        """What a frame says of it; its descriptors travel beside."""
        return [self.process.pid, self.process.start_ticks, list(self.checksums), self.window_fd is not None]

    def lend_fds(self) -> list[int]:
        """Its descriptors, new ones that the caller closes."""
        return [self.page.fd()] + ([] if self.window_fd is None else [os.dup(self.window_fd)])

    @staticmethod
    def receive(told: Sequence[Any], fds: list[int]) -> RankRecord:
        """The record that `told` describes; takes its descriptors from the front of `fds`.

        Raises:
            DriverError: the first descriptor is no control page of this version.
        """
        pid, start_ticks, checksums, has_window = told
        page = ControlPage.open_fd(fds[0])
        os.close(fds.pop(0))
        return RankRecord(ProcessId(pid, start_ticks), tuple(checksums), page, fds.pop(0) if has_window else None)

    def close(self) -> None:
        """Close the window's descriptor; the page goes with the record."""
        if self.window_fd is not None:
            os.close(self.window_fd)
            self.window_fd = None


def own_record(group: Group, page: ControlPage, shards: Memory | None, checksums: Sequence[int]) -> RankRecord:
    """What this rank of `group` shows."""
    window_fd = shards.export_fd() if shards is not None else None
    return RankRecord(group.processes[group.rank], tuple(checksums), page, window_fd)


def close_fds(fds: list[int]) -> None:
    """Close all, and forget them."""
    while fds:
        os.close(fds.pop())
