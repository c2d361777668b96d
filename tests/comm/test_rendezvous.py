"""How processes find each other: environment, late and unlike ranks, leftovers of earlier jobs, restarts."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from census import no_growth
from rank_programs import come_or_die, die_at
from ranks import start_processes

from graphshard.comm.group import Group
from graphshard.comm.launch import free_port
from graphshard.comm.rendezvous import init_group
from graphshard.core.errors import CommError, SpecError


def environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared, **more}


def address(port: int) -> str:
    return f"\0graphshard/{os.getuid()}/{port}"


def is_listening(port: int) -> bool:
    for line in Path("/proc/net/unix").read_text().splitlines():
        fields = line.split()
        if fields[-1] == f"@{address(port)[1:]}" and fields[3] == "00010000":  # accepts connections
            return True
    return False


def connect(environments: list[dict[str, str]], timeout_s: float = 20.0) -> list[Any]:
    """Each rank's group, or the error that it met; ranks are threads with environments of their own."""
    results: list[Any] = [None] * len(environments)

    def run(place: int) -> None:
        try:
            results[place] = init_group(timeout_s, environments[place])
        except (CommError, SpecError) as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(environments))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def use_and_close(groups: list[Group]) -> None:
    """Every rank's number reaches every rank, called by one thread a rank."""
    seen: list[Any] = [None] * len(groups)

    def run(group: Group) -> None:
        seen[group.rank] = [value for value, _ in group.all_gather(group.rank)]

    threads = [threading.Thread(target=run, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for group in groups:
        group.close()
    assert seen == [list(range(len(groups)))] * len(groups)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_find_each_other(world_size: int) -> None:
    port = free_port()
    with no_growth():
        groups = connect([environment(rank, world_size, port) for rank in reversed(range(world_size))])
        assert len({group.job for group in groups}) == 1
        assert sorted(group.rank for group in groups) == list(range(world_size))
        assert not is_listening(port)
        use_and_close(groups)


def test_a_late_rank_is_waited_for() -> None:
    port = free_port()
    groups: list[Any] = []
    first = threading.Thread(target=lambda: groups.extend(connect([environment(0, 3, port), environment(2, 3, port)])))
    first.start()
    while not is_listening(port):
        assert first.is_alive()
    groups += connect([environment(1, 3, port)])
    first.join(60)
    use_and_close(groups)


def test_unlike_world_sizes_are_named_on_both() -> None:
    port = free_port()
    with no_growth():
        errors = connect([environment(0, 2, port), environment(1, 3, port)])
    assert str(errors[0]) == str(errors[1])
    assert "was started with WORLD_SIZE=3, rank 0 (pid" in str(errors[0])


def test_another_runs_rank_is_refused_and_named() -> None:
    port = free_port()
    mine, other = {"TORCHELASTIC_RUN_ID": "mine"}, {"TORCHELASTIC_RUN_ID": "other"}
    with no_growth():
        errors = connect([environment(0, 2, port, **mine), environment(1, 2, port, **other)], timeout_s=1.0)
    assert "belongs to run 'other/0', rank 0" in str(errors[1]) and "to run 'mine/0'" in str(errors[1])
    assert "1 did not come; refused: rank 1 (pid" in str(errors[0])


def test_a_stray_of_another_run_does_not_disturb() -> None:
    port = free_port()
    run = {"TORCHELASTIC_RUN_ID": "mine"}
    groups: list[Any] = []
    first = threading.Thread(target=lambda: groups.extend(connect([environment(0, 2, port, **run)])))
    first.start()
    while not is_listening(port):
        assert first.is_alive()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(address(port))  # says nothing at all
        (stray,) = connect([environment(1, 2, port, TORCHELASTIC_RUN_ID="mine", TORCHELASTIC_RESTART_COUNT="1")])
        assert "belongs to run 'mine/1'" in str(stray)
        groups += connect([environment(1, 2, port, **run)])
        first.join(60)
    use_and_close(groups)


def test_two_processes_with_one_rank_are_named() -> None:
    port = free_port()
    errors = connect([environment(0, 4, port), environment(1, 4, port), environment(1, 4, port)])
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "two processes say that they are rank 1: pids" in str(errors[0])


def test_missing_ranks_are_named() -> None:
    port = free_port()
    with no_growth():
        errors = connect([environment(0, 4, port), environment(2, 4, port)], timeout_s=0.5)
        assert "rank 0 waited 0.5 s for ranks to connect: of 4 ranks, 1 3 did not come" in str(errors[0])
        assert str(errors[1]) == str(errors[0])
        (alone,) = connect([environment(1, 2, port)], timeout_s=0.3)
        assert "rank 1 waited 0.3 s for rank 0 to listen" in str(alone)


def test_a_leftover_that_holds_the_name_is_named_not_joined() -> None:
    port = free_port()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leftover, no_growth():
        leftover.bind(address(port))
        leftover.listen()
        errors = connect([environment(0, 2, port), environment(1, 2, port)], timeout_s=0.5)
    assert f"another job's rank 0 does (pid {os.getpid()}, running)" in str(errors[0])
    assert f"is connected to rank 0 (pid {os.getpid()}, running), which did not answer" in str(errors[1])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RANK", None, "RANK is not set: start ranks with torchrun"),
        ("RANK", "one", "RANK='one' is not a whole number: use 0 to 1"),
        ("RANK", "2", "RANK=2 is out of range: use 0 to 1"),
        ("WORLD_SIZE", "", "WORLD_SIZE is not set"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is out of range"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK=-1 is out of range"),
        ("MASTER_PORT", "http", "MASTER_PORT='http' is not a whole number"),
        ("MASTER_PORT", "70000", "MASTER_PORT=70000 is out of range"),
        ("MASTER_ADDR", "192.0.2.7", "MASTER_ADDR='192.0.2.7' is 192.0.2.7, which is not an address of this machine"),
        ("LOCAL_WORLD_SIZE", "1", "LOCAL_WORLD_SIZE=1 of WORLD_SIZE=2: ranks of one group must be on one node"),
    ],
)
def test_malformed_environments(name: str, value: str | None, words: str) -> None:
    environ = environment(1, 2, 1234)
    environ.pop(name, None)
    if value is not None:
        environ[name] = value
    with pytest.raises(SpecError) as caught:
        init_group(1.0, environ)
    assert words in str(caught.value)


def test_no_time_is_no_limit() -> None:
    with pytest.raises(SpecError, match="seconds above 0"):
        init_group(-1.0, environment(0, 1, 1234))


def test_restarts_with_one_job_id_after_kills() -> None:
    """20 times, all killed at each point in turn; nothing is left, every restart works, no job is joined twice."""
    port, jobs = free_port(), set()
    with no_growth():
        for _ in range(4):
            for point in ("start", "connected", "used", "in a call", "never"):
                with start_processes(
                    die_at, 2, point, group_timeout_s=None, run_id="always the same", master_port=port
                ) as ranks:
                    results = ranks.wait(30.0)
                if point == "never":
                    assert [result.error for result in results] == ["", ""]
                    assert results[0].value == results[1].value
                    jobs.add(results[0].value)
                else:
                    assert [result.error for result in results] == ["was killed by SIGKILL"] * 2
                assert not is_listening(port)
    assert len(jobs) == 4


def test_a_death_while_connecting_is_named() -> None:
    with start_processes(come_or_die, 3, group_timeout_s=None) as ranks:
        results = ranks.wait(30.0)
    assert results[0].value == f"rank 1 (pid {results[1].pid}) died while the ranks were connecting"
