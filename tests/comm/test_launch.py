"""Rank processes: their environment, their output, their ends, and that they never outlive anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_programs
from census import no_growth
from ranks import entry_of, rank_environment, start_processes

from graphshard.comm.launch import RankResult, failure_text, raise_first_failure, run_ranks
from graphshard.comm.process import ProcessId
from graphshard.comm.rank_main import load_entry
from graphshard.core.errors import CommError, SpecError


def test_ranks_get_torchruns_environment(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with no_growth():
        results = run_ranks(entry_of(rank_programs.describe), 3, arguments=[10], env=rank_environment(), timeout_s=60)
    for rank, result in enumerate(results):
        assert result.is_good and (result.rank, result.return_code) == (rank, 0)
        assert result.value["product"] == 10 * rank and result.value["pid"] == result.pid
        env = result.value["env"]
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("3", "3")
        assert (env["MASTER_ADDR"], env["OMP_NUM_THREADS"]) == ("127.0.0.1", "1")
    captured = capfd.readouterr()
    for rank in (1, 2):
        assert f"[rank {rank}/3] rank {rank} speaks\n" in captured.out
        assert f"[rank {rank}/3] rank {rank} complains\n" in captured.err
    assert "rank 0 speaks\n" in captured.out and "[rank 0/3]" not in captured.out


def test_a_death_ends_nobody_else() -> None:
    ends = {"0": "kill", "1": "exit", "2": "spec", "3": "value"}
    with no_growth(), start_processes(rank_programs.end_variously, 5, ends, group_timeout_s=None) as ranks:
        results = ranks.wait(60.0)
    assert [result.return_code for result in results] == [-signal.SIGKILL, 7, 2, 1, 0]
    assert [result.error for result in results[:2]] == [
        "was killed by SIGKILL",
        "ended with code 7 and without a result",
    ]
    assert (results[2].error_type, results[2].error) == ("SpecError", "cannot be built\nas asked")
    assert "raise ValueError" in results[3].traceback
    assert results[4].is_good and results[4].value == "fine"


def test_the_first_failure_is_raised_with_its_class() -> None:
    with start_processes(rank_programs.end_variously, 3, {"1": "spec"}, group_timeout_s=None) as ranks:
        results = ranks.wait(60.0)
    with pytest.raises(SpecError, match=r"^\[rank 1\] cannot be built\nas asked$"):
        raise_first_failure(results)
    text = failure_text(results)
    assert text.startswith("[rank 1/3] SpecError: cannot be built\nTraceback") and "rank 0" not in text
    with start_processes(rank_programs.end_variously, 1, {"0": "value"}, group_timeout_s=None) as ranks:
        results = ranks.wait(60.0)
    with pytest.raises(CommError, match=r"^\[rank 0\] ValueError: no good$"):
        raise_first_failure(results)
    results = [RankResult(rank, 0, 1, error_type="CommError", error="window of the shards") for rank in range(3)]
    results.append(RankResult(3, 0, -9, error="was killed by SIGKILL", ended_s=1.0))
    told = r"^\[ranks 0 1 2\] window of the shards\n\[rank 3\] was killed by SIGKILL$"
    with pytest.raises(CommError, match=told):
        raise_first_failure(results)
    raise_first_failure([])
    assert failure_text([]) == ""


def test_ranks_that_do_not_end_are_killed_and_named() -> None:
    with no_growth(), start_processes(rank_programs.end_variously, 2, {"1": "hang"}, group_timeout_s=None) as ranks:
        results = ranks.wait(4.0)
    assert results[0].is_good
    assert results[1].error == f"did not end within 4.0 s and was killed (pid {results[1].pid})"


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_failed_need_not_wait_the_whole_limit_out() -> None:
    ends = {"0": "hang", "1": "kill"}
    with no_growth(), start_processes(rank_programs.end_variously, 3, ends, group_timeout_s=None) as ranks:
        results = ranks.wait(600.0, after_failure_s=5.0)
    assert results[0].error.startswith("did not end within 5.0 s after rank 1 had failed and was killed")
    assert results[1].error == "was killed by SIGKILL" and results[2].is_good
    with pytest.raises(CommError, match=r"^\[rank 1\] was killed by SIGKILL\n\[rank 0\] did not end within"):
        raise_first_failure(results)


def test_leaving_early_ends_the_ranks() -> None:
    ends = {"0": "hang", "1": "hang"}
    with no_growth(), start_processes(rank_programs.end_variously, 2, ends, group_timeout_s=None) as ranks:
        pids = [ProcessId.of(pid) for pid in ranks.pids]
        ranks.signal(0, signal.SIGSTOP)
    assert [pid.state() for pid in pids] == ["gone", "gone"]


def test_much_output_blocks_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    with no_growth(), start_processes(rank_programs.end_variously, 2, {"1": "write"}, group_timeout_s=None) as ranks:
        results = ranks.wait(60.0)
    assert results[1].is_good
    out = capfd.readouterr().out
    assert "[rank 1/2] " + "x" * 200_000 + "\n" in out and "[rank 1/2] the end\n" in out


def test_ranks_die_with_their_launcher(tmp_path: Path) -> None:
    """One rank is stopped, all wait in native code; the launcher is killed and can do nothing for them."""
    command = [sys.executable, rank_programs.__file__, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, **rank_environment()}) as launcher:
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("[0-9]"))) < 3:
                assert time.monotonic() < deadline and launcher.poll() is None
                time.sleep(0.01)
            ranks = [ProcessId.of(int(path.read_text())) for path in sorted(tmp_path.glob("[0-9]"))]
            assert all(rank.state() == "running" for rank in ranks)
            os.kill(ranks[1].pid, signal.SIGSTOP)
        finally:
            launcher.kill()
    while any(rank.state() != "gone" for rank in ranks):
        assert time.monotonic() < deadline, [rank.state() for rank in ranks]
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nothing", "names no function"),
        ("graphshard.nowhere:f", "No module named 'graphshard.nowhere'"),
        ("graphshard.comm.process:nothing", "graphshard.comm.process has no function nothing"),
        ("/nowhere/file.py:f", "there is no file /nowhere/file.py"),
    ],
)
def test_unknown_entries(entry: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_entry(entry)


def test_no_ranks() -> None:
    with no_growth(), pytest.raises(SpecError, match="use 1 or more"):
        run_ranks("a:b", 0)


@pytest.mark.slow
def test_torchrun_works_too() -> None:
    program = (
        "from graphshard.comm import init_group; g = init_group(30); print(sum(v for v, _ in g.all_gather(g.rank + 1)))"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", program],
        env={**os.environ, **rank_environment()},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and "".join(done.stdout.split()) == "33", done.stderr  # lines may run into each other


def test_what_cannot_be_started_again_is_refused() -> None:
    with no_growth(), start_processes(rank_programs.end_variously, 2, {"1": "hang"}, group_timeout_s=None) as ranks:
        with pytest.raises(CommError, match=rf"^rank 1 \(pid {ranks.pids[1]}\) still runs: end it before"):
            ranks.restart(1, timeout_s=0.1)
        ranks.signal(1)
        with pytest.raises(CommError, match=r"^rank 1 cannot come back: no rank had its group yet; start all ranks"):
            ranks.restart(1)
        assert ranks.job == ""
        results = ranks.wait(30.0)
    assert [result.error for result in results] == ["", "was killed by SIGKILL"]


def test_a_rank_that_finds_nobody_says_so_as_its_result() -> None:
    with no_growth(), start_processes(rank_programs.leave_rank_0_alone, 2) as ranks:
        before, pid = ranks.restart(1, timeout_s=60.0), ranks.pids[1]
        assert (before.value, before.is_good, before.pid == pid) == (1, True, False)
        job = ranks.job
        ranks._processes[1].wait(60.0)
        ranks.signal(0)
        results = ranks.wait(60.0)
        with pytest.raises(CommError, match="rank 1 cannot come back: all ranks were waited for"):
            ranks.restart(1)
    assert results[0].error == "was killed by SIGKILL"
    told = f"rank 1 cannot come back to job {job}: no living rank has a runtime open here; start all ranks anew"
    assert results[1].pid == pid and results[1].error == told
