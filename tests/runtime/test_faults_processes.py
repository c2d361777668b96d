"""Faults between processes: unlike orders of dicts and hashes, and peers that go in the middle of steps."""

from __future__ import annotations

import os
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from fault_programs import ENDINGS, meet_and_part
from fault_tools import with_run
from ranks import Outcome, try_on_ranks

from graphshard.comm.group import Group
from graphshard.runtime.model import Segment, StepState

LAYERS = [[3000], [4000], [5000]]


@pytest.fixture(scope="module")
def parted() -> list[Outcome]:
    """Four rank processes with random hash seeds, three of which end each in its own way."""
    assert "PYTHONHASHSEED" not in os.environ
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "random")  # forked ranks would have one seed
        return try_on_ranks(meet_and_part, 4, mode="processes", timeout_s=120.0)


@pytest.mark.slow
def test_lists_do_not_depend_on_the_order_of_dicts_or_on_hash_seeds(parted: list[Outcome]) -> None:
    """Windows, units and ops have an agreed order on ranks whose weights come in another one each."""
    told = parted[0].value["told"]
    assert len({str(rank["hash"]) for rank in told}) == 4, "each rank has a hash seed of its own"
    assert len({str(rank["order"]) for rank in told}) > 1 and len({str(sorted(rank["order"])) for rank in told}) == 1
    assert len({str(rank["digests"]) for rank in told}) == 1 and len({str(rank["lists"]) for rank in told}) == 1


def test_survivors_go_on_and_close_when_peers_are_gone(parted: list[Outcome]) -> None:
    """An exception, os._exit and SIGKILL between steps; who is left replays on, and knows who is gone."""
    survivor = parted[0].value
    assert parted[0].error == "" and survivor["wrong"] == []
    assert survivor["num_steps"] >= 41
    assert survivor["states"] == ["live", "closed", "dead", "dead"]
    assert any(f"rank {rank}" in survivor["error"] for rank in ENDINGS), survivor["error"]
    assert parted[1].error == "out of luck"
    assert parted[2].error == "ended with code 5 and without a result"
    assert parted[3].error == "was killed by SIGKILL"


def leave_in_a_capture(group: Group, transport: str) -> list[str]:
    """Rank 1's capture fails and ends it; under pull the others capture, replay and close without it."""
    model = ByteModel(LAYERS)

    def fail(segment: Segment, state: StepState) -> None:
        segment.run(state)
        if group.rank == 1:
            raise RuntimeError("out of luck")

    choices: dict[str, Any] = {"prefetch_depth": 1, "capture_sizes": [], "transport": transport}
    with compile_bytes(group, model, units="layer", **choices) as runtime:
        with_run(model, 1, fail)
        runtime._compute._segments = model.segments
        runtime.capture()
        return [line for _ in range(5) for line in wrong_after(runtime, model, runtime.graph(1).replay)]


def test_a_rank_that_fails_in_its_capture_holds_nobody_up() -> None:
    """A capture is local; nobody waits in it for others."""
    outcomes = try_on_ranks(leave_in_a_capture, 3, "pull")
    assert [outcome.error for outcome in outcomes] == ["", "out of luck", ""]
    assert [outcomes[0].value, outcomes[2].value] == [[], []]


def test_under_nccl_a_rank_that_fails_in_its_capture_is_named_on_all() -> None:
    """The others gather what they record over, and are told that rank 1 will not come."""
    first, second, third = try_on_ranks(leave_in_a_capture, 3, "nccl")
    assert second.error == "out of luck"
    for outcome in (first, third):
        assert outcome.error_type == "CommError", outcome.traceback
        assert "rank 1" in outcome.error and "closed its runtime" in outcome.error, outcome.error
