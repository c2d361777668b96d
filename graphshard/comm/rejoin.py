"""Coming back: a process takes the place of a rank that died, in a job whose other ranks go on meanwhile.

Told the job's name (`Group.job`), it asks the doors of the ranks that live for everybody's control page and window,
those of the dead included: their memory lives while somebody maps it. When it has loaded and checked its own part it
opens a door itself and then knocks at all others, so that of two ranks that come back at once one meets the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from graphshard._core import ControlPage
from graphshard.comm.certificate import Certificate, compare
from graphshard.comm.doorkeeper import Doorkeeper
from graphshard.comm.doors import HELLO, HERE, Door, RankRecord, close_fds, find_doors, group_key
from graphshard.comm.group import DEFAULT_TIMEOUT_S, Group
from graphshard.comm.mesh import Mesh
from graphshard.comm.process import ProcessId
from graphshard.comm.wire import Channel, Frame, Kind
from graphshard.core.errors import CommError, LoadError, SpecError

Value = TypeVar("Value")

_SLICE_S = 0.1  # the longest sleep between two looks at the process that is to answer


@dataclass
class Welcome:
    """What a living rank told this newcomer. Owns the records until a doorkeeper takes them."""

    door: Door
    """The newcomer's own, to be opened."""
    offer: Mapping[str, Any]
    records: list[RankRecord]
    epoch: int
    """Of the weights, on the rank that answered."""

    @property
    def peers(self) -> list[tuple[ProcessId, ControlPage]]:
        """Every rank's process and control page, this one's from before."""
        return [(record.process, record.page) for record in self.records]

    def check_certificate(self, certificate: Certificate) -> None:
        """CommError naming the first difference from the ranks that live."""
        compare(certificate, self.offer["certificate"], self.door.rank, len(self.records))

    def check_checksums(self, checksums: Sequence[int]) -> None:
        """LoadError if this rank's chunks are not those that the rank before it had."""
        before = self.records[self.door.rank].checksums
        unlike = [str(unit) for unit, pair in enumerate(zip(before, checksums, strict=True)) if pair[0] != pair[1]]
        if unlike:
            raise LoadError(
                f"rank {self.door.rank} loaded other bytes of units {' '.join(unlike)} than the others know of: use "
                f"the checkpoint that they run with now (epoch {self.epoch}), or start all ranks anew"
            )

    def close(self) -> None:
        """Forget all records."""
        for record in self.records:
            record.close()
        self.records = []

    def __enter__(self) -> Welcome:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Newcomer(Group):
    """The group as a rank that came back sees it: it knows who is there, and has no part in collective calls."""

    def __init__(self, job: str, rank: int, path: str, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise SpecError(f"timeout_s={timeout_s} is not a time to wait: give seconds above 0")
        with _meet(job, path, rank, 0, timeout_s) as welcome:
            processes = [record.process for record in welcome.records]
        processes[rank] = ProcessId.of(os.getpid())
        mesh = Mesh(rank, {}, processes, job)
        super().__init__(mesh, range(len(processes)), timeout_s=timeout_s, local_rank=rank, path=path)

    def meet(self) -> Welcome:
        """What the other ranks have, for the runtime that is to be made next."""
        return _meet(self.job, self.path, self.rank, self._num_serials, self.timeout_s)

    def come_in(self, welcome: Welcome, own: RankRecord, digest: str) -> Doorkeeper:
        """Open this rank's door, then tell everybody that it is here. `welcome`'s records and `own` are taken over.

        Raises:
            CommError: see `announce`; the door is closed again.
        """
        records, welcome.records = welcome.records, []
        records[self.rank].close()
        records[self.rank] = own
        keeper = Doorkeeper(welcome.door, welcome.offer, digest, records)
        try:
            self.announce(keeper, own, digest)
        except BaseException:
            keeper.close()
            raise
        self._num_serials = welcome.door.serial + 1
        return keeper

    def announce(self, keeper: Doorkeeper, own: RankRecord, digest: str) -> None:
        """Tell every rank that this one is here; those it did not know of are noted with `keeper`, which is open.

        Raises:
            CommError: a rank refused; the others may use what they were told, for they checked it.
        """
        deadline = time.monotonic() + self.timeout_s
        told = {"rank": self.rank, "digest": digest, "checksums": list(own.checksums), "epoch": own.page.epoch}
        for door in find_doors(self.job, keeper.door.group):
            if door.serial != keeper.door.serial or door.rank == self.rank:
                continue
            fds = own.lend_fds()
            try:
                answer = _ask(door, HERE, told, fds, deadline)
            finally:
                close_fds(fds)
            if answer is not None:
                keeper.receive(door.rank, RankRecord.receive(json.loads(answer.payload), answer.fds))
                answer.close()

    def all_gather(
        self, value: object, fds: Sequence[int] = (), *, name: str = "all_gather", timeout_s: float | None = None
    ) -> list[tuple[object, list[int]]]:
        """Refused: the others do not wait for a rank that came back."""
        raise CommError(
            f"{name}: rank {self.rank} came back to job {self.job}, and no other rank is in this call with it: "
            "start all ranks anew for what they do together"
        )

    def agree(self, name: str, step: Callable[[], Value], *, progress: Callable[[], int] | None = None) -> Value:
        """Run `step`, alone."""
        return step()

    def why_hopeless(self, name: str) -> None:
        """Nothing that others do makes a step hopeless that they have no part in."""

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Refused: see `all_gather`."""
        self.all_gather(None, name=f"subgroup of ranks {' '.join(map(str, ranks))}")
        return None


def open_door(
    group: Group, own: RankRecord, offer: Mapping[str, Any], digest: str, welcome: Welcome | None = None
) -> Doorkeeper | None:
    """Open this rank's door, on every rank of `group` (collective), or on one that came back (`welcome`).

    `own` is taken over. None where ranks are threads, which die together.
    """
    if welcome is not None:
        assert isinstance(group, Newcomer)
        return group.come_in(welcome, own, digest)
    serial = group.next_serial()
    told, fds = own.told(), own.lend_fds()
    own.close()
    if len(set(group.processes)) < group.world_size or group.world_size == 1:
        close_fds(fds)
        return None
    try:
        gathered: list[Any] = group.all_gather(told, fds, name="doors")
    finally:
        close_fds(fds)
    try:
        records = [RankRecord.receive(value, rank_fds) for value, rank_fds in gathered]
    finally:
        for _, rank_fds in gathered:
            close_fds(rank_fds)
    return Doorkeeper(Door.of(group, serial), offer, digest, records)


def rejoin_group(job: str, rank: int, *, path: str = "world", timeout_s: float = DEFAULT_TIMEOUT_S) -> Group:
    """The group of a process that takes the place of a dead `rank` of `job`; give it to `graphshard.compile`.

    Args:
        job: the running ranks' `Group.job`.
        rank: the place to take; the process that held it must have ended.
        path: the running ranks' `Group.path`, if their group is a subgroup.
        timeout_s: the longest that this rank waits for another.

    Raises:
        CommError: no rank of that job has a runtime open, or the rank's place is not free.
        SpecError: an argument is not what it says.
    """
    for name, value in (("job", job), ("path", path)):
        if not isinstance(value, str) or not value:
            raise SpecError(f"{name}={value!r} is not a name: give the running ranks' `Group.{name}`")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
        raise SpecError(f"rank={rank!r} is no rank: give the number of the one that died, from 0 on")
    return Newcomer(job, rank, path, timeout_s)


def _meet(job: str, path: str, rank: int, min_serial: int, timeout_s: float) -> Welcome:
    """Ask all doors of the lowest serial number, and take the answer that comes first."""
    key = group_key(path)
    doors = [door for door in find_doors(job, key) if door.rank != rank and door.serial >= min_serial]
    doors = [door for door in doors if door.serial == doors[0].serial]
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        asked: dict[int, tuple[Door, Channel]] = {}
        for door in doors:
            channel = _knock(door, HELLO, {"rank": rank}, [])
            if channel is not None:
                stack.callback(channel.close)
                asked[channel.fileno()] = (door, channel)
        answer = _first_answer(asked, deadline)
    if answer is None:
        found = ", ".join(f"rank {d.rank} (pid {d.pid}, {ProcessId.of(d.pid).state()})" for d in doors)
        why = f"{found} did not answer within {timeout_s:.1f} s" if doors else "no living rank has a runtime open here"
        raise CommError(f"rank {rank} cannot come back to job {job}: {why}; start all ranks anew")
    told = json.loads(answer.payload)
    records: list[RankRecord] = []
    try:
        for one in told["records"]:
            records.append(RankRecord.receive(one, answer.fds))
    except BaseException:
        for record in records:
            record.close()
        raise
    finally:
        answer.close()
    return Welcome(Door(job, key, doors[0].serial, rank, os.getpid()), told["offer"], records, told["epoch"])


def _knock(door: Door, name: str, value: object, fds: Sequence[int]) -> Channel | None:
    """Connect and send; None if nobody opens, or so many stand before a stopped rank's door that there is no room."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(door.address)
    except OSError:
        sock.close()
        return None
    channel = Channel(sock)
    if channel.peer_uid() != os.getuid():
        channel.close()
        return None
    channel.post(Frame(Kind.DATA, 0, 0, name, json.dumps(value).encode(), True, list(fds)))
    return channel


def _first_answer(asked: Mapping[int, tuple[Door, Channel]], deadline: float) -> Frame | None:
    """The first answer; None if all are gone or the time is over. CommError if it is a refusal."""
    waiting = dict(asked)
    while waiting and (remaining := deadline - time.monotonic()) > 0:
        poll = select.poll()
        for fd, (_, channel) in waiting.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if channel.has_outgoing else 0))
        for fd, _ in poll.poll(min(remaining, _SLICE_S) * 1000):
            channel = waiting[fd][1]
            channel.flush()
            for frame in channel.receive():
                if frame.kind is not Kind.DATA:
                    raise CommError(frame.payload.decode())
                return frame
            if not channel.is_open:
                del waiting[fd]
        for fd in [fd for fd, (door, _) in waiting.items() if ProcessId.of(door.pid).state() == "gone"]:
            del waiting[fd]
    return None


def _ask(door: Door, name: str, value: object, fds: Sequence[int], deadline: float) -> Frame | None:
    """What the rank behind `door` answers. None if it is gone, or stopped: then it finds the frame when it goes on."""
    channel = _knock(door, name, value, fds)
    if channel is None:
        return None
    with contextlib.closing(channel):
        while ProcessId.of(door.pid).state() not in ("gone", "stopped"):
            now = time.monotonic()
            if now >= deadline:
                raise CommError(f"rank {door.rank} (pid {door.pid}) runs and does not answer: raise timeout_s")
            answer = _first_answer({channel.fileno(): (door, channel)}, min(deadline, now + _SLICE_S))
            if answer is not None or not channel.is_open:
                return answer
    return None
