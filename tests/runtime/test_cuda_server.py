"""Steps that hold another communicator's collectives on the compute stream: a server's tensor parallelism.

On a GPU the server's calls are what its segments enqueue on torch's current stream; here the host driver plays the GPU
and the calls are NCCL's own, see `server_rig`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from ranks import MODES, run_on_ranks
from server_rig import NUM_LAYERS, leave_one_out, serve

KINDS = ("ordinary", "symmetric")
PLANS: list[dict[str, Any]] = [{"prefetch_depth": 0}, {"prefetch_depth": 1}, {"prefetch_depth": 1, "head": "tail"}]
LIMIT_S = 1.0
NUM_ORDERS = 300


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plan",
    [PLANS[0], pytest.param(PLANS[1], marks=pytest.mark.slow), PLANS[2]],
    ids=lambda plan: "-".join(map(str, plan.values())),
)
def test_two_communicators_in_one_step_are_right_in_every_order(plan: dict[str, Any], kind: str) -> None:
    """Each rank has one worker for all streams of the graph, and takes their nodes in an order of its own.

    Ranks are threads that capture in turn, though a warm-up waits for the others: it is no part of the capture.
    """
    for told in run_on_ranks(serve, 3, kind, plan, NUM_ORDERS):
        assert told["wrong"] == []


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_issue_is_one_on_all_ranks(mode: str) -> None:
    """Gathers of weights and the server's calls lie in the captured step as the program has them."""
    first, *others = run_on_ranks(serve, 2, "ordinary", PLANS[1], 3, mode=mode)
    expected = ["gather 0"]
    for unit in range(1, NUM_LAYERS):
        expected += [f"gather {unit}", "server"]  # no gather parts the last two segments' calls
    assert first["issued"] == expected
    assert all(told == first for told in others) and first["wrong"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_leaves_a_collective_out_ends_the_step_by_name(kind: str) -> None:
    """What the server does wrong holds our step up; all ranks are told so in time, and all can close."""
    told = run_on_ranks(leave_one_out, 2, kind, LIMIT_S)
    (text,) = {found["text"] for found in told}
    assert re.match(
        rf"rank \d waited {LIMIT_S:.1f} s for step 2 of shape 1x1 \(eager\): all ranks came to it, and it did not end; "
        r"peers: rank \d",
        text,
    )
    assert all(found["wrong"] == [] and found["must_exit"] is None for found in told)
