"""The collective transport in the runtime: bytes, orders, loops and attached modules, as under pull."""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import lockstep_programs as programs
import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, mixed_steps, wrong_after
from ranks import MODES, run_on_ranks, try_on_ranks

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.comm.nccl import why_not_gathered
from graphshard.core.layout import Copy, build_layout
from graphshard.core.lowering import CopyRun, lower
from graphshard.core.specs import DeviceSpec, StepShape

LAYERS = [[3000, 5], [4000], [5000], [700]]
PLANS: list[dict[str, Any]] = [
    {"units": "layer", "prefetch_depth": 0},
    {"units": "layer", "prefetch_depth": 1, "executor": "threaded"},
    {"units": "weight", "prefetch_depth": 2, "head": "outside"},
    {"units": "layer", "prefetch_depth": 1, "head": "tail"},
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan['units']}-{plan.get('head', 'inside')}")
def test_every_step_reads_its_own_bytes(plan: dict[str, Any], world_size: int) -> None:
    choices = plan | {"transport": "nccl"}
    for wrong in run_on_ranks(mixed_steps, world_size, LAYERS, choices, False):
        assert wrong == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_step_reads_its_own_bytes_in_processes(world_size: int) -> None:
    choices = PLANS[1] | {"transport": "nccl", "progress": True}
    for wrong in run_on_ranks(mixed_steps, world_size, LAYERS, choices, True, mode="processes"):
        assert wrong == []


def test_a_gather_is_one_collective_on_one_stream() -> None:
    model = ByteModel(LAYERS)
    device = DeviceSpec("host", "any", memory_bytes=1 << 40)
    plan = graphshard.make_plan(model.spec(), 4, device, units="layer", min_shard_bytes=0, transport="nccl")
    lowered = lower(graphshard.emit(model.spec(), plan), plan.num_copies, plan.num_copy_streams)
    assert {(op.begin, op.end) for op in lowered.ops if isinstance(op, CopyRun)} == {(0, 1)}
    with pytest.raises(graphshard.SpecError, match="num_copy_streams is 2, and transport nccl gathers a unit by one"):
        graphshard.make_plan(model.spec(), 4, device, transport="nccl", num_copy_streams=2)


def test_a_layout_that_is_not_flat_has_a_reason() -> None:
    model = ByteModel(LAYERS)
    device = DeviceSpec("host", "any", memory_bytes=1 << 40)
    plan = graphshard.make_plan(model.spec(), 2, device, units="layer", min_shard_bytes=0, transport="nccl")
    unit = build_layout(model.spec(), plan).units[1]
    assert why_not_gathered(unit) is None
    first, second = unit.copies
    pitched = Copy(1, first.source_offset, 512, second.slot_offset, 1024, 2, first.row_bytes // 2)
    object.__setattr__(unit, "copies", (first, pitched))
    assert why_not_gathered(unit) == f"unit 1 does not lie flat: chunk 1 is {pitched}"


def test_a_plan_that_shards_nothing_needs_no_communicator() -> None:
    model = ByteModel(LAYERS)
    with compile_bytes(
        LocalGroup(1)[0], model, plan="replicated", transport="nccl", min_shard_bytes=1 << 20
    ) as runtime:
        assert not runtime.is_collective
        assert wrong_after(runtime, model, runtime.graph(1).replay) == []


ACTS = ("eager", "replay", "prefetch", "capture", "gather")


@pytest.mark.parametrize("head", ["inside", "outside", "tail"])
def test_eager_and_captured_use_follow_each_other_in_every_order(head: str) -> None:
    """All that was issued one way has ended before the other way begins."""
    orders = [list(order) for order in permutations(ACTS)] if head == "tail" else [list(ACTS), list(reversed(ACTS))]
    orders += [["prefetch", "replay", "prefetch", "eager", "prefetch", "prefetch", "replay"]]
    for wrong in run_on_ranks(programs.every_order, 2, head, orders):
        assert wrong == []


def test_what_was_issued_has_ended_before_the_other_kind_begins() -> None:
    """The drain itself, seen at the moment when the other kind is issued."""

    def rank(group: Group) -> list[bool]:
        model = ByteModel(LAYERS)
        with programs.compiled(group, model, head="outside", timeout_s=programs.PATIENT_S) as runtime:
            seen, post = [], runtime._alignment.issue

            def issue(kind: Any, units: Any, *more: Any) -> None:
                seen.append(all(stream.is_idle() for stream in runtime._streams.values()))
                post(kind, units, *more)

            runtime._alignment.issue = issue  # type: ignore[method-assign]
            for _ in range(5):
                runtime.graph(1).replay()  # each with a gather from outside before it
            return seen

    for seen in run_on_ranks(rank, 2):
        assert len(seen) == 10 and all(seen)


@pytest.mark.parametrize("mode", MODES)
def test_attached_modules_gather_together(mode: str) -> None:
    for same in run_on_ranks(programs.attached_forwards, 2, mode=mode):
        assert same == [True] * 3


def test_loops_that_are_given_up_leave_peers_in_step() -> None:
    for head in ("inside", "outside", "tail"):
        for wrong, num_steps in run_on_ranks(programs.abort_a_loop, 3, head):
            assert (wrong, num_steps) == ([], 5)


@pytest.mark.parametrize("head", ["inside", "outside", "tail"])
def test_a_rank_whose_compute_fails_stays_in_step(head: str) -> None:
    told = run_on_ranks(programs.fail_in_compute, 3, "eager", head)
    assert [error for error, _, _ in told] == ["", "a segment's own fault", ""]
    assert all((wrong, num_steps) == ([], 5) for _, wrong, num_steps in told)


@pytest.mark.slow
def test_another_environment_on_one_rank_is_a_difference() -> None:
    """What NCCL reads is part of the certificate."""
    for outcome in try_on_ranks(programs.with_another_variable, 2, "start", mode="processes"):
        assert 'certificates differ: setting nccl environment is "nothing set"' in outcome.error
        assert '"NCCL_GRAPH_MIXING_SUPPORT=1" on rank 1' in outcome.error
    for outcome in try_on_ranks(programs.with_another_variable, 2, "capture", mode="processes"):
        assert "captures differ: setting nccl environment is 'nothing set' on rank 0, 'NCCL_GRAPH" in outcome.error


def test_unlike_captures_are_named_before_anything_is_captured() -> None:
    """R10 again at capture: other step shapes, or other gathers before."""

    def other_shapes(group: Group) -> list[int]:
        with programs.compiled(group, ByteModel(LAYERS), capture_sizes=[1, 2]) as runtime:
            for shape in runtime.programs:
                runtime.graph(shape.batch_size).close()
            runtime.capture([StepShape(1)] if group.rank == 1 else [])
            return []

    def other_gathers(group: Group) -> list[int]:
        with programs.compiled(group, ByteModel(LAYERS), capture_sizes=[1, 2]) as runtime:
            runtime._alignment.issue("outside", [], "nothing, which counts for nothing")
            if group.rank == 1:
                runtime._control.mine.post_issue(1, 1)
                runtime._alignment._number += 1  # type: ignore[attr-defined]
            runtime.graph(1).close()
            runtime.capture()
            return []

    for outcome in try_on_ranks(other_shapes, 3):
        assert "captures differ: rank 0 captures step shape 2x1 where rank 1 captures 1x1" in outcome.error
    for outcome in try_on_ranks(other_gathers, 3):
        assert re.search(r"captures differ: before this one rank 0 issued \d+ batches of gathers, rank", outcome.error)


def test_a_rank_cannot_come_back_and_is_told_why() -> None:
    first, _, third = try_on_ranks(programs.come_back, 3, mode="processes")
    for outcome in (first, third):
        assert re.match(r"rank 1 cannot come back to job \w+: a communicator cannot take in a rank", outcome.value[0])
        assert outcome.value[0].endswith("start all ranks anew, or use transport pull")
