"""Small helpers of the device tests."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from graphshard._core import Calls, Driver, GraphExec, Memory, OpList, Stream

TIMEOUT_S = 60.0


def is_mapped(address: int) -> bool:
    """Whether `address` lies in a mapping of a file (a memfd) of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return len(line.split()) > 5
    return False


def run_python(code: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own, bounded."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, pass_fds=pass_fds)


def run_eager(op_list: OpList, calls: Calls, stream: Stream) -> Callable[[], None]:
    """A step that issues the list eagerly and waits for the origin `stream`."""

    def step() -> None:
        op_list.issue(calls)
        assert stream.synchronize(TIMEOUT_S)
        calls.check()

    return step


def run_captured(
    op_list: OpList, calls: Calls, stream: Stream, executor: str = "", seed: int = -1
) -> Callable[[], None]:
    """A step that replays the captured list and waits for it."""
    graph_exec: GraphExec = op_list.capture(calls).instantiate(executor, seed)

    def step() -> None:
        graph_exec.launch(stream)
        assert stream.synchronize(TIMEOUT_S)
        calls.check()

    return step


def drained(driver: Driver) -> bool:
    """Whether everything dropped has gone."""
    return driver.num_retired == 0


class Latch:
    """Holds streams at a word until `open()`; a closed latch is opened at the end of its test."""

    def __init__(self, driver: Driver) -> None:
        self.word = Memory(driver, 4)
        self._opener = Stream(driver)

    @property
    def address(self) -> int:
        return self.word.address

    def hold(self, stream: Stream) -> None:
        stream.wait_value(self.address, 1)

    def open(self) -> None:
        self._opener.write_value(self.address, 1)
        assert self._opener.synchronize(TIMEOUT_S)
