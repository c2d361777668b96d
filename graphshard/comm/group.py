"""Groups of ranks: threads of one process or processes of one machine, with the same code.

A group moves small things when a runtime is set up (numbers, texts, digests, file descriptors), never weights and
never during a step. All its waits are bounded and name who is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TypeVar

from graphshard.comm.mesh import Call, Mesh
from graphshard.comm.process import ProcessId
from graphshard.comm.pulses import Pulses
from graphshard.comm.wire import Channel
from graphshard.core import errors
from graphshard.core.counts import which_ranks
from graphshard.core.errors import CommError, GraphshardError, SpecError

Value = TypeVar("Value")

DEFAULT_TIMEOUT_S = 60.0
LONGEST_TIMEOUT_S = 86400.0


class Group:
    """This rank's place among `world_size` ranks. Made by `init_group`, `LocalGroup` or `subgroup`.

    The calls are collective: all ranks make the same ones in the same order, which is checked. Threads of one rank
    may use different groups at once; calls on one group are made one at a time. `close` is local.
    """

    def __init__(
        self,
        mesh: Mesh,
        mesh_ranks: Sequence[int],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        local_rank: int | None = None,
        path: str = "world",
    ) -> None:
        if not timeout_s > 0:
            raise SpecError(f"timeout_s={timeout_s} is not a time to wait: give seconds above 0")
        self._mesh = mesh
        self._mesh_ranks = tuple(mesh_ranks)
        self._path = path
        self._tag = group_tag(path)
        self._seq = 0
        self._num_subgroups: Counter[tuple[int, ...]] = Counter()
        self._num_serials = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self.rank = self._mesh_ranks.index(mesh.rank)
        self.world_size = len(self._mesh_ranks)
        self.local_rank = self.rank if local_rank is None else local_rank
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, world_size={self.world_size}, path={self._path!r})"

    @property
    def job(self) -> str:
        """A random name that all ranks of this job share, and no other job has."""
        return self._mesh.job

    @property
    def path(self) -> str:
        """`world`, or how a subgroup came from it; equal on all ranks."""
        return self._path

    @property
    def prefix(self) -> str:
        """`[rank 3/8]`, as printed before a rank's lines."""
        return f"[rank {self.rank}/{self.world_size}]"

    @property
    def processes(self) -> tuple[ProcessId, ...]:
        """The process of each rank; ranks that are threads share one."""
        return tuple(self._mesh.processes[rank] for rank in self._mesh_ranks)

    def describe(self, rank: int) -> str:
        """`rank 3 (pid 4711, stopped)`; for a subgroup, by its rank in the whole job."""
        return self._mesh.describe(self._mesh_ranks[rank])

    def all_gather(
        self, value: object, fds: Sequence[int] = (), *, name: str = "all_gather", timeout_s: float | None = None
    ) -> list[tuple[object, list[int]]]:
        """Every rank's (value, file descriptors), by rank.

        `value` is bytes, or anything JSON can carry (tuples come back as lists, on the sender too). `fds` stay the
        caller's; those returned, own ones included, are new descriptors that the caller closes. `name` is what
        errors call this call, and must be equal on all ranks.

        Raises:
            CommError: a rank is missing after `timeout_s` (default: the group's), gone, or in another call.
        """
        is_json = not isinstance(value, bytes)
        payload = json.dumps(value, sort_keys=True).encode() if is_json else bytes(value)  # type: ignore[call-overload]
        self._mesh.check_usable(self._tag)
        if self._is_closed:
            raise CommError(f"{name}: this group ({self._path}) is closed on rank {self.rank}: make a new one")
        with self._lock:
            call = self._next_call(name)
            self._seq = call.seq
            limit_s = self.timeout_s if timeout_s is None else timeout_s
            frames = self._mesh.exchange(call, payload, is_json, fds, limit_s)
        gathered: list[tuple[object, list[int]]] = []
        for rank in self._mesh_ranks:
            if rank == self._mesh.rank:
                gathered.append((_decode(payload, is_json), [os.dup(fd) for fd in fds]))
            else:
                gathered.append((_decode(frames[rank].payload, frames[rank].is_json), frames[rank].fds))
        return gathered

    def barrier(self, name: str = "barrier", *, timeout_s: float | None = None) -> None:
        """Return when every rank has come here."""
        self.all_gather(b"", name=name, timeout_s=timeout_s)

    def agree(self, name: str, step: Callable[[], Value], *, progress: Callable[[], int] | None = None) -> Value:
        """Run a rank-local `step`; where it fails on one rank, all ranks raise that rank's message.

        The error has the class that the first failing rank raised if it is one of graphshard's, else CommError.

        A step that may take longer than the group's limit gives `progress`, a number that grows while it works (asked
        from another thread): the others then wait for this rank until nothing has grown for some limits.
        """
        failure: Exception | None = None
        value: Value | None = None
        try:
            with nullcontext() if progress is None else self._pulses(name, progress):
                value = step()
        except Exception as error:
            failure = error
        except BaseException as error:  # Ctrl-C, say: this rank goes away at once, and the others shall not wait for it
            self._mesh.give_up(self._next_call(name), f"{name} was interrupted on rank {self.rank} by {_kind(error)}")
            raise
        outcome = None if failure is None else [type(failure).__name__, str(failure)]
        try:
            outcomes = self.all_gather(outcome, name=name)
        except CommError as error:
            raise error from failure
        failed = [(rank, outcome) for rank, (outcome, _) in enumerate(outcomes) if outcome is not None]
        if failed:
            raise _agreed_error(name, failed) from failure
        return value  # type: ignore[return-value]  # Value may be None itself

    def why_hopeless(self, name: str) -> str | None:
        """Why the next call, `name`, will fail: who gave up, closed or died. For steps that take long; never waits."""
        return self._mesh.why_hopeless(self._next_call(name))

    def subgroup(self, ranks: Sequence[int]) -> Group | None:
        """The group of `ranks` (of this group), on the same sockets; None on a rank that is not among them.

        Its members must all ask for it, no one else has to. It fails and closes on its own; closing the group it
        comes from closes it too.
        """
        members = tuple(sorted(ranks))
        if not members or len(set(members)) != len(members) or members[0] < 0 or members[-1] >= self.world_size:
            raise SpecError(f"subgroup of ranks {list(ranks)}: name some of 0 to {self.world_size - 1}, each once")
        if self.rank not in members:
            return None
        self._mesh.check_usable(self._tag)
        self._num_subgroups[members] += 1
        path = f"{self._path}/{' '.join(map(str, members))}#{self._num_subgroups[members]}"
        mesh_ranks = [self._mesh_ranks[rank] for rank in members]
        return Group(self._mesh, mesh_ranks, timeout_s=self.timeout_s, local_rank=self.local_rank, path=path)

    def next_serial(self) -> int:
        """A number that all ranks draw alike, if each draws equally often: what is made on this group is told apart."""
        self._num_serials += 1
        return self._num_serials - 1

    def close(self, reason: str = "") -> None:
        """Leave, at once and without asking anybody; idempotent. Ranks that wait for this one are told the reason."""
        self._is_closed = True
        if "/" not in self._path:
            self._mesh.close(reason)

    def _next_call(self, name: str) -> Call:
        peers = tuple(rank for rank in self._mesh_ranks if rank != self._mesh.rank)
        return Call(self._tag, self._seq + 1, name, peers)

    def _pulses(self, name: str, progress: Callable[[], int]) -> Pulses:
        return Pulses(self._mesh, self._next_call(name), progress, self.timeout_s)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}".splitlines()[0])


class LocalGroup(list[Group]):
    """The groups of `world_size` ranks that are threads of this process: `LocalGroup(n)[i]` is rank i's."""

    def __init__(self, world_size: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if world_size < 1:
            raise SpecError(f"a group of {world_size} ranks: use 1 or more")
        channels: list[dict[int, Channel]] = [{} for _ in range(world_size)]
        for rank in range(world_size):
            for peer in range(rank):
                ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                channels[rank][peer], channels[peer][rank] = (Channel(end) for end in ends)
        processes = [ProcessId.of(os.getpid())] * world_size
        job = new_job_name()
        meshes = [Mesh(rank, channels[rank], processes, job) for rank in range(world_size)]
        super().__init__(Group(mesh, range(world_size), timeout_s=timeout_s) for mesh in meshes)

    def close(self) -> None:
        """Close every rank's group."""
        for group in self:
            group.close()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def group_tag(path: str) -> int:
    """The number that frames of the group `path` carry."""
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "little")


def new_job_name() -> str:
    """A name that no other job has."""
    return os.urandom(8).hex()


def _kind(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _decode(payload: bytes, is_json: bool) -> object:
    return json.loads(payload) if is_json else payload


def _agreed_error(name: str, failed: Sequence[tuple[int, object]]) -> GraphshardError:
    rank, outcome = failed[0]
    assert isinstance(outcome, list), outcome
    class_name, text = outcome
    kind = getattr(errors, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, GraphshardError)):
        kind, text = CommError, f"{class_name}: {text}"
    others = [rank for rank, _ in failed[1:]]
    more = f" (and on {which_ranks(others)})" if others else ""
    return kind(f"{name} failed on rank {rank}{more}: {text}")
