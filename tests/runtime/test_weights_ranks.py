"""Ranks that are slow while they load are waited for; ranks that die or stop are named at once, or after the limit."""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path

import pytest
from load_programs import BUSY, MODEL, VICTIM, load_beside
from load_rig import compiled_of, load, write_checkpoint
from ranks import start_processes, try_on_ranks
from signs import Signs

from graphshard.comm.group import Group
from graphshard.load.checkpoint import Checkpoint
from graphshard.runtime.weights import watch, workers


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_sleeps_three_limits_in_its_load_does_not_fail_the_others(tmp_path: Path, world_size: int) -> None:
    limit_s = 0.6
    folder = write_checkpoint(tmp_path, MODEL.spec(), MODEL.tensors())

    def rank(group: Group) -> list[str]:
        slept = []

        def on_load(done: int, total: int) -> None:
            if group.rank == 1 and not slept:
                slept.append(True)
                time.sleep(3.2 * limit_s)  # how long it takes is what this is about

        compiled = compiled_of(MODEL.spec(), world_size)
        return load(group, compiled, Checkpoint(folder), on_load=on_load).wrong(MODEL.tensors())

    outcomes = try_on_ranks(rank, world_size, group_timeout_s=limit_s)
    assert [(outcome.value, outcome.error) for outcome in outcomes] == [([], "")] * world_size


def test_a_load_to_which_no_byte_comes_ends_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PATIENCE", 1)
    monkeypatch.setattr(workers, "_GRACE_S", 0.05)
    folder, over = write_checkpoint(tmp_path, MODEL.spec(), MODEL.tensors()), threading.Event()

    class Hanging(Checkpoint):
        def read_into(self, name: str, begin: int, out: memoryview) -> None:
            assert over.wait(60)

    def rank(group: Group) -> None:
        load(group, compiled_of(MODEL.spec(), 2), (Hanging if group.rank else Checkpoint)(folder))

    outcomes = try_on_ranks(rank, 2, group_timeout_s=1.0)
    over.set()
    for outcome in outcomes:
        assert outcome.error_type == "LoadError", outcome
        assert outcome.error.startswith("load failed on rank 1: no byte came for 1 s, after 0 of 54704"), outcome.error


@pytest.mark.slow  # processes that import torch; test_patience.py kills ones that do not
def test_a_rank_that_is_killed_in_its_load_fails_the_others_at_once(tmp_path: Path) -> None:
    """Rank 0 has loaded and waits, rank BUSY is still loading: both learn of it, long before any limit."""
    folder = str(write_checkpoint(tmp_path / "model", MODEL.spec(), MODEL.tensors()))
    signs_folder = str(tmp_path / "signs")
    with (
        Signs(tmp_path / "signs") as signs,
        start_processes(load_beside, 3, signs_folder, folder, "hang", 600.0, group_timeout_s=None) as ranks,
    ):
        pid = signs.wait_for("here", [VICTIM])[VICTIM]
        ranks.signal(VICTIM, signal.SIGKILL)
        results = ranks.wait(60.0)
    assert results[VICTIM].error == "was killed by SIGKILL"
    for rank in (0, BUSY):
        text = rf"CommError: .*rank 1 \(pid {pid}\) died while rank [02] (waited in load \(|was in load)"
        assert re.search(text, results[rank].value["error"]), results[rank]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stopped", "sleep"])
def test_a_process_that_sleeps_is_waited_for_and_one_that_is_stopped_is_not(tmp_path: Path, how: str) -> None:
    folder = str(write_checkpoint(tmp_path / "model", MODEL.spec(), MODEL.tensors()))
    signs_folder = str(tmp_path / "signs")
    with (
        Signs(tmp_path / "signs") as signs,
        start_processes(load_beside, 3, signs_folder, folder, "sleep", 3.0, group_timeout_s=None) as ranks,
    ):
        pid = signs.wait_for("here", [VICTIM])[VICTIM]
        if how == "stopped":
            ranks.signal(VICTIM, signal.SIGSTOP)
            signs.wait_for("failed", [0, 2])
            ranks.signal(VICTIM, signal.SIGKILL)
        results = ranks.wait(90.0)
    if how == "sleep":
        assert [result.value for result in results] == [{"wrong": []}] * 3
        return
    for rank in (0, 2):
        text = rf"waited \d+\.\d s in load \(call \d+ of this group\): rank 1 \(pid {pid}, stopped\) did not arrive"
        assert re.search(text, results[rank].value["error"]), results[rank]
