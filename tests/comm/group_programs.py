"""What the ranks of the group tests do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from graphshard.comm.group import Group
from graphshard.core.errors import CommError, LoadError


def gather_everything(group: Group, num_bytes: int) -> list[Any]:
    texts = group.all_gather({"rank": group.rank, "text": "x" * num_bytes})
    raw = group.all_gather(bytes([group.rank]) * num_bytes, name="raw")
    assert [value for value, _ in raw] == [bytes([rank]) * num_bytes for rank in range(group.world_size)]
    group.barrier()
    return [(value["rank"], len(value["text"])) for value, _ in texts]  # type: ignore[index]


def gather_descriptors(group: Group, num_fds: int) -> int:
    own = [os.memfd_create(f"{group.rank}-{i}") for i in range(num_fds)] if group.rank == 0 else []
    for i, fd in enumerate(own):
        os.write(fd, f"descriptor {i}".encode())
    gathered = group.all_gather(None, own)
    assert [len(fds) for _, fds in gathered] == [num_fds] + [0] * (group.world_size - 1)
    texts = [os.pread(fd, 100, 0).decode() for fd in gathered[0][1]]
    assert texts == [f"descriptor {i}" for i in range(num_fds)]
    assert all(not os.get_inheritable(fd) for fd in gathered[0][1])
    group.barrier()
    if group.rank == 1:
        os.pwrite(gathered[0][1][-1], b"written by rank 1", 0)
    group.barrier()
    assert os.pread(gathered[0][1][-1], 100, 0) == b"written by rank 1"
    for fd in own + gathered[0][1]:
        os.close(fd)
    return len(os.listdir("/proc/self/fd"))


def use_subgroups(group: Group) -> list[Any]:
    pair = group.subgroup([0, 2]) or group.subgroup([1, 3])
    assert pair is not None
    first = [value for value, _ in pair.all_gather(group.rank)]
    whole = [value for value, _ in group.all_gather(pair.rank)]
    again = group.subgroup([2, 0] if group.rank % 2 == 0 else [3, 1])
    assert again is not None
    second = [value for value, _ in again.all_gather(-group.rank)]
    assert pair.subgroup([1 - pair.rank]) is None
    return [first, whole, second]


def make_another_call(group: Group) -> None:
    if group.rank == 1:
        group.barrier()
    else:
        group.all_gather(1, name="windows")


def fail_alone(group: Group, failing: list[int]) -> str:
    def step() -> str:
        if group.rank in failing:
            raise LoadError(f"weight w has dtype int8 in rank {group.rank}'s copy")
        return "loaded"

    result = group.agree("load", step)
    group.barrier()
    return result


def stay_away(group: Group, how: str) -> None:
    if group.rank == 2:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "sleep":
            threading.Event().wait(20.0)  # until it is killed: its process has a limit
    group.barrier()


def end_in_a_call(group: Group, how: str) -> None:
    group.all_gather(group.rank, name="first")
    if group.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(5)
        if how == "raise":
            raise RuntimeError("out of luck")
    group.all_gather(group.rank, name="second")


def die_with_a_child_that_holds_the_sockets(group: Group) -> str:
    child = 0
    if group.rank == 1:
        child = os.fork()
        if child == 0:
            signal.alarm(25)
            signal.pause()
    child = int(str(group.all_gather(child)[1][0]))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.barrier()
    except CommError as error:
        return str(error)
    finally:
        if group.rank == 0:
            os.kill(child, signal.SIGKILL)
    return ""


def use_in_a_fork(group: Group) -> str:
    """The child reports over a pipe; its end must not disturb the parent's group."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            group.barrier()
        except CommError as error:
            os.write(write_end, str(error).encode())
        group.close()
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read_end, 1000).decode()
    group.barrier()
    return text


def die_in_a_long_step(group: Group) -> None:
    """Rank 1 is killed in its step, while rank 0 waits for it, and rank 2 is in a step without end."""

    def step() -> None:
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while group.rank == 2:
            why = group.why_hopeless("load")
            if why is not None:
                raise CommError(why)

    group.agree("load", step, progress=lambda: 0)
