"""What a user gets wrong: one sentence that says what, what was found, where, and what next; nothing is lost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from ranks import try_on_ranks

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.specs import BufferSpec, DeviceSpec, StepShape

LAYERS = [[5000], [6000]]


def errors_of(function: Any, world_size: int = 2) -> list[str]:
    return [f"{o.error_type}: {o.error}" for o in try_on_ranks(function, world_size, timeout_s=30)]


def test_a_plan_for_another_world_size_is_refused() -> None:
    def rank(group: Group) -> None:
        model = ByteModel(LAYERS)
        device = DeviceSpec("host", "any", 1 << 30)
        plan = graphshard.make_plan(model.spec(), 3, device, min_shard_bytes=0, units="layer")
        graphshard.compile(model, group, checkpoint=model.tensors(), plan=plan)

    for error in errors_of(rank):
        assert error.startswith("SpecError: the plan is for 3 ranks, the group has 2: make the plan for this group")


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_waits_have_a_limit(timeout_s: float) -> None:
    with pytest.raises(graphshard.SpecError, match="is not a time to wait: give seconds above 0, at most 86400"):
        compile_bytes(LocalGroup(1)[0], ByteModel([[64]]), timeout_s=timeout_s)


def test_a_missing_weight_on_one_rank_is_the_same_error_on_all() -> None:
    """A rank-local error does not leave the others in the next collective."""

    def rank(group: Group) -> None:
        model = ByteModel(LAYERS)
        tensors = model.tensors()
        if group.rank == 1:
            del tensors["bytes.1.w0"]
        graphshard.compile(model, group, checkpoint=tensors, min_shard_bytes=0, units="layer")

    errors = errors_of(rank)
    assert len(set(errors)) == 1
    assert "rank 1" in errors[0] and "bytes.1.w0" in errors[0] and "1 tensors given" in errors[0]


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_another_dtype_or_shape_is_named(change: str) -> None:
    def rank(group: Group) -> None:
        model = ByteModel(LAYERS)
        tensors = model.tensors()
        wrong = tensors["bytes.0.w0"].view(torch.int8) if change == "dtype" else tensors["bytes.0.w0"][1:]
        graphshard.compile(model, group, checkpoint=tensors | {"bytes.0.w0": wrong}, min_shard_bytes=0, units="layer")

    for error in errors_of(rank):
        assert error.startswith("LoadError") and "bytes.0.w0" in error and "the model asks for uint8[5000]" in error


def test_ranks_with_unlike_plans_are_told_the_first_difference() -> None:
    def rank(group: Group) -> None:
        model = ByteModel([[5000]] * 4)
        compile_bytes(group, model, units="layer", prefetch_depth=group.rank)

    errors = errors_of(rank)
    assert len(set(errors)) == 1
    assert "CommError: certificates differ: program 1x1, op 1 is" in errors[0]
    assert '"wait_once unit=0 slot=0 stream=compute" on rank 0' in errors[0]
    assert '"ag_launch unit=1 slot=1 stream=copy" on rank 1' in errors[0]


def test_a_plan_that_fails_on_one_rank_fails_on_all() -> None:
    def rank(group: Group) -> None:
        compile_bytes(group, ByteModel(LAYERS), units="layer", num_slots=group.rank + 1, prefetch_depth=1)

    errors = errors_of(rank)
    assert len(set(errors)) == 1
    assert errors[0].startswith("SpecError: plan failed on rank 0: ")


class HungryModel(ByteModel):
    """Asks for more memory than any machine has."""

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        return (*super().buffers(shape), BufferSpec("huge", (1 << 50,), "uint8", "activation"))


def test_too_little_memory_is_refused_before_anything_is_reserved() -> None:
    group = LocalGroup(1)[0]
    model = HungryModel(LAYERS)
    with (
        no_growth(),
        pytest.raises(graphshard.DeviceError, match=r"1048576\.00 GiB are needed .* nothing was reserved"),
    ):
        compile_bytes(group, model, units="layer")


def test_a_memory_limit_that_no_plan_meets_names_the_smallest() -> None:
    group = LocalGroup(1)[0]
    with pytest.raises(graphshard.SpecError, match=r"no plan fits .*: the smallest needs"):
        compile_bytes(group, ByteModel(LAYERS), units="layer", memory_limit_bytes=4096)


def test_a_segment_called_out_of_order_is_told_who_runs_segments() -> None:
    group = LocalGroup(1)[0]
    model = ByteModel(LAYERS)
    with compile_bytes(group, model, units="layer") as runtime:
        state = runtime.state(StepShape(1))
        with pytest.raises(graphshard.ProgramError, match=r"bytes\.1\.w0 was asked for while no segment runs"):
            model.segments[1].run(state)
        assert wrong_after(runtime, model, lambda: runtime.run(1)) == []


def test_a_segment_that_reads_what_it_did_not_declare_is_named() -> None:
    group = LocalGroup(1)[0]
    model = ByteModel(LAYERS)
    sly = dataclasses.replace(model.segments[0], run=lambda state: state.weight("bytes.1.w0").sum())
    model.segments = (sly, *model.segments[1:])
    with compile_bytes(group, model, units="layer", capture_sizes=[]) as runtime:
        expected = "segment layers.0.s0 reads weight bytes.1.w0, which it did not declare; it declared bytes.0.w0"
        with pytest.raises(graphshard.ProgramError, match=expected):
            runtime.run(1)
        with pytest.raises(graphshard.ProgramError, match=expected):
            runtime.capture()


def test_an_error_in_a_segment_ends_the_step_and_not_the_runtime() -> None:
    group = LocalGroup(1)[0]
    model = ByteModel(LAYERS)
    good, failing = model.segments[0], [True]

    def fail_once(state: graphshard.StepState) -> None:
        if failing.pop() if failing else False:
            raise ZeroDivisionError("as asked")
        good.run(state)

    model.segments = (dataclasses.replace(good, run=fail_once), *model.segments[1:])
    with compile_bytes(group, model, units="layer", capture_sizes=[], head="tail", prefetch_depth=1) as runtime:
        with pytest.raises(ZeroDivisionError, match="as asked"):
            runtime.run(1)
        assert set(runtime.held) == {None}, "after an error nothing that slots hold is relied on"
        assert wrong_after(runtime, model, lambda: runtime.run(1)) == []


def test_unknown_step_shapes_name_the_known_ones() -> None:
    group = LocalGroup(1)[0]
    with compile_bytes(group, ByteModel(LAYERS), units="layer", capture_sizes=[2, 4]) as runtime:
        assert runtime.graph(batch_size=1).shape == StepShape(2)
        assert runtime.graph(batch_size=3).shape == StepShape(4)
        with pytest.raises(graphshard.SpecError, match=r"no captured step fits 5x1; captured: 2x1, 4x1"):
            runtime.graph(batch_size=5)
        with pytest.raises(graphshard.SpecError, match=r"step shape 3x1 is not among the plan's: 2x1, 4x1"):
            runtime.run(3)


def test_a_closed_runtime_and_its_graphs_refuse() -> None:
    group = LocalGroup(1)[0]
    runtime = compile_bytes(group, ByteModel(LAYERS), units="layer")
    graph = runtime.graph(batch_size=1)
    runtime.close()
    runtime.close()
    for use in (graph.replay, lambda: runtime.run(1), runtime.capture, lambda: runtime.prefetch(1)):
        with pytest.raises(graphshard.ProgramError, match="this runtime is closed"):
            use()


@pytest.mark.parametrize("plan", ["fastest", "Auto"])
def test_unknown_plans_name_the_known_ones(plan: str) -> None:
    model = ByteModel(LAYERS)
    with pytest.raises(graphshard.SpecError, match=r"unknown plan .* known: auto, replicated"):
        graphshard.compile(model, LocalGroup(1)[0], checkpoint=model.tensors(), plan=plan)  # type: ignore[arg-type]
