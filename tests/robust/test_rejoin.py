"""Ranks that come back while the others step on: right bytes for all, the dead one's memory given back, nobody fooled.

Rank programs use the package's layers without torch; the whole runtime comes back in test_rejoin_runtime.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from census import no_growth
from mini_programs import announce_unchecked, come_back_at_the_second_attempt, come_back_lying, serve
from ranks import start_processes
from signs import Signs, until

from graphshard.comm.launch import RankProcesses, RankResult
from graphshard.comm.process import ProcessId
from graphshard.comm.rejoin import rejoin_group
from graphshard.core.errors import CommError, SpecError


@dataclass
class Job:
    """Running ranks of `serve`, and what the test does to them."""

    signs: Signs
    ranks: RankProcesses
    ended: list[RankResult]

    def kill(self, *victims: int) -> None:
        for victim in victims:
            self.ranks.signal(victim, signal.SIGKILL)

    def restart(self, rank: int, die_at: str = "") -> int:
        """Start `rank` again, and have it die at a point if asked; its new pid."""
        if die_at:
            self.signs.order(f"die.{rank}", die_at)
        self.ended.append(self.ranks.restart(rank))
        return self.ranks.pids[rank]

    def await_admission(self, rank: int, pid: int, by: list[int]) -> None:
        self.signs.wait_for(f"admitted {rank} {pid}", by)

    def stop(self, *, all_live: bool = False) -> list[dict[str, Any]]:
        """All ranks' reports; none has ever seen a wrong byte, and nobody keeps anything of the dead."""
        self.signs.stop(range(self.ranks.world_size), all_live=all_live)
        results = self.ranks.wait(60.0)
        for result in results:
            assert result.is_good, f"rank {result.rank}: {result.error}\n{result.traceback}"
            assert result.value["wrong"] == [], result.rank
            before, after = result.value["before"], result.value["after"]
            assert after["windows"] == before["windows"]
            assert all(after[what] <= before[what] for what in before), (before, after)
        return [result.value for result in results]


@contextmanager
def job(folder: Path, world_size: int = 3) -> Iterator[Job]:
    with no_growth(), Signs(folder) as signs, start_processes(serve, world_size, str(folder)) as ranks:
        signs.wait_for("ready", range(world_size))
        yield Job(signs, ranks, [])


def test_a_rank_comes_back_twice_and_rank_0_too(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        for victim in (1, 1, 0):
            others = [rank for rank in range(3) if rank != victim]
            run.kill(victim)
            pid = run.restart(victim)
            assert run.ended[-1].error == "was killed by SIGKILL"
            assert run.signs.wait_for("ready", [victim]) == {victim: pid}
            run.await_admission(victim, pid, others)
        assert all("dead" not in told["states"] for told in run.stop(all_live=True))


def test_two_ranks_die_at_once_and_both_come_back(tmp_path: Path) -> None:
    """Each meets the other, whichever is first."""
    with job(tmp_path, 4) as run:
        run.kill(1, 2)
        pids = {rank: run.restart(rank) for rank in (1, 2)}
        assert run.signs.wait_for("ready", pids) == pids
        for rank, pid in pids.items():
            run.await_admission(rank, pid, [0, 3])
        assert all("dead" not in told["states"] for told in run.stop(all_live=True))


def test_a_rank_that_comes_back_meets_one_that_did_since_its_group_was_made(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        run.kill(1, 2)
        run.signs.order("hold.2")
        second = run.restart(2)
        run.signs.wait_for("held", [2])
        first = run.restart(1)
        run.signs.wait_for("ready", [1])
        run.await_admission(1, first, [0])
        run.signs.order("go.2")
        run.signs.wait_for("ready", [2])
        run.await_admission(2, second, [0, 1])
        assert all("dead" not in told["states"] for told in run.stop(all_live=True))


def test_one_of_two_dead_ranks_comes_back(tmp_path: Path) -> None:
    """The other's memory lives on in those who map it: a survivor hands it out. Rank 0 is the only one left."""
    with job(tmp_path) as run:
        run.kill(1, 2)
        pid = run.restart(1)
        run.signs.wait_for("ready", [1])
        run.await_admission(1, pid, [0])
        second = run.restart(2)
        run.signs.wait_for("ready", [2])
        run.await_admission(2, second, [0, 1])
        run.stop()


@pytest.mark.slow
@pytest.mark.parametrize("point", ["met", "load", "bind", "told one", "told all", "capture"])
def test_a_newcomer_dies_while_it_joins(point: str, tmp_path: Path) -> None:
    """Nobody is hurt, whoever it had told by then; the next one comes in."""
    with job(tmp_path) as run:
        run.kill(1)
        run.restart(1, die_at=point)
        pid = run.restart(1)  # waits for the end of the first
        assert [result.error for result in run.ended] == ["was killed by SIGKILL"] * 2
        assert run.signs.wait_for("ready", [1]) == {1: pid}
        run.await_admission(1, pid, [0, 2])
        run.stop()


def test_a_stopped_rank_learns_of_a_newcomer_when_it_goes_on(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        run.ranks.signal(2, signal.SIGSTOP)
        stopped = ProcessId.of(run.ranks.pids[2])
        until(lambda: stopped.state() == "stopped", "rank 2 is stopped")
        run.kill(1)
        pid = run.restart(1)
        run.signs.wait_for("ready", [1])
        run.await_admission(1, pid, [0])
        assert stopped.state() == "stopped"
        run.ranks.signal(2, signal.SIGCONT)
        run.await_admission(1, pid, [2])
        run.stop()


def test_who_may_not_come_in_is_told_why(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        name = run.ranks.job
        with pytest.raises(CommError, match=rf"rank 1 of job {name} has not ended \(pid \d+, running\): end it before"):
            rejoin_group(name, 1)
        with pytest.raises(CommError, match=f"rank 7 is none of job {name}: it has ranks 0 to 2"):
            rejoin_group(name, 7)
        with pytest.raises(CommError, match=r"rank 1 cannot come back to job 00: no living rank has a runtime"):
            rejoin_group("00", 1)
        run.kill(1)
        until(lambda: ProcessId.of(run.ranks.pids[1]).state() == "gone", "rank 1 is gone")
        refusals = {
            (
                come_back_lying,
                "model",
            ): 'CommError: certificates differ: model is "digest=mini" on ranks 0 2, "digest=other" on',
            (
                come_back_lying,
                "bytes",
            ): "LoadError: rank 1 loaded other bytes of units 0 1 2 3 4 than the others know of",
            (announce_unchecked, "model"): "CommError: rank 1 has certificate ",
            (announce_unchecked, "bytes"): "CommError: rank 1 loaded other bytes than it must have: use the checkpoint",
        }
        for (function, lie), words in refusals.items():
            arguments = [str(tmp_path), name, 1, lie]
            with start_processes(function, 1, *arguments, group_timeout_s=None) as liar:
                assert str(liar.wait(60.0)[0].value).startswith(words)
        with start_processes(come_back_at_the_second_attempt, 1, str(tmp_path), name, 1, group_timeout_s=None) as other:
            assert other.wait(60.0)[0].value == "came in, wrong: []"
        pid = run.restart(1)
        run.await_admission(1, pid, [0, 2])
        run.stop()
    with pytest.raises(CommError, match=f"rank 1 cannot come back to job {name}: .* start all ranks anew"):
        rejoin_group(name, 1)


def test_a_rank_that_came_back_has_no_part_in_collective_calls(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        run.kill(1)
        until(lambda: ProcessId.of(run.ranks.pids[1]).state() == "gone", "rank 1 is gone")
        group = rejoin_group(run.ranks.job, 1)
        assert (group.rank, group.world_size, group.agree("alone", lambda: 7)) == (1, 3, 7)
        assert group.processes[0].pid == run.ranks.pids[0]
        with pytest.raises(CommError, match=r"^barrier: rank 1 came back to job .*, and no other rank is in this call"):
            group.barrier()
        with pytest.raises(CommError, match=r"^subgroup of ranks 0 1: rank 1 came back"):
            group.subgroup([0, 1])
        group.close()
        run.restart(1)
        run.signs.wait_for("ready", [1])
        run.stop()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((None, 0), "job=None is not a name"),
        (("", 0), "job='' is not a name"),
        (("job", -1), "rank=-1 is no rank"),
        (("job", None), "rank=None is no rank"),
        (("job", True), "rank=True is no rank"),
        (("job", 1.0), "rank=1.0 is no rank"),
    ],
)
def test_places_that_cannot_be_taken_are_refused_by_argument(arguments: tuple[Any, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        rejoin_group(*arguments)


def test_a_path_is_a_name() -> None:
    with pytest.raises(SpecError, match="path=None is not a name"):
        rejoin_group("job", 0, path=None)  # type: ignore[arg-type]
