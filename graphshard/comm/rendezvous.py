"""How the processes of a job find each other: over one abstract unix socket, which leaves nothing behind.

Rank 0 listens under the job's port; the others connect, as late as they like within the limit, and say who they are.
When all have, rank 0 makes a socket pair for every two of them and hands out the ends. So a connection exists only
between ranks of this very job: a leftover of an earlier one that holds the name is never joined, it is an error that
names its pid.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphshard.comm.environment import RankEnvironment
from graphshard.comm.group import DEFAULT_TIMEOUT_S, Group, new_job_name
from graphshard.comm.mesh import Mesh
from graphshard.comm.process import ProcessId
from graphshard.comm.wire import Channel, Frame, Kind
from graphshard.core.errors import CommError, SpecError

_RETRY_S = 0.02
_GRACE_S = 1.0  # a rank that reached rank 0 waits this much longer than it: rank 0 knows who is missing


def init_group(timeout_s: float = DEFAULT_TIMEOUT_S, environ: Mapping[str, str] = os.environ) -> Group:
    """The group of all processes of this job, from torchrun's environment variables (`environ`).

    Collective: returns when all ranks have come. `timeout_s` bounds this and every later wait.

    Raises:
        SpecError: an environment variable is missing or malformed.
        CommError: ranks are missing after `timeout_s`, died, or disagree about the job.
    """
    if not timeout_s > 0:
        raise SpecError(f"timeout_s={timeout_s} is not a time to wait: give seconds above 0")
    environment = RankEnvironment.read(environ)
    if environment.world_size == 1:
        mesh = Mesh(0, {}, [ProcessId.of(os.getpid())], new_job_name())
    elif environment.rank == 0:
        mesh = _Leader(environment, timeout_s).gather()
    else:
        mesh = _join(environment, timeout_s)
    local_rank = environment.local_rank
    return Group(mesh, range(environment.world_size), timeout_s=timeout_s, local_rank=local_rank)


@dataclass
class _Leader:
    """Rank 0 while the ranks come together."""

    environment: RankEnvironment
    timeout_s: float
    waiting: list[Channel] = field(default_factory=list)
    """Connected, and have not yet said who they are."""
    joined: dict[int, Channel] = field(default_factory=dict)
    processes: dict[int, ProcessId] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    def gather(self) -> Mesh:
        """Wait for all ranks and connect them with each other."""
        deadline = time.monotonic() + self.timeout_s
        self.processes[0] = ProcessId.of(os.getpid())
        try:
            with _listen(self.environment, deadline, self.timeout_s) as listener:
                while len(self.joined) < self.environment.world_size - 1:
                    self._serve(listener, deadline)
            job = new_job_name()
            self._hand_out(job, deadline)
        except CommError as error:
            told = Frame(Kind.FAILED, 0, 0, "", str(error).encode())
            for channel in [*self.waiting, *self.joined.values()]:
                channel.post(told)
                channel.close()
            raise
        for channel in self.waiting:
            channel.close()
        processes = [self.processes[rank] for rank in range(self.environment.world_size)]
        return Mesh(0, self.joined, processes, job)

    def _serve(self, listener: socket.socket, deadline: float) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise CommError(self._missing_text())
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        channels = {channel.fileno(): channel for channel in [*self.waiting, *self.joined.values()]}
        for fd in channels:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(remaining * 1000):
            if fd in channels:
                self._read(channels[fd])
            else:
                self.waiting.append(Channel(listener.accept()[0]))

    def _read(self, channel: Channel) -> None:
        frames = channel.receive()
        if channel in self.waiting and frames:
            self._admit(channel, json.loads(frames[0].payload))
        elif not channel.is_open:
            for rank, joined in self.joined.items():
                if joined is channel:
                    raise CommError(
                        f"rank {rank} (pid {self.processes[rank].pid}) died while the ranks were connecting"
                    )
            self.waiting.remove(channel)
            channel.close()

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> None:
        self.waiting.remove(channel)
        rank, pid, mine = hello["rank"], channel.peer_pid(), self.environment
        if channel.peer_uid() != os.getuid() or hello["run_id"] != mine.run_id:
            reason = f"rank {rank} (pid {pid}, user {channel.peer_uid()}) belongs to run {hello['run_id']!r}"
            self.refused.append(reason)
            text = f"{reason}, rank 0 (pid {os.getpid()}, user {os.getuid()}) to run {mine.run_id!r}"
            channel.post(Frame(Kind.FAILED, 0, 0, "", f"{text}: use another MASTER_PORT for each job".encode()))
            channel.close()
            return
        taken = self.processes.get(rank)
        self.joined[-len(self.joined) - 1 if taken else rank] = channel  # in any case told about a failure
        if hello["world_size"] != mine.world_size:
            raise CommError(
                f"rank {rank} (pid {pid}) was started with WORLD_SIZE={hello['world_size']}, "
                f"rank 0 (pid {os.getpid()}) with WORLD_SIZE={mine.world_size}: start all ranks with one value"
            )
        if taken:
            raise CommError(
                f"two processes say that they are rank {rank}: pids {taken.pid} and {pid}; "
                "end what is left of an earlier job, or use another MASTER_PORT"
            )
        self.processes[rank] = ProcessId.of(pid)

    def _missing_text(self) -> str:
        missing = [str(rank) for rank in range(1, self.environment.world_size) if rank not in self.joined]
        refused = f"; refused: {'; '.join(self.refused)}" if self.refused else ""
        return (
            f"rank 0 waited {self.timeout_s:.1f} s for ranks to connect: of {self.environment.world_size} ranks, "
            f"{' '.join(missing)} did not come{refused}. See whether they started, or raise timeout_s"
        )

    def _hand_out(self, job: str, deadline: float) -> None:
        """Give every two ranks the ends of a socket pair, then tell each that it has them all."""
        ranks = sorted(self.joined)
        for rank in ranks:
            for peer in ranks[: ranks.index(rank)]:
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                for this, other, end in ((rank, peer, ends[0]), (peer, rank, ends[1])):
                    with end:
                        self._send(this, {"rank": other, "pid": self.processes[other].pid}, [end.fileno()], deadline)
        for rank in ranks:
            self._send(rank, {"job": job}, [], deadline)

    def _send(self, rank: int, value: object, fds: list[int], deadline: float) -> None:
        channel = self.joined[rank]
        outgoing = channel.post(Frame(Kind.DATA, 0, 0, "", json.dumps(value).encode(), True, fds))
        while not outgoing.is_sent:
            remaining = deadline - time.monotonic()
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLOUT)
            if remaining <= 0 or not poll.poll(remaining * 1000):
                raise CommError(f"rank {rank} (pid {self.processes[rank].pid}) connected but does not read")
            channel.flush()


def _join(environment: RankEnvironment, timeout_s: float) -> Mesh:
    """Connect to rank 0, and take the connections to the others from it."""
    rank, world_size = environment.rank, environment.world_size
    leader = _connect(environment, time.monotonic() + timeout_s, timeout_s)
    channels = {0: leader}
    processes = {0: ProcessId.of(leader.peer_pid()), rank: ProcessId.of(os.getpid())}
    hello = {"rank": rank, "world_size": world_size, "run_id": environment.run_id}
    leader.post(Frame(Kind.DATA, 0, 0, "", json.dumps(hello).encode(), True))
    deadline = time.monotonic() + timeout_s + _GRACE_S
    try:
        while True:
            frames = _next_frames(leader, deadline, rank, processes[0])
            while frames:
                frame = frames.pop(0)
                if frame.kind is not Kind.DATA:
                    raise CommError(frame.payload.decode() or "rank 0 gave up while the ranks were connecting")
                told = json.loads(frame.payload)
                if "job" in told:
                    mesh = Mesh(rank, channels, [processes[r] for r in range(world_size)], told["job"])
                    mesh.deliver(0, frames)  # rank 0 may be in its first call already
                    return mesh
                channels[told["rank"]] = Channel(socket.socket(fileno=frame.fds.pop()))
                processes[told["rank"]] = ProcessId.of(told["pid"])
    except BaseException:
        for channel in channels.values():
            channel.close()
        raise


def _next_frames(leader: Channel, deadline: float, rank: int, process: ProcessId) -> list[Frame]:
    poll = select.poll()
    poll.register(leader.fileno(), select.POLLIN)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not poll.poll(remaining * 1000):
        raise CommError(
            f"rank {rank} is connected to rank 0 (pid {process.pid}, {process.state()}), which did not answer in time: "
            "end it if it is left from an earlier job, or raise timeout_s"
        )
    frames = leader.receive()
    if not frames and not leader.is_open:
        raise CommError(f"rank 0 (pid {process.pid}) died while rank {rank} was connecting")
    return frames


def _address(environment: RankEnvironment) -> str:
    return f"\0graphshard/{os.getuid()}/{environment.master_port}"


def _listen(environment: RankEnvironment, deadline: float, timeout_s: float) -> socket.socket:
    """Rank 0's listener. A job that is just connecting under the same port is waited for."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            listener.bind(_address(environment))
            listener.listen(environment.world_size + 16)
            return listener
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                listener.close()
                raise CommError(
                    f"MASTER_PORT={environment.master_port}: rank 0 tried to listen for {timeout_s:.1f} s ({error}); "
                    f"another job's rank 0 does ({_holder(environment)}): end it, or use another port"
                ) from None
            time.sleep(_RETRY_S)


def _holder(environment: RankEnvironment) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_RETRY_S)
        try:
            probe.connect(_address(environment))
        except OSError:
            return "pid unknown"
        channel = Channel(probe)
        return f"pid {channel.peer_pid()}, {ProcessId.of(channel.peer_pid()).state()}"


def _connect(environment: RankEnvironment, deadline: float, timeout_s: float) -> Channel:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(_RETRY_S, deadline - time.monotonic()))
            sock.connect(_address(environment))
        except OSError as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise CommError(
                    f"rank {environment.rank} waited {timeout_s:.1f} s for rank 0 to listen "
                    f"(MASTER_PORT={environment.master_port}): {error}. See whether rank 0 started, or raise timeout_s"
                ) from None
            time.sleep(_RETRY_S)
            continue
        channel = Channel(sock)
        if channel.peer_uid() != os.getuid():
            channel.close()
            raise CommError(
                f"MASTER_PORT={environment.master_port} is held by user {channel.peer_uid()}: use another port"
            )
        return channel
