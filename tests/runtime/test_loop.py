"""Loops of one's own: the same list, issued around layers that the caller computes; after any error steps go on."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from fault_tools import InThread, Latch, alone, until
from ranks import MODES, run_on_ranks

import graphshard
from graphshard._core import Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.ops import AgLaunch
from graphshard.core.specs import ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.runtime.bind import Hooks
from graphshard.runtime.loop import LayerCall, layer_calls
from graphshard.runtime.runtime import Runtime

LAYERS = [[3000], [4000, 500], [5000], [2500]]
HEADS = ("inside", "outside", "tail")
CONFIG = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)


def loop(runtime: Runtime, model: Any, batch_size: int = 1) -> None:
    """One step as a loop: the segments are run here, not by the runtime."""
    with runtime.begin_step(batch_size) as step, torch.inference_mode():
        for i in sorted({s.spec.layer for s in model.segments if s.spec.layer is not None}):
            if i == 0:
                step.state.run(model.segments[: step.calls[0].begin])
            step.before_layer(i)
            step.state.run([segment for segment in model.segments if segment.spec.layer == i])
            step.after_layer(i)
        step.state.run(model.segments[step.calls[-1].end :])


# --- the same bits ---


def mixed(group: Group, choices: dict[str, Any]) -> list[str]:
    """Loops, runs and replays in turn, so that every order of the three follows every other."""
    model = ByteModel(LAYERS)
    with compile_bytes(group, model, units="layer", **choices) as runtime:
        acts = {"L": lambda: loop(runtime, model), "E": lambda: runtime.run(1), "R": runtime.graph(1).replay}
        return [f"{name}: {line}" for name in "LLELRLREERRL" for line in wrong_after(runtime, model, acts[name])]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_loops_see_the_right_bytes_between_runs_and_replays(head: str, depth: int, transport: str) -> None:
    assert run_on_ranks(mixed, 2, {"head": head, "prefetch_depth": depth, "transport": transport}) == [[], []]


@pytest.mark.parametrize(
    "choices", [{"num_copy_streams": 2}, {"num_slots": 4, "prefetch_depth": 1}, {"units": "weight"}]
)
def test_loops_over_other_plans(choices: dict[str, Any]) -> None:
    """Several gathers may belong to one layer if the layer is one segment."""
    model = ByteModel([[3000], [4000], [5000]])
    with alone(model, **choices) as runtime:
        assert [line for _ in range(3) for line in wrong_after(runtime, model, lambda: loop(runtime, model))] == []


def test_a_replicated_plan_is_looped_over_too() -> None:
    model = ByteModel(LAYERS)
    with compile_bytes(LocalGroup(1)[0], model, plan="replicated", min_shard_bytes=64 * 1024) as runtime:
        assert wrong_after(runtime, model, lambda: loop(runtime, model)) == []


def llama_logits(group: Group, as_loop: bool, transport: str) -> list[list[float]]:
    model, weights = random_llama(CONFIG, max_batch_size=2)
    choices = {"min_shard_bytes": 0, "prefetch_depth": 1, "units": "layer", "capture_sizes": [2]}
    choices["transport"] = transport
    with graphshard.compile(model, group, checkpoint=weights, **choices) as runtime:  # type: ignore[arg-type]
        seen = []
        for position in range(3):
            inputs = runtime.buffers(StepShape(2), "input")
            inputs["tokens"].copy_(torch.tensor([[5 * position + 1], [7 * position + 2]]))
            inputs["positions"].fill_(position)
            loop(runtime, model, 2) if as_loop else runtime.run(2)
            seen.append(runtime.buffers(StepShape(2), "output")["logits"].flatten().tolist())
        return seen


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_llama_looped_over_equals_one_that_is_run(mode: str, transport: str) -> None:
    looped = run_on_ranks(llama_logits, 2, True, transport, mode=mode)
    assert looped == run_on_ranks(llama_logits, 2, False, "pull")


# --- order ---


@pytest.fixture
def runtime() -> Any:
    model = ByteModel(LAYERS)
    with alone(model) as runtime:
        yield runtime
        assert wrong_after(runtime, model, lambda: loop(runtime, model)) == [], "the next step is right"
        assert wrong_after(runtime, model, lambda: runtime.run(1)) == []


def test_a_wrong_layer_names_the_one_that_is_due(runtime: Runtime) -> None:
    step = runtime.begin_step()
    step.before_layer(0)
    step.after_layer(0)
    expected = r"before_layer\(2\) was called with 1 of 4 layer calls done, layer 1 is due: .* begin another step"
    with pytest.raises(graphshard.ProgramError, match=expected):
        step.before_layer(2)
    assert set(runtime.held) == {None}, "what the slots held is forgotten"
    with pytest.raises(graphshard.ProgramError, match=r"this step is over .* called out of order"):
        step.before_layer(1)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("a0", r"after_layer\(0\) was called with 0 of 4 layer calls done, layer 0 is due"),
        ("b0 b0", r"before_layer\(0\) was called with 0 of 4 layer calls done, layer 0 is open"),
        ("b0 b1", r"before_layer\(1\) was called with 0 of 4 layer calls done, layer 0 is open"),
        ("b0 a0 a0", r"after_layer\(0\) was called with 1 of 4 layer calls done, layer 1 is due"),
        ("b0 a0 b1 a1 b2 a2 b3 a3 b0", r"before_layer\(0\) was called with 4 of 4 layer calls done, end\(\) is due"),
        ("b0 a0 e", r"end\(\) was called with 1 of 4 layer calls done, layer 1 is due"),
        ("b0 e", r"end\(\) was called with 0 of 4 layer calls done, layer 0 is open"),
    ],
)
def test_every_wrong_order_is_named(runtime: Runtime, calls: str, expected: str) -> None:
    step = runtime.begin_step()
    *good, last = calls.split()
    verbs = {"b": lambda i: step.before_layer(i), "a": lambda i: step.after_layer(i), "e": lambda i: step.end()}
    for call in good:
        verbs[call[0]](int(call[1:]))
    with pytest.raises(graphshard.ProgramError, match=expected):
        verbs[last[0]](int(last[1:] or 0))


def test_a_step_that_has_ended_is_over(runtime: Runtime) -> None:
    with runtime.begin_step() as step:
        for layer in range(4):
            step.before_layer(layer)
            step.after_layer(layer)
    for use in (step.end, lambda: step.before_layer(0)):
        with pytest.raises(graphshard.ProgramError, match=r"this step is over .* it has ended; begin another"):
            use()
    step.abort()


# --- plans that no loop can run ---


def test_a_gather_inside_a_layer_is_refused_with_the_way_out() -> None:
    with alone(ByteModel(LAYERS), units="weight") as runtime:
        expected = r"layer 1 cannot be run by a loop: .* between layers.1.s0 and layers.1.s1; plan with units=layer"
        with pytest.raises(graphshard.ProgramError, match=expected):
            runtime.begin_step()
        runtime.run(1)


def test_sharded_weights_outside_the_layers_are_refused_with_the_way_out() -> None:
    model = ByteModel([[3000], [4000]], tied=True)
    with alone(model, outside_layers=True, include=["*"]) as runtime:
        expected = r"segment tied outside of them reads the sharded weight bytes\.0\.w0; plan with outside_layers=False"
        with pytest.raises(graphshard.ProgramError, match=expected):
            runtime.begin_step()


def test_a_layer_called_again_has_numbered_segments() -> None:
    segments = [("pre", None), ("a", 0), ("b", 0), ("a#2", 0), ("b#2", 0), ("a", 1), ("post", None), ("a#3", 0)]
    spec = ModelSpec(
        "m", (WeightSpec("w", (4,), "uint8"),), tuple(SegmentSpec(name, layer, ("w",)) for name, layer in segments)
    )
    assert layer_calls(spec) == (LayerCall(0, 1, 3), LayerCall(0, 3, 5), LayerCall(1, 5, 6), LayerCall(0, 7, 8))


# --- steps that do not end ---


def test_an_exception_gives_the_step_up_and_locks_nobody_out(runtime: Runtime) -> None:
    with pytest.raises(ZeroDivisionError), runtime.begin_step() as step:
        step.before_layer(0)
        raise ZeroDivisionError
    assert set(runtime.held) == {None}
    InThread(lambda: runtime.run(1)).result()


def test_a_step_left_open_is_given_up_by_the_next_of_its_thread(runtime: Runtime) -> None:
    left = runtime.begin_step()
    left.before_layer(0)
    with runtime.begin_step() as step:
        with pytest.raises(graphshard.ProgramError, match=r"this step is over .* left open and another one began"):
            left.after_layer(0)
        for layer in range(4):
            step.before_layer(layer)
            step.after_layer(layer)


def test_a_step_of_a_dead_thread_is_given_up(runtime: Runtime) -> None:
    def leave_open() -> Any:
        step = runtime.begin_step()
        step.before_layer(0)
        return step

    left = InThread(leave_open).result()
    runtime.run(1)
    with pytest.raises(graphshard.ProgramError, match=r"its thread .* ended without end"):
        left.after_layer(0)


def test_whatever_else_steps_is_refused_while_the_threads_own_step_is_open(runtime: Runtime) -> None:
    step = runtime.begin_step()
    step.before_layer(0)
    graph = runtime.graph(1)
    for use in (lambda: runtime.run(1), graph.replay, lambda: runtime.prefetch(1), runtime.capture):
        with pytest.raises(graphshard.ProgramError, match=r"a step of this thread is open \(0 of 4 .*\): end\(\) or"):
            use()
    step.after_layer(0)
    step.abort()


def test_threads_take_turns(runtime: Runtime) -> None:
    step = runtime.begin_step()
    waits = [InThread(lambda: runtime.run(1)), InThread(lambda: loop(runtime, ByteModel(LAYERS)))]
    until(lambda: len(runtime.turn._changed._waiters) == 2, "both threads wait for their turn")  # type: ignore[attr-defined]
    assert runtime.num_steps == 0
    for layer in range(4):
        step.before_layer(layer)
        step.after_layer(layer)
    step.end()
    for thread in waits:
        thread.result()
    assert runtime.num_steps == 3


def test_waiting_for_another_threads_step_is_bounded() -> None:
    with alone(ByteModel(LAYERS), timeout_s=0.2) as runtime:
        opened, done = threading.Event(), threading.Event()

        def hold() -> None:
            step = runtime.begin_step()
            opened.set()
            assert done.wait(60)
            step.abort()

        holder = InThread(hold)
        assert opened.wait(60)
        with pytest.raises(graphshard.ProgramError, match=r"has had a step open \(0 of 4 .* for more than 0.2 s"):
            runtime.run(1)
        done.set()
        holder.result()
        runtime.run(1)


def test_closing_ends_an_open_step() -> None:
    runtime = alone(ByteModel(LAYERS))
    step = runtime.begin_step()
    step.before_layer(0)
    runtime.close()
    with pytest.raises(graphshard.ProgramError, match=r"this step is over .* the runtime was closed"):
        step.after_layer(0)
    with pytest.raises(graphshard.ProgramError, match="this runtime is closed"):
        runtime.begin_step()


# --- late gathers, auxiliary streams ---


def test_late_weights_are_named_and_the_runtime_recovers() -> None:
    latch, model = Latch(), ByteModel(LAYERS)
    with alone(model) as runtime:
        ops = runtime.programs[StepShape(1)].ops
    gather = next(index for index, op in enumerate(ops) if isinstance(op, AgLaunch) and op.unit == 2)
    with alone(model, hooks=Hooks(stalls=latch.stalls(gather)), timeout_s=0.2, capture_sizes=[]) as runtime:
        step = runtime.begin_step()
        for layer in (0, 1):
            step.before_layer(layer)
            step.after_layer(layer)
        expected = rf"rank 0 waited 0.2 s for step 1 .* first op that is not done is op {gather} ag_launch unit=2"
        with pytest.raises(graphshard.CommError, match=expected):
            step.before_layer(2)
        with pytest.raises(graphshard.DeviceError, match="still running"):
            runtime.begin_step()
        latch.open()
        until(lambda: all(stream.is_idle() for stream in runtime._streams.values()), "the stalled gather ends")
        assert wrong_after(runtime, model, lambda: loop(runtime, model)) == []


def test_a_slot_is_not_released_before_an_auxiliary_stream_has_read_it() -> None:
    """One slot, and a reader of layer 0 that is held: the gather of layer 1 must wait for it."""
    latch, model = Latch(), ByteModel([[3000], [3000]])
    seen = torch.zeros(3000, dtype=torch.uint8)
    with alone(model, prefetch_depth=0) as runtime:
        assert len(runtime.layout.slots) == 1
        side = Stream(runtime.driver)
        slot = runtime.memory.slot(0)
        with runtime.begin_step() as step:
            step.before_layer(0)
            side.wait_value(latch.word.address, 1)
            side.call(lambda: seen.copy_(slot[:3000]))
            step.after_layer(0, streams=[side])
            assert bytes(slot[:3000].tolist()) == bytes(model.tensors()["bytes.0.w0"].tolist()), "not overwritten yet"
            latch.open()
            step.before_layer(1)
            assert torch.equal(slot[:3000], model.tensors()["bytes.1.w0"])
            step.after_layer(1)
        side.check()
    assert torch.equal(seen, model.tensors()["bytes.0.w0"])
