"""Ranks killed at each stage of an update, and processes that come back to ranks whose weights have changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import start_processes
from signs import Signs
from update_kill_programs import die_in_an_update, serve_and_update
from update_programs import OLD_STAGES

from graphshard.runtime.update.updating import STAGES


def check_death(stage: str, transport: str, world_size: int = 3) -> None:
    """The old weights on all that live, or none on any, and the dead rank is named; nobody waits for a limit."""
    with start_processes(die_in_an_update, world_size, stage, transport, group_timeout_s=100.0) as ranks:
        results = ranks.wait(400.0)
    assert results[1].error == "was killed by SIGKILL"
    told: list[dict[str, Any]] = []
    for rank in range(0, world_size, 2):
        assert results[rank].is_good, results[rank].traceback
        told.append(results[rank].value)
    for one in told:
        assert f"rank 1 (pid {ranks.pids[1]}) died while rank " in one["said"], one["said"]
        assert "rank 1 (pid" in one["again"]
        if stage in OLD_STAGES:
            assert "nothing was written: the weights of epoch 2 stay" in one["said"]
            assert one["epoch"] == 2 and one.get("seen", 1) == 1
        else:
            assert one["epoch"] == 3 and "the weights are of no version (epoch 3)" in one["said"]
            assert all(f"rank 1 (pid {ranks.pids[1]}) died" in text for text in one["refusals"])
    if stage not in ("staging", "staged"):  # from there on ranks decide together, and say the same
        assert told[0]["said"] == told[-1]["said"]


def test_a_rank_killed_while_weights_are_written() -> None:
    check_death("writing", "pull", world_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["pull", "nccl"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_killed_at_each_stage(stage: str, transport: str) -> None:
    check_death(stage, transport)


@pytest.mark.slow
def test_who_comes_back_must_have_the_new_weights(tmp_path: Path) -> None:
    """After an update a rank dies: its place is refused to the old weights, and given to the new ones."""
    with (
        Signs(tmp_path) as signs,
        start_processes(serve_and_update, 3, str(tmp_path), "staging", group_timeout_s=100.0) as ranks,
    ):
        signs.wait_for("updated", [0, 2])
        signs.order("version", "0")
        assert ranks.restart(1).error == "was killed by SIGKILL"
        signs.wait_for("refused", [1])
        signs.order("version", "1")
        refused = ranks.restart(1, timeout_s=60.0)
        signs.wait_for("came back", [1])
        signs.stop(range(3))
        results = ranks.wait(400.0)
    assert refused.is_good, refused
    text = refused.value["refused"]
    assert "rank 1 loaded other bytes of units" in text and "the checkpoint that they run with now (epoch 2)" in text
    for rank in (0, 2):
        assert results[rank].value["seen"] == [1] and results[rank].value["epoch"] == 2, results[rank]
    epoch, version, update = results[1].value["seen"]
    assert (epoch, version) == (2, 1)
    assert "update: rank 1 came back to job " in update and "start all ranks anew with the new weights" in update


@pytest.mark.slow
def test_nobody_comes_back_to_weights_of_no_version(tmp_path: Path) -> None:
    with (
        Signs(tmp_path) as signs,
        start_processes(serve_and_update, 2, str(tmp_path), "writing", group_timeout_s=100.0) as ranks,
    ):
        signs.wait_for("updated", [0])
        signs.order("version", "1")
        assert ranks.restart(1).error == "was killed by SIGKILL"
        refused = ranks.restart(1, timeout_s=60.0)
        signs.order("settle")
        signs.order("stop")
        results = ranks.wait(400.0)
    assert "rank 1 cannot come back to job " in refused.error
    assert "its weights are of no version since an update did not end (epoch 3)" in refused.error
    assert results[0].is_good, results[0]
    assert results[0].value["epoch"] == 3 and results[0].value["seen"] == []
