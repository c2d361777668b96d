"""The command's side of `generate`: starts the ranks, hears them, and goes on whoever of them dies or stops."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from graphshard.cli.generate_wire import Lines, Listener, Message
from graphshard.comm.group import new_job_name
from graphshard.comm.launch import RankProcesses, RankResult
from graphshard.comm.process import ProcessId
from graphshard.core.errors import CommError

ENTRY = "graphshard.cli.generate_rank:generate"
GROUP_TIMEOUT_S = 60.0
MAX_RESTARTS = 3
"""Of one rank: what dies again and again is no accident."""
_LOOK_S = 0.2
_LOOK_SOON_S = 0.01
_END_S = 30.0


@dataclass
class RankStory:
    """What became of a rank so far."""

    rank: int
    process: ProcessId
    batches: list[dict[str, Any]] | None = None
    """What it made; None until it is done."""
    done: Message = field(default_factory=dict)
    """All that it said when it was done."""
    report: dict[str, Any] | None = None
    is_gone: bool = False
    """Its process has ended, and is not started again."""
    lost: str = ""
    """Why it made nothing."""
    ended: list[str] = field(default_factory=list)
    """How its processes ended that were started again."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more will come of its prompts."""
        return self.batches is not None or self.is_gone


class GenerateJob:
    """Ranks that generate. A context manager: leaving it ends those still running."""

    def __init__(
        self, request: dict[str, Any], world_size: int, *, restart: bool, timeout_s: float, entry: str = ENTRY
    ) -> None:
        """Start the ranks.

        Args:
            request: what `entry`'s request holds, but for the address.
            world_size: how many ranks.
            restart: start a rank again that was killed.
            timeout_s: ranks that have not ended by then are killed.
            entry: what ranks run.
        """
        self._listener = Listener(new_job_name())
        self._restarts = restart
        self._started = time.monotonic()
        self._timeout_s = timeout_s
        self._fault = request["fault"]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[int, Lines] = {}  # by pid
        self._pidfds: list[int] = []
        arguments = [{**request, "address": self._listener.address}]
        try:
            self.ranks = RankProcesses(entry, world_size, arguments=arguments, group_timeout_s=GROUP_TIMEOUT_S)
        except BaseException:
            self._close_files()
            raise
        self.stories = [RankStory(rank, ProcessId.of(pid)) for rank, pid in enumerate(self.ranks.pids)]
        for story in self.stories:
            self._watch(story)
        self.order: list[int] = []
        """Ranks in the order in which they were done."""
        self.on_message: Callable[[int, Message], None] = lambda rank, message: None
        """Called with (rank, message) for each message of a rank."""
        self.on_change: Callable[[RankStory], None] = lambda story: None
        """Called when a rank was lost or started again."""
        self.on_turn: Callable[[], None] = lambda: None
        """Called several times a second."""

    def run(self) -> None:
        """Hear the ranks until all of them are settled, or the time is over: then those that are left are lost."""
        while not all(story.is_settled for story in self.stories):
            if not self._turn():
                for story in self.stories:
                    if not story.is_settled:
                        state = story.process.state()
                        self._lose(story, f"did not end within {self._timeout_s:.0f} s ({state})")
                return
            self._go_on_if_ordered()

    def run_report(self) -> str:
        """Have the ranks measure what the report holds; empty, or why there is none."""
        for story in self.stories:
            if story.ended or story.is_gone:
                return f"rank {story.rank} died: the report needs all ranks that were started"
        self._say_to_all("report")
        while not all(story.report is not None for story in self.stories):
            if any(story.is_gone for story in self.stories) or not self._turn():
                return "a rank ended while it was measured"
        return ""

    def end(self) -> list[RankResult]:
        """Let the ranks end, and say how they did."""
        self._say_to_all("end")
        for story in self.stories:
            if story.lost and not story.is_gone:
                self.ranks.signal(story.rank, signal.SIGKILL)
        return self.ranks.wait(time.monotonic() - self._started + _END_S)

    def __enter__(self) -> GenerateJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ranks.close()
        self._close_files()

    # --- inside ---

    def _turn(self) -> bool:
        """Wait for something, and take it in; False when the time is over."""
        left = self._started + self._timeout_s - time.monotonic()
        soon = _LOOK_SOON_S if self._fault is not None else _LOOK_S
        for key, _ in self._selector.select(max(0.0, min(left, soon))):
            if isinstance(key.fileobj, Listener):
                self._accept()
            elif isinstance(key.fileobj, Lines):
                self._hear(key.fileobj)
            else:
                self._selector.unregister(key.fileobj)
                self._take_end(key.data)
        self.on_turn()
        return left > 0

    def _watch(self, story: RankStory) -> None:
        fd = os.pidfd_open(story.process.pid)
        self._pidfds.append(fd)
        self._selector.register(fd, selectors.EVENT_READ, story)

    def _accept(self) -> None:
        for lines in self._listener.accept():
            self._lines[lines.peer_pid()] = lines
            self._selector.register(lines, selectors.EVENT_READ)

    def _hear(self, lines: Lines) -> bool:
        """Take in what a rank has said; False if that was nothing."""
        pid = lines.peer_pid()
        story = next((one for one in self.stories if one.process.pid == pid), None)
        messages = lines.receive()
        if not lines.is_open:
            self._selector.unregister(lines)
            self._lines.pop(pid, None)
            lines.close()
        for message in messages if story is not None else ():
            assert story is not None
            if message["what"] == "done":
                story.done, story.batches = message, message["batches"]
                self.order.append(story.rank)
            elif message["what"] == "report":
                story.report = message["report"]
            self.on_message(story.rank, message)
        return bool(messages)

    def _take_end(self, story: RankStory) -> None:
        """Its process has ended: hear what it said last, then start it again or give its prompts up."""
        self._accept()
        while (lines := self._lines.get(story.process.pid)) is not None and self._hear(lines):
            pass
        if story.batches is not None:
            story.is_gone = True
            return
        how = _how_it_ended(story.process.pid)
        if self._restarts and how.startswith("was killed") and len(story.ended) < MAX_RESTARTS:
            try:
                how = self.ranks.restart(story.rank).error
            except CommError as error:
                how = f"{how}; {error}"
            else:
                story.ended.append(how)
                story.process = ProcessId.of(self.ranks.pids[story.rank])
                self._watch(story)
                self.on_change(story)
                return
        story.is_gone = True
        self._lose(story, how)

    def _lose(self, story: RankStory, why: str) -> None:
        story.lost = why
        self.on_change(story)

    def _go_on_if_ordered(self) -> None:
        """A rank that a test stopped goes on once all others are settled."""
        if self._fault is None or self._fault[0] != "SIGSTOP":
            return
        story = self.stories[self._fault[1]]
        others = [one for one in self.stories if one is not story]
        if all(one.is_settled for one in others) and story.process.state() == "stopped":
            self.ranks.signal(story.rank, signal.SIGCONT)

    def _say_to_all(self, what: str) -> None:
        for lines in self._lines.values():
            lines.send({"what": what})

    def _close_files(self) -> None:
        for lines in self._lines.values():
            lines.close()
        self._lines.clear()
        self._listener.close()
        self._selector.close()
        for fd in self._pidfds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pidfds.clear()


def _how_it_ended(pid: int) -> str:
    """`was killed by SIGKILL` or `ended with code 3`; the process is left for its starter to collect."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        return f"was killed by {signal.Signals(found.si_status).name}"
    return f"ended with code {found.si_status}"
