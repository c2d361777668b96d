"""Processes as the kernel sees them: who is alive, stopped or gone, without being fooled by a reused pid."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from typing import Literal

ProcessState = Literal["running", "stopped", "gone", "unknown"]

_PR_SET_PDEATHSIG = 1
_PF_EXITING = 0x4  # in the flags of /proc/PID/stat; set before a dying process's sockets close


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process: pid and start time (clock ticks since boot), as a pid alone may be somebody else's by now.

    `pid` 0 is a process that this one cannot see (another pid namespace).
    """

    pid: int
    start_ticks: int

    @staticmethod
    def of(pid: int) -> ProcessId:
        """The process that has `pid` now; start time 0 if it cannot be read."""
        stat = _read_stat(pid)
        return ProcessId(pid, int(stat[19]) if stat else 0)

    def state(self) -> ProcessState:
        """What the kernel says of it; a zombie is gone, and so is what is being taken down."""
        if self.pid == 0:
            return "unknown"
        stat = _read_stat(self.pid)
        if stat is None or stat[0] in "ZXx" or int(stat[6]) & _PF_EXITING:
            return "gone"
        if self.start_ticks and int(stat[19]) != self.start_ticks:
            return "gone"
        return "stopped" if stat[0] in "Tt" else "running"


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even while it is stopped or in native code.

    Call it first thing in a rank's process. Exits at once if the parent (`parent_pid`) is dead already. Linux sends
    the signal when the *thread* that started this process ends, so a launcher starts ranks from a thread that stays.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this rank would outlive its launcher")
    if os.getppid() != parent_pid:  # it died between our start and the call above
        os._exit(1)


def _read_stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()  # the name in parentheses may hold anything
