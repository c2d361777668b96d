"""One rank's connections to all others, shared by the group and its subgroups.

# Note [who reads]
No thread of its own: whoever waits, reads. With several threads waiting, one polls all sockets and sorts what comes
into the mailbox, the others sleep until it has something. Frames for calls that nobody waits for yet stay there.

# Note [failure]
A rank that gives up tells the group's other ranks why (`Kind.FAILED`), so that the first cause is what all of them
raise. A group that failed once stays failed: its ranks no longer know which calls the others finished.

# Note [patience]
A rank whose part of a call takes long says so again and again (`Kind.BUSY`); whoever waits for it then waits on. It is
given up when it has been silent for the limit: stopped, stuck, or dead, which the kernel tells at once.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphshard.comm.process import ProcessId
from graphshard.comm.wire import Channel, Frame, Kind, Outgoing
from graphshard.core.errors import CommError

_SLICE_S = 0.2  # the longest sleep between two looks at the peers' processes

MailboxKey = tuple[int, int, int]  # tag, seq, sender


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call on one group: `tag` names the group, `seq` counts its calls, `peers` are mesh ranks."""

    tag: int
    seq: int
    name: str
    peers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} (call {self.seq} of this group)"


class Mesh:
    """Channels to every other rank of one job, by rank. Closing is local and never waits."""

    def __init__(self, rank: int, channels: Mapping[int, Channel], processes: Sequence[ProcessId], job: str) -> None:
        self.rank = rank
        self.processes = tuple(processes)
        self.job = job
        self._owner_pid = os.getpid()
        self._channels = dict(channels)
        self._changed = threading.Condition()
        self._is_pumping = False
        self._is_closed = False
        self._mailbox: dict[MailboxKey, Frame] = {}
        self._failures: dict[int, str] = {}
        self._gone: dict[int, str] = {}
        self._busy: dict[tuple[int, int], tuple[int, float]] = {}
        """By group and peer: the last call for which it said that it is busy, and when that came."""
        self._finalizer = weakref.finalize(self, _release, self._channels, self._mailbox)

    def exchange(
        self, call: Call, payload: bytes, is_json: bool, fds: Sequence[int], timeout_s: float
    ) -> dict[int, Frame]:
        """Send one payload to every peer of `call` and take theirs.

        Raises:
            CommError: a peer is missing after `timeout_s`, is gone, gave up, or is in another call.
        """
        started = time.monotonic()
        with self._changed:
            self.check_usable(call.tag)
            frame = Frame(Kind.DATA, call.tag, call.seq, call.name, payload, is_json, list(fds))
            posted = {peer: self._channels[peer].post(frame) for peer in call.peers}
            while waiting := self._waiting_for(call, posted):
                self._raise_if_hopeless(call, waiting)
                deadlines = {peer: self._last_sign(call, peer, started) + timeout_s for peer in waiting}
                now = time.monotonic()
                late = [peer for peer in waiting if deadlines[peer] <= now]
                if late:
                    self._fail(call, self._timeout_text(call, waiting, late, started, timeout_s))
                remaining = min(deadlines.values()) - now
                if not self._pump(min(remaining, _SLICE_S)):
                    self._look_at_processes(waiting)
            return self._take(call)

    def say_busy(self, call: Call) -> bool:
        """Tell the peers of `call`, which is still to come, that this rank works on it; False if that is of no use."""
        with self._changed:
            if self._is_closed or os.getpid() != self._owner_pid or call.tag in self._failures:
                return False
            for peer in call.peers:
                channel = self._channels[peer]
                channel.flush()
                if not channel.has_outgoing:  # else it has not read the last one yet
                    channel.post(Frame(Kind.BUSY, call.tag, call.seq, call.name, b""))
            return True

    def give_up(self, call: Call, reason: str) -> None:
        """Tell the peers of `call`, which is still to come, that this rank will not; its group is of no more use."""
        with self._changed:
            if not self._is_closed and os.getpid() == self._owner_pid and call.tag not in self._failures:
                self._tell_failure(call, reason)

    def why_hopeless(self, call: Call) -> str | None:
        """Why `call`, which is still to come, will fail: who gave up, closed or died. Looks, and does not wait."""
        with self._changed:
            if self._is_closed:
                return f"the group of rank {self.rank} is closed"
            if not self._is_pumping:
                self._pump(0)
            self._look_at_processes(call.peers)
            if call.tag in self._failures:
                return self._failures[call.tag]
            gone = [f"{self._who(peer)} {self._gone[peer]}" for peer in call.peers if peer in self._gone]
            return f"{'; '.join(gone)} while rank {self.rank} was in {call.name}" if gone else None

    def check_usable(self, tag: int) -> None:
        """CommError if this mesh was closed, belongs to another process, or its group `tag` failed before."""
        if os.getpid() != self._owner_pid:
            raise CommError(
                f"a group of process {self._owner_pid} was used in process {os.getpid()}, a fork of it: "
                "start ranks by spawn, and make a group in each"
            )
        if self._is_closed:
            raise CommError(f"the group of rank {self.rank} is closed: make a new one with init_group()")
        if tag in self._failures:
            raise CommError(f"the group of rank {self.rank} failed before and is of no more use: {self._failures[tag]}")

    def close(self, reason: str = "") -> None:
        """Say goodbye with a reason, as far as the sockets take it, and release everything. Idempotent, never waits."""
        if os.getpid() != self._owner_pid:  # a fork: its peers still talk to the parent, its lock may be stuck
            self._is_closed = True
            self._finalizer()
            return
        with self._changed:
            if not self._is_closed:
                for channel in self._channels.values():
                    channel.post(Frame(Kind.BYE, 0, 0, "", reason.encode()))
            self._is_closed = True
            self._changed.notify_all()
            self._finalizer()

    def describe(self, rank: int) -> str:
        """`rank 3 (pid 4711, stopped)`."""
        return self._who(rank, f", {self.processes[rank].state()}")

    def deliver(self, peer: int, frames: Sequence[Frame]) -> None:
        """Sort what came from `peer` into the mailbox."""
        for frame in frames:
            if frame.kind is Kind.DATA:
                self._mailbox[frame.tag, frame.seq, peer] = frame
            elif frame.kind is Kind.BUSY:
                self._busy[frame.tag, peer] = (frame.seq, time.monotonic())
            elif frame.kind is Kind.FAILED:
                self._failures.setdefault(frame.tag, frame.payload.decode())
            else:
                reason = frame.payload.decode()
                self._gone[peer] = "closed its group" + (f" after {reason}" if reason else "")
        if not self._channels[peer].is_open:
            self._gone.setdefault(peer, "died")

    def _who(self, rank: int, state: str = "") -> str:
        process = self.processes[rank]
        return f"rank {rank} " + ("(a thread)" if process.pid == self._owner_pid else f"(pid {process.pid}{state})")

    def _waiting_for(self, call: Call, posted: Mapping[int, Outgoing]) -> list[int]:
        """Peers whose frame is not here, or that have not taken ours (no one may leave before that)."""
        return [
            peer
            for peer in call.peers
            if (call.tag, call.seq, peer) not in self._mailbox or not (posted[peer].is_sent or peer in self._gone)
        ]

    def _raise_if_hopeless(self, call: Call, waiting: Sequence[int]) -> None:
        if self._is_closed:
            raise CommError(f"the group of rank {self.rank} was closed by another thread during {call}")
        if call.tag in self._failures:
            raise CommError(self._failures[call.tag])
        gone = [peer for peer in waiting if peer in self._gone]
        if gone:
            what = "; ".join(f"{self._who(peer)} {self._gone[peer]}" for peer in gone)
            self._fail(call, f"{what} while rank {self.rank} waited in {call}")

    def _fail(self, call: Call, text: str) -> None:
        self._tell_failure(call, text)
        raise CommError(text)

    def _tell_failure(self, call: Call, text: str) -> None:
        self._failures[call.tag] = text
        told = f"rank {self.rank} gave up: {text}".encode()
        for peer in call.peers:
            self._channels[peer].post(Frame(Kind.FAILED, call.tag, call.seq, call.name, told))

    def _last_sign(self, call: Call, peer: int, started: float) -> float:
        """When `peer` last said that it works on `call`, or when the wait began; see Note [patience]."""
        seq, heard = self._busy.get((call.tag, peer), (0, started))
        return max(started, heard) if seq == call.seq else started

    def _timeout_text(
        self, call: Call, waiting: Sequence[int], late: Sequence[int], started: float, timeout_s: float
    ) -> str:
        here = [peer for peer in call.peers if peer not in waiting]
        arrived = f"; {_ranks(here)} did" if here else ""
        missing = ", ".join(self.describe(peer) for peer in late)
        waited_s = time.monotonic() - started
        silent = "" if waited_s < timeout_s + 1 else f" and said nothing for {timeout_s:.1f} s"
        return (
            f"rank {self.rank} waited {waited_s:.1f} s in {call}: {missing} did not arrive{silent}{arrived}. "
            "See what they do, or raise timeout_s"
        )

    def _take(self, call: Call) -> dict[int, Frame]:
        frames = {peer: self._mailbox.pop((call.tag, call.seq, peer)) for peer in call.peers}
        for peer, frame in frames.items():
            if frame.name != call.name:
                for other in frames.values():
                    other.close()
                self._fail(
                    call,
                    f"rank {self.rank} is in {call.name}, rank {peer} in {frame.name} (call {call.seq} of this group): "
                    "all ranks of a group must make the same calls in the same order",
                )
        return frames

    def _pump(self, timeout_s: float) -> bool:
        """Read what comes within `timeout_s`, or wait for the thread that does; False if this one read nothing."""
        if self._is_pumping:  # see Note [who reads]
            self._changed.wait(timeout_s)
            return False
        poll = select.poll()
        by_fd: dict[int, int] = {}
        for peer, channel in self._channels.items():
            if channel.is_open:
                by_fd[channel.fileno()] = peer
                poll.register(channel.fileno(), select.POLLIN | (select.POLLOUT if channel.has_outgoing else 0))
        self._is_pumping = True
        self._changed.release()
        try:
            ready = poll.poll(timeout_s * 1000)
        finally:
            self._changed.acquire()
            self._is_pumping = False
            self._changed.notify_all()
        if not self._is_closed:  # else these descriptors are somebody else's by now
            for fd, _ in ready:
                self._serve(by_fd[fd])
        return bool(ready)

    def _serve(self, peer: int) -> None:
        self._channels[peer].flush()
        self.deliver(peer, self._channels[peer].receive())

    def _look_at_processes(self, peers: Sequence[int]) -> None:
        """A dead peer's socket can be held open by a child that it forked: ask the kernel for the process itself."""
        for peer in peers:
            if peer not in self._gone and self.processes[peer].state() == "gone":
                self._serve(peer)
                self._gone.setdefault(peer, "died")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + " ".join(map(str, ranks))


def _release(channels: dict[int, Channel], mailbox: dict[MailboxKey, Frame]) -> None:
    """Close every descriptor; also runs when a mesh is collected or the interpreter exits."""
    for channel in channels.values():
        channel.close()
    for frame in mailbox.values():
        frame.close()
    mailbox.clear()
