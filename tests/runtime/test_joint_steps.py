"""Steps with tensor-parallel blocks: bit for bit what a replicated step computes, over both transports."""

from __future__ import annotations

from typing import Any

import pytest
from block_model import WIDTH
from census import no_growth
from joint_faults import (
    APART,
    JOINT,
    capture_after_a_failure,
    closed_while_it_computes,
    come_back,
    fail_in_compute,
    interrupted,
    lose_a_rank,
    refusals,
    skip_a_step,
    slow_to_compute,
    unlike_shapes,
)
from joint_programs import (
    all_steps,
    built_in_inference_mode,
    capture_again,
    in_turn,
    look_at_graphs,
    replay_from_c,
    speculate_idly,
    update_between,
)
from ranks import MODES, entry_of, failure_text, rank_environment, run_on_ranks, try_on_ranks

from graphshard.comm.launch import run_ranks
from graphshard.device.as_libcuda import host_driver_environment, why_not_as_libcuda

ALONE = {"pull": "threads", "nccl": "processes"}
"""Ranks that give up: a captured collective that waits cannot be aborted, and what it has is left to the process."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_of_either_mode_are_exact(world_size: int, mode: str, transport: str) -> None:
    for wrong, blocks, _ in run_on_ranks(all_steps, world_size, transport, "auto", mode=mode):
        assert wrong == [] and blocks == [3, 3, 0, 0]


@pytest.mark.parametrize(("dual", "expected"), [("tensor_parallel", 3), ("gather", 0)])
def test_one_shard_serves_every_mode(dual: str, expected: int, transport: str) -> None:
    found = run_on_ranks(all_steps, 2, transport, dual)
    (_, _, layout), *_ = run_on_ranks(all_steps, 2, transport, "auto")
    assert [(wrong, blocks) for wrong, blocks, _ in found] == [([], [expected] * 4)] * 2
    assert {digest for _, _, digest in found} == {layout}


@pytest.mark.parametrize(
    "more",
    [
        {"executor": "threaded"},
        {"head": "tail"},
        {"head": "outside"},
        {"prefetch_depth": 0},
        {"units": "weight", "prefetch_depth": 2, "executor": "threaded"},
    ],
    ids=str,
)
def test_any_plan_has_such_steps(more: dict[str, Any], transport: str) -> None:
    for wrong, blocks, _ in run_on_ranks(all_steps, 2, transport, "auto", False, more):
        assert wrong == [] and blocks == [3, 3, 0, 0]


def test_gathers_over_several_streams() -> None:
    for wrong, _, _ in run_on_ranks(all_steps, 3, "pull", "auto", False, {"num_copy_streams": 2}):
        assert wrong == []


@pytest.mark.parametrize("mode", MODES)
def test_ranks_may_run_eagerly_or_replay_each_as_it_likes(mode: str) -> None:
    for wrong, _, _ in run_on_ranks(all_steps, 3, "pull", "auto", True, mode=mode):
        assert wrong == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_blocks_of_narrow_numbers(dtype: str, transport: str) -> None:
    """Tokens and partial sums of the last block are rounded to it; small whole numbers are kept."""
    assert run_on_ranks(in_turn, 2, transport, 4, dtype) == [""] * 2


@pytest.mark.parametrize("num_steps", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_decode_and_prefill_in_turn(num_steps: int, transport: str) -> None:
    """Steps from one shard: tensor-parallel, gathered, ...; memory is flat (checked inside)."""
    assert run_on_ranks(in_turn, 2, transport, num_steps, "float32", mode="processes") == [""] * 2


def test_updates_between_steps(transport: str) -> None:
    assert run_on_ranks(update_between, 3, transport) == [[]] * 3


def test_captures_between_steps() -> None:
    """Capturing records over what peers read, so ranks meet first; a slow one is waited for."""
    assert run_on_ranks(capture_again, 3) == [[]] * 3


@pytest.mark.parametrize("run", [pytest.param("eager", marks=pytest.mark.slow), "graph"])
def test_a_rank_that_does_not_come(run: str, transport: str) -> None:
    with no_growth():
        outcomes = run_on_ranks(skip_a_step, 3, 1, run, transport, mode=ALONE[transport])
    for rank, (text, seconds, refused, apart) in enumerate(outcomes):
        if rank != 1:
            assert text.startswith("CommError: rank ") and "waited 1.0 s for step 2 of shape 1x1" in text, text
            assert "rank 1 did not" in text and seconds < 10.0, text
            assert "is refused" in refused
        assert apart == "", "a step without blocks needs nobody"


@pytest.mark.parametrize(("how", "said"), [("kill", "died"), ("close", "closed its runtime")])
@pytest.mark.parametrize("run", ["eager", pytest.param("graph", marks=pytest.mark.slow)])
def test_a_rank_that_is_gone(run: str, how: str, said: str) -> None:
    outcomes = try_on_ranks(lose_a_rank, 3, run, how, mode="processes")
    for outcome in outcomes[:2]:
        assert not outcome.error, outcome.error
        text, seconds, refused, apart = outcome.value
        assert "rank 2 (pid " in text and f"{said} while rank" in text and seconds < 10.0, text
        assert "is refused" in refused and apart == ""


@pytest.mark.parametrize("run", [pytest.param("eager", marks=pytest.mark.slow), "graph"])
def test_ranks_that_take_unlike_steps(run: str, transport: str) -> None:
    told = run_on_ranks(unlike_shapes, 3, run, transport, mode=ALONE[transport])
    assert len({text for text, _ in told}) == 1
    assert "ranks issue different gathers" in told[0][0] and all(seconds < 10.0 for _, seconds in told)
    if transport == "pull":
        assert "the tokens of 3 tensor-parallel blocks, in a step of shape 2x1" in told[0][0]


@pytest.mark.parametrize("part", [pytest.param("prepare", marks=pytest.mark.slow), "compute", "finish"])
def test_what_one_rank_cannot_compute_nobody_believes(part: str, transport: str) -> None:
    told = run_on_ranks(fail_in_compute, 3, part, transport, mode=ALONE[transport])
    for rank, (text, _, refused, apart) in enumerate(told):
        if rank == 1:
            assert text == f"ArithmeticError: no {part} today"
        elif part != "finish":  # behind the last block's sum nobody reads what this rank lacks
            assert "rank 1 could not compute its part of a step of shape 1x1: ArithmeticError: no" in text, text
            assert "is refused" in refused
        assert apart == ""


def test_a_rank_that_gave_up_passes_what_it_comes_to_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late that is: else no step of any kind could follow on this rank."""
    monkeypatch.setattr("graphshard.comm.activations.RELEASE_S", 0.001)
    for text, _, refused, apart in run_on_ranks(slow_to_compute, 2):
        assert "waited 1.0 s for step 2 of shape 1x1" in text, text
        assert "is refused" in refused and apart == ""


def test_a_capture_after_a_failure_is_refused_with_it() -> None:
    for text in run_on_ranks(capture_after_a_failure, 2):
        assert text.startswith("CommError: a capture is refused: rank 0's part in tensor-parallel steps is broken"), (
            text
        )
        assert "waited 1.0 s for step 1 of shape 1x1" in text


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_was_interrupted_ends_before_the_next_step(is_broken: bool) -> None:
    """Also where a step with blocks failed before: those without go on."""
    assert run_on_ranks(interrupted, 2, APART, is_broken) == [["", "", ""]] * 2


def test_closing_waits_for_a_step_without_blocks_after_one_with_blocks_failed() -> None:
    assert run_on_ranks(closed_while_it_computes, 2) == [[True]] * 2


def test_an_interrupted_step_that_a_rank_does_not_come_to_is_given_up() -> None:
    (text, *wrong), other = run_on_ranks(interrupted, 2, JOINT, False)
    assert "for the end of what was interrupted: rank 0 came to it, rank 1 did not" in text and wrong == [""]
    assert other == ["", "", ""]


def test_what_is_refused(transport: str) -> None:
    for loop, handle in run_on_ranks(refusals, 2, transport):
        assert "steps of shape 1x1 have tensor-parallel blocks: run or replay them" in loop
        assert "need all ranks, and nobody watches what a server replays from C" in handle


@pytest.mark.parametrize("run", ["graph", "eager"])
def test_idle_ranks_take_part(run: str, transport: str) -> None:
    """A size is agreed before each step, as step shapes must be alike; who has nothing computes on zeros."""
    for right, sizes in run_on_ranks(speculate_idly, 2, transport, run):
        assert right and sizes == [[1, False], [2, False], [2, False], [1, False], [2, False], [0, True]]


@pytest.mark.skipif(why_not_as_libcuda() is not None, reason=str(why_not_as_libcuda()))
def test_what_graphs_show(transport: str) -> None:
    """Graph and eager run agree, activations are told from weights, and gathers are those of the biases alone."""
    tokens, partial = 2 * 2 * WIDTH * 4, 2 * 2 * WIDTH * 4
    environment = {**rank_environment(), **host_driver_environment()}
    entry = entry_of(look_at_graphs)
    results = run_ranks(entry, 2, arguments=(transport,), timeout_s=60.0, group_timeout_s=30.0, env=environment)
    assert not failure_text(results), failure_text(results)
    for told in (result.value for result in results):
        assert told["difference"] is None and told["gathers"] == 3 and told["times"]
        pull = ["flags 0", f"exchange {tokens}", "flags 0", f"exchange {partial}"]
        nccl = [f"exchange {tokens}", f"exchange {partial // 2}"]
        assert told["kinds"] == 3 * (pull if transport == "pull" else nccl)


def test_a_rank_that_died_is_told_why_it_cannot_come_back() -> None:
    outcomes = try_on_ranks(come_back, 2, mode="processes")
    assert "tensor-parallel steps have been taken by all ranks together" in outcomes[0].value[0]


def test_a_server_may_replay_them_from_c(transport: str) -> None:
    assert run_on_ranks(replay_from_c, 2, transport) == [[], []]


def test_a_runtime_that_was_made_in_inference_mode() -> None:
    assert run_on_ranks(built_in_inference_mode, 2) == [[], []]
