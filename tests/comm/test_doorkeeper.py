"""The doorkeeper alone: whoever knocks wrongly hurts only himself, and it ends whenever its owner ends."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import door_programs
import pytest
from census import no_growth
from door_programs import open_for
from ranks import rank_environment

from graphshard.comm import rejoin
from graphshard.comm.doors import HELLO, Door, find_doors
from graphshard.comm.group import new_job_name
from graphshard.comm.process import ProcessId
from graphshard.comm.wire import Channel, Frame, Kind


def ask(door: Door, name: str = HELLO, value: Any = None) -> str:
    """What the door answers: the frame's name, or the refusal."""
    channel = rejoin._knock(door, name, {"rank": 1} if value is None else value, [])
    assert channel is not None
    return answer_of(channel)


def answer_of(channel: Channel) -> str:
    while not (frames := channel.receive()) and channel.is_open:
        pass
    channel.close()
    for frame in frames:
        frame.close()
    return (frames[0].name or frames[0].payload.decode()) if frames else "closed"


def test_what_is_not_understood_is_refused_and_the_door_stays_open() -> None:
    with no_growth():
        keeper = open_for(new_job_name())
        refusals = {
            ask(keeper.door, "tea"): "rank 0 knows no request 'tea'",
            ask(keeper.door, value={}): "rank 0 did not understand it: KeyError: 'rank'",
            ask(keeper.door, value={"rank": "one"}): "rank 0 did not understand it: TypeError",
            ask(keeper.door, value={"rank": 5}): f"rank 5 is none of job {keeper.door.job}: it has ranks 0 to 1",
            ask(keeper.door, value={"rank": 0}): "welcome",  # the same process: it may come again
            ask(keeper.door, "here", {"rank": 1, "digest": "other"}): "rank 1 has certificate other, rank 0 has digest",
            ask(keeper.door, "here", {"rank": 1, "digest": "digest", "checksums": [8]}): "rank 1 loaded other bytes",
            ask(keeper.door, "here", {"rank": 1, "digest": "digest", "checksums": [7]}): "rank 0 did not understand",
        }
        assert all(found.startswith(words) for found, words in refusals.items()), refusals
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(keeper.door.address)
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            assert "does not speak this protocol" in answer_of(Channel(sock))
        assert ask(keeper.door) == "welcome"
        assert not keeper.has_news and keeper.take() == {}
        keeper.close()
        keeper.close()


def test_after_an_update_the_new_checksums_count_and_an_odd_epoch_lets_nobody_in() -> None:
    keeper = open_for(new_job_name())
    page = keeper._room._records[0].page
    here = {"rank": 1, "digest": "digest", "checksums": [7]}
    assert ask(keeper.door, "here", here).startswith("rank 0 did not understand")  # it brought no descriptors
    keeper.renew([[8], [9]])
    assert "rank 1 loaded other bytes than it must have" in ask(keeper.door, "here", here)
    here["checksums"] = [9]
    page.set_epoch(4)
    assert "rank 1 loaded weights of epoch 2, and rank 0 has epoch 4 by now" in ask(
        keeper.door, "here", here | {"epoch": 2}
    )
    assert ask(keeper.door, "here", here | {"epoch": 4}).startswith("rank 0 did not understand")
    page.set_epoch(5)
    for name, value in (("hello", {"rank": 1}), ("here", here)):
        assert "its weights are of no version since an update did not end (epoch 5)" in ask(keeper.door, name, value)
    keeper.close()


def test_silent_and_half_spoken_clients_keep_nobody_waiting() -> None:
    with no_growth():
        keeper = open_for(new_job_name())
        clients = []
        for words in (b"", b"gsf1", b"g"):
            clients.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            clients[-1].connect(keeper.door.address)
            clients[-1].sendall(words)
        assert ask(keeper.door) == "welcome"
        for client in clients:
            client.close()
        assert ask(keeper.door) == "welcome"
        keeper.close()


def test_a_newcomer_that_asks_and_reads_nothing_costs_its_own_connection() -> None:
    """The answer is larger than a socket's buffer, and nobody takes it."""
    keeper = open_for(new_job_name())
    keeper._room._offer = {"certificate": "x" * 5_000_000}
    channel = rejoin._knock(keeper.door, HELLO, {"rank": 1}, [])
    assert channel is not None
    deaf = rejoin._knock(keeper.door, HELLO, {"rank": 1}, [])
    assert answer_of(channel) == "welcome"
    assert deaf is not None
    deaf.close()
    assert ask(keeper.door) == "welcome"
    keeper.close()


def test_doors_are_found_by_job_and_serial() -> None:
    job = new_job_name()
    keepers = [open_for(job, rank, 3, serial) for serial, rank in ((1, 2), (0, 0), (1, 0))]
    other = open_for(new_job_name())
    assert [(door.serial, door.rank) for door in find_doors(job, "group")] == [(0, 0), (1, 0), (1, 2)]
    assert find_doors(job, "another group") == []
    for keeper in [*keepers, other]:
        keeper.close()
    assert find_doors(job, "group") == []


def test_a_dropped_doorkeeper_is_gone() -> None:
    job = new_job_name()
    with no_growth():
        keeper = open_for(job)
        del keeper
        gc.collect()
        assert find_doors(job, "group") == []


def test_the_interpreter_may_end_with_the_door_open() -> None:
    command = [sys.executable, door_programs.__file__, "leave", new_job_name()]
    env = {**os.environ, **rank_environment()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_forked_child_shuts_no_door_of_its_parents() -> None:
    keeper = open_for(new_job_name())
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            keeper.close()
            open_for(new_job_name()).close()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(keeper.door) == "welcome"
    keeper.close()


def test_a_dead_ranks_door_is_not_found_though_its_child_holds_it_open() -> None:
    job = new_job_name()
    command = [sys.executable, door_programs.__file__, "fork", job]
    with subprocess.Popen(
        command, env={**os.environ, **rank_environment()}, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            (door,) = find_doors(job, "group")
            parent.kill()
            parent.wait()
            assert ProcessId.of(child).state() == "running"
            assert find_doors(job, "group") == []
            assert rejoin._ask(door, HELLO, {"rank": 1}, [], deadline=float("inf")) is None
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("kind", [Kind.BYE, Kind.FAILED])
def test_other_kinds_of_frames_are_no_news(kind: Kind) -> None:
    keeper = open_for(new_job_name())
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(keeper.door.address)
        channel = Channel(sock)
        channel.post(Frame(kind, 0, 0, "", json.dumps("bye").encode()))
        assert "did not understand" in answer_of(channel)
    assert ask(keeper.door) == "welcome"
    keeper.close()
