"""The doorkeeper: lets a rank that was started again into a job whose other ranks go on meanwhile.

A thread of its own, as a rank that decodes waits for nobody. It hands out duplicates of descriptors and takes the
newcomer's; it touches no device. What it took is mapped by the runtime, between two steps.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from graphshard._core import DriverError
from graphshard.comm.doors import HELLO, HERE, KNOWN, WELCOME, Door, RankRecord, close_fds
from graphshard.comm.process import ProcessId
from graphshard.comm.wire import Channel, Frame, Kind
from graphshard.core.errors import CommError

_BACKLOG = 64  # newcomers that wait while this process is stopped
_JOIN_S = 5.0
_NO_DESCRIPTOR_MS = 100


class Doorkeeper:
    """This rank's open door. Made by `open_door`, or by a newcomer for itself; close it before its memory."""

    def __init__(self, door: Door, offer: Mapping[str, Any], digest: str, records: Sequence[RankRecord]) -> None:
        """Open `door`.

        Args:
            door: where to listen.
            offer: what every newcomer is told; JSON.
            digest: what a newcomer must have made of it.
            records: what each rank shows, by rank; owned from now on.
        """
        self.door = door
        self._room = _Room(door, offer, digest, records)
        thread = threading.Thread(target=self._room.serve, name=f"graphshard-door-{door.rank}", daemon=True)
        self._finalizer = weakref.finalize(self, _close, self._room, thread)
        thread.start()

    @property
    def has_news(self) -> bool:
        """Whether a rank came back. Costs nothing: asked at every step."""
        return bool(self._room.news)

    def take(self) -> dict[int, RankRecord]:
        """The ranks that came back, by rank, each to be settled; those that are gone again are forgotten."""
        return self._room.take()

    def settle(self, rank: int, *, is_accepted: bool) -> None:
        """Rank `rank`, taken before, is shown to others from now on; or, if not accepted, forgotten."""
        self._room.settle(rank, is_accepted)

    def renew(self, checksums: Sequence[Sequence[int]]) -> None:
        """All ranks' chunks were written anew: whoever comes back must have loaded what has these, by rank and unit."""
        self._room.renew(checksums)

    def receive(self, rank: int, record: RankRecord) -> None:
        """Note that `rank` shows `record`, unless that is known. The record is owned from now on."""
        with self._room.lock:
            if record.process == self._room.latest(rank).process:
                record.close()
            else:
                self._room.note(rank, record)

    def close(self) -> None:
        """Shut the door. Local, idempotent, bounded."""
        self._finalizer()


class _Room:
    """What the thread and its owner share; the thread keeps this alive, and not the doorkeeper."""

    def __init__(self, door: Door, offer: Mapping[str, Any], digest: str, records: Sequence[RankRecord]) -> None:
        self.lock = threading.RLock()  # a collection may close another doorkeeper, or this one, anywhere
        self.news: dict[int, RankRecord] = {}
        self.owner_pid = os.getpid()
        self._door, self._offer, self._digest = door, dict(offer), digest
        self._records = list(records)
        self._taken: dict[int, RankRecord] = {}
        self._clients: dict[int, Channel] = {}
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wake_read, self._wake_write = os.pipe()
        self._listener.bind(door.address)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)

    # --- the owner's side ---

    def take(self) -> dict[int, RankRecord]:
        with self.lock:
            for rank in [rank for rank, record in self.news.items() if not record.is_present]:
                self.news.pop(rank).close()
            taken = dict(self.news)
            self.news.clear()
            self._taken |= taken
        return taken

    def settle(self, rank: int, is_accepted: bool) -> None:
        with self.lock:
            record = self._taken.pop(rank)
            if is_accepted:
                record, self._records[rank] = self._records[rank], record
            record.close()

    def renew(self, checksums: Sequence[Sequence[int]]) -> None:
        with self.lock:
            for record, of_rank in zip(self._records, checksums, strict=True):
                record.checksums = tuple(of_rank)

    def note(self, rank: int, record: RankRecord) -> None:
        """With the lock held."""
        if rank in self.news:
            self.news.pop(rank).close()
        self.news[rank] = record

    def wake(self) -> None:
        with self.lock:
            if not self._is_closed:
                os.write(self._wake_write, b"x")

    def release(self) -> None:
        """Close everything; for the thread, and for a fork, which has no such thread."""
        if self._is_closed:
            return
        self._is_closed = True
        self._listener.close()
        for client in self._clients.values():
            client.close()
        self._clients.clear()
        for record in [*self._records, *self._taken.values(), *self.news.values()]:
            record.close()
        for records in (self._records, self._taken, self.news):
            records.clear()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # --- the thread's side ---

    def serve(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            with self.lock:
                self.release()

    def _turn(self) -> bool:
        """Wait for something and serve it; False when woken up to end."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        for fd, client in self._clients.items():
            poll.register(fd, select.POLLIN | (select.POLLOUT if client.has_outgoing else 0))
        for fd, _ in poll.poll():
            if fd == self._wake_read:
                return False
            if fd in self._clients:
                self._serve_client(fd)
            else:
                self._accept()
        return True

    def _accept(self) -> None:
        try:
            sock = self._listener.accept()[0]
        except BlockingIOError:  # it gave up meanwhile
            return
        except OSError:  # no descriptor is free here: it waits, and this thread does not spin
            poll = select.poll()
            poll.register(self._wake_read, select.POLLIN)
            poll.poll(_NO_DESCRIPTOR_MS)
            return
        self._clients[sock.fileno()] = Channel(sock)

    def _serve_client(self, fd: int) -> None:
        """Whatever a client sends wrong costs it its own connection, and nothing else."""
        client = self._clients[fd]
        try:
            client.flush()
            for frame in client.receive():
                try:
                    self._answer(client, frame)
                finally:
                    frame.close()
        except CommError as error:
            client.post(Frame(Kind.FAILED, 0, 0, "", str(error).encode()))
        except (ValueError, KeyError, TypeError, IndexError, OSError, DriverError) as error:
            text = f"rank {self._door.rank} did not understand it: {type(error).__name__}: {error}"
            client.post(Frame(Kind.FAILED, 0, 0, "", text.encode()))
        if not client.is_open:
            del self._clients[fd]
            client.close()

    def _answer(self, client: Channel, frame: Frame) -> None:
        if client.peer_uid() != os.getuid():
            raise CommError(f"job {self._door.job} belongs to user {os.getuid()}, not to {client.peer_uid()}")
        told = json.loads(frame.payload)
        with self.lock:
            rank = self._check_rank(told["rank"], client.peer_pid())
            if "why_not" in self._offer:
                raise CommError(f"rank {rank} cannot come back to job {self._door.job}: {self._offer['why_not']}")
            epoch = self._records[self._door.rank].page.epoch
            self._check_epoch(rank, epoch, told.get("epoch", epoch))
            if frame.name == HELLO:
                fds: list[int] = []
                for one in range(len(self._records)):
                    fds += self.latest(one).lend_fds()
                records = [self.latest(one).told() for one in range(len(self._records))]
                self._reply(client, WELCOME, {"offer": self._offer, "records": records, "epoch": epoch}, fds)
            elif frame.name == HERE:
                self._check_claim(rank, told)
                process = ProcessId.of(client.peer_pid())
                has_window = self._records[rank].window_fd is not None
                described = [process.pid, process.start_ticks, told["checksums"], has_window]
                self.note(rank, RankRecord.receive(described, frame.fds))
                mine = self._records[self._door.rank]
                self._reply(client, KNOWN, mine.told(), mine.lend_fds())
            else:
                raise CommError(
                    f"rank {self._door.rank} knows no request {frame.name!r}: use one version of graphshard"
                )

    def _reply(self, client: Channel, name: str, value: object, fds: list[int]) -> None:
        client.post(Frame(Kind.DATA, 0, 0, name, json.dumps(value).encode(), True, fds))
        close_fds(fds)

    def latest(self, rank: int) -> RankRecord:
        return self.news.get(rank) or self._taken.get(rank) or self._records[rank]

    def _check_rank(self, rank: int, pid: int) -> int:
        """A rank is taken until its process is gone; a process may come again after it closed its runtime."""
        if not 0 <= rank < len(self._records):
            raise CommError(f"rank {rank} is none of job {self._door.job}: it has ranks 0 to {len(self._records) - 1}")
        holder = self.latest(rank)
        if holder.is_present and holder.process.pid != pid:
            raise CommError(
                f"rank {rank} of job {self._door.job} has not ended (pid {holder.process.pid}, "
                f"{holder.process.state()}): end it before process {pid} takes its place"
            )
        return rank

    def _check_epoch(self, rank: int, epoch: int, known: int) -> None:
        """`known` is the epoch that the rank was told when it met the others."""
        if epoch % 2:
            raise CommError(
                f"rank {rank} cannot come back to job {self._door.job}: its weights are of no version since an update "
                f"did not end (epoch {epoch}); start all ranks anew"
            )
        if known != epoch:
            raise CommError(
                f"rank {rank} loaded weights of epoch {known}, and rank {self._door.rank} has epoch {epoch} by now: "
                "come back with the new checkpoint"
            )

    def _check_claim(self, rank: int, told: Mapping[str, Any]) -> None:
        if told["digest"] != self._digest:
            raise CommError(
                f"rank {rank} has certificate {told['digest'][:12]}, rank {self._door.rank} has {self._digest[:12]}: "
                "start it with the same model, plan, versions and settings"
            )
        if tuple(told["checksums"]) != self._records[rank].checksums:
            raise CommError(
                f"rank {rank} loaded other bytes than it must have: use the checkpoint that the ranks run with now"
            )


def _close(room: _Room, thread: threading.Thread) -> None:
    if os.getpid() != room.owner_pid:  # a fork: the thread and its door are the parent's
        room.release()
        return
    room.wake()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
