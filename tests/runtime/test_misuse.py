"""What could go wrong without a word, and is refused: unlike checkpoints, equal names, steps inside themselves."""

from __future__ import annotations

import importlib
import operator
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes
from ranks import try_on_ranks

import graphshard
from graphshard._core import Memory, Stream, Word
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.plan import Plan
from graphshard.core.specs import BufferSpec, StepShape
from graphshard.device import open_device
from graphshard.runtime.model import Segment, StepState

LAYERS = [[5000], [6000], [7000]]


@pytest.mark.parametrize("plan", ["auto", "replicated"])
def test_ranks_with_unlike_weights_are_refused_on_all(plan: str) -> None:
    def rank(group: Group) -> None:
        model = ByteModel(LAYERS)
        tensors = model.tensors()
        if group.rank == 1:
            tensors["bytes.1.w0"] = tensors["bytes.1.w0"] + 1
        graphshard.compile(model, group, checkpoint=tensors, plan=plan)

    outcomes = try_on_ranks(rank, 3, timeout_s=30)
    assert len({outcome.error for outcome in outcomes}) == 1
    assert outcomes[0].error_type == "SpecError"
    assert "weight bytes.1.w0 is not replicated" in outcomes[0].error and "on ranks 0 2" in outcomes[0].error


def test_two_segments_of_one_name_are_refused() -> None:
    model = ByteModel(LAYERS)
    first = model.segments[0].spec
    with pytest.raises(graphshard.SpecError, match=r"two segments are called layers\.0\.s0"):
        graphshard.ModelSpec("twice", tuple(model.weights), (first, first))


@pytest.mark.parametrize("what", ["run", "capture", "prefetch", "begin_step", "admit", "close"])
def test_a_step_is_not_used_inside_itself(what: str, transport: str) -> None:
    model, box = ByteModel(LAYERS), []
    good = model.segments[1]

    def inside(state: StepState) -> None:
        if box:
            getattr(box[0], what)(*(() if what in ("capture", "admit", "close") else (1,)))
        good.run(state)

    model.segments = (model.segments[0], Segment(good.spec, inside), *model.segments[2:])
    with compile_bytes(LocalGroup(1)[0], model, units="layer", capture_sizes=[], transport=transport) as runtime:
        box.append(runtime)
        with pytest.raises(graphshard.ProgramError, match=rf"segment layers\.1\.s0 calls {what} while it runs"):
            runtime.run(1)
        box.clear()
        assert model.wrong(runtime.run(1)) == []


class Lookup(ByteModel):
    """The first weight is a table of indices: what it holds decides whether its segment can run at all."""

    def __init__(self) -> None:
        super().__init__([[4096], [4096]])
        self.weights[0] = graphshard.WeightSpec(self.weights[0].name, (512,), "int64")
        self.segments = (Segment(self.segments[0].spec, self._look_up), self.segments[1])

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        return (*super().buffers(shape)[2:], BufferSpec("found", (512,), "float32", "output"))

    def tensors(self, version: int = 0) -> dict[str, Any]:
        return super().tensors(version) | {self.weights[0].name: torch.arange(512).flip(0)}

    def _look_up(self, state: StepState) -> None:
        table = torch.arange(512, dtype=torch.float32)
        state.buffer("found").copy_(table[state.weight(self.weights[0].name)])


def test_segments_are_recorded_over_the_weights_that_they_read() -> None:
    model = Lookup()
    with compile_bytes(LocalGroup(1)[0], model, units="layer", prefetch_depth=0) as runtime:
        step = runtime.graph(batch_size=1)
        step.replay()
        assert torch.equal(step.outputs["found"], torch.arange(512.0).flip(0))


def test_a_signal_ends_a_wait_for_a_step() -> None:
    device = open_device("host")
    memory, stream = Memory(device.driver, 8), Stream(device.driver)
    never = Word(memory, 4)

    def interrupt() -> None:
        stream.wait_value(memory.address, 0)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            never.wait(1, 60.0)
    finally:
        timer.join()


def test_capture_leaves_buffers_as_they_were(transport: str) -> None:
    model = ByteModel(LAYERS)
    with compile_bytes(LocalGroup(1)[0], model, units="layer", capture_sizes=[], transport=transport) as runtime:
        runtime.run(1)
        held = {name: tensor.clone() for name, tensor in runtime.buffers(StepShape(1), "output").items()}
        runtime.capture()
        assert all(torch.equal(held[name], tensor) for name, tensor in runtime.buffers(StepShape(1), "output").items())


def test_a_size_that_no_step_has_is_refused_and_a_name_that_no_buffer_has_lists_the_known() -> None:
    model = ByteModel(LAYERS)
    with compile_bytes(LocalGroup(1)[0], model) as runtime:
        for size in (0, -1):
            with pytest.raises(graphshard.SpecError, match=rf"whole numbers that start at 1, not {size}"):
                runtime.graph(size)
        step = runtime.graph(1)
        name = next(iter(step.outputs))
        with pytest.raises(KeyError, match=rf"no buffer 'tok' here; known: .*{name}"):
            step.outputs["tok"]
        assert "tok" not in step.outputs and step.outputs.get("tok") is None


def test_no_other_tensor_takes_a_buffers_place() -> None:
    """A step would go on with the old one."""
    model = ByteModel(LAYERS)
    with compile_bytes(LocalGroup(1)[0], model) as runtime:
        outputs = runtime.graph(1).outputs
        name, tensor = next(iter(outputs.items()))
        changes: list[Callable[[], object]] = [
            lambda: outputs.update({name: tensor}),  # type: ignore[attr-defined]
            lambda: operator.setitem(outputs, name, tensor),  # type: ignore[arg-type]
            lambda: operator.delitem(outputs, name),  # type: ignore[arg-type]
            lambda: outputs.pop(name),  # type: ignore[attr-defined]
        ]
        for change in changes:
            with pytest.raises(graphshard.SpecError, match=r"write into the one that is here, as in .*copy_"):
                change()
        assert outputs[name] is tensor


@pytest.mark.parametrize("sizes", [5, [(1, 2, 3)], None], ids=str)
def test_capture_sizes_that_are_no_sizes(sizes: Any) -> None:
    with pytest.raises(graphshard.SpecError, match=r"capture_sizes is .*as in \[1, 8\] or \[\(1, 4\)\]"):
        compile_bytes(LocalGroup(1)[0], ByteModel(LAYERS), capture_sizes=sizes)


def test_whoever_gives_all_ranks_groups_or_no_device_is_told() -> None:
    model = ByteModel(LAYERS)
    with pytest.raises(graphshard.SpecError, match=r"group is of type LocalGroup: give what .*LocalGroup\(n\)\[rank\]"):
        compile_bytes(LocalGroup(1), model)  # type: ignore[arg-type]
    with pytest.raises(graphshard.SpecError, match="device is of type NoneType: give 'host'"):
        compile_bytes(LocalGroup(1)[0], model, device=None)


def test_verify_is_called_and_imported_whatever_came_first() -> None:
    with compile_bytes(LocalGroup(1)[0], ByteModel(LAYERS)) as runtime:
        for verify in (graphshard.verify, importlib.import_module("graphshard.verify"), graphshard.verify):
            assert all(verify(program, runtime.layout).is_good for program in runtime.programs.values())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda plan: {"executor": "zz"}, "unknown executor 'zz'; known: cooperative, threaded"),
        (lambda plan: {"transport": "push"}, "unknown transport 'push'; known: pull, nccl"),
        (lambda plan: {"residencies": list(plan.residencies)}, "residencies is of type list; give a tuple"),
        (lambda plan: {"num_slots": 0}, "is refused: the plan has 3 units and 0 slots"),
        (lambda plan: {"units": plan.units[:2]}, "is refused: the plan has 2 units"),
        (lambda plan: {"residencies": (replace(plan.residencies[0], end=99),)}, "is refused: bytes has 3 segments"),
    ],
)
def test_plans_that_cannot_be(change: Callable[[Plan], dict[str, Any]], says: str) -> None:
    with compile_bytes(LocalGroup(1)[0], ByteModel(LAYERS), units="layer") as runtime:
        plan = runtime.plan
    with pytest.raises(graphshard.SpecError, match=says):
        graphshard.emit(ByteModel(LAYERS).spec(), replace(plan, **change(plan)))
