"""Faults of captures and of what a captured graph owns, each test named after the right outcome."""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from fault_tools import InThread, alone, collect, is_mapped, is_window, memory_addresses, reorder, with_run
from order_rig import Rig
from ranks import run_on_ranks
from verify_cases import good_programs

import graphshard
from graphshard._core import Event, Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.core.lowering import Wait, lower
from graphshard.core.specs import StepShape
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime
from graphshard.verify import verify

LAYERS = [[3000], [4000], [5000]]
HEADS = ("inside", "outside", "tail")


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


class Failing:
    """Makes segment `index` raise as long as `is_on`, in whatever way `how` says."""

    def __init__(self, model: ByteModel, index: int, how: str = "raise") -> None:
        self.is_on, self.how = True, how
        with_run(model, index, self._run)

    def _run(self, segment: Segment, state: StepState) -> None:
        segment.run(state)
        if self.is_on and self.how == "raise":
            raise RuntimeError("as asked")
        if self.is_on:
            state.buffer("step").sum().item()  # what no capture permits


def captured_after(group: Group, head: str, transport: str, num_warm_ups: int, aborted: str) -> tuple[str, ...]:
    """What was captured after so many eager steps and an eager step or a capture that failed midway."""
    model = ByteModel(LAYERS)
    failing = Failing(model, 1, "raise" if aborted == "step" else "item")
    choices: dict[str, Any] = {"prefetch_depth": 1, "head": head, "transport": transport, "capture_sizes": []}
    with compile_bytes(group, model, units="layer", **choices) as runtime:
        if aborted == "step":
            with pytest.raises(RuntimeError, match="as asked"):
                runtime.run(1)
        if aborted == "capture":
            with pytest.raises(graphshard.DeviceError, match=r"layers\.1\.s0.*not permitted when stream is capturing"):
                runtime.capture()
        failing.is_on = False
        for _ in range(num_warm_ups):
            runtime.run(1)
        runtime.capture()
        graph = runtime.graph(1)
        assert [wrong_after(runtime, model, graph.replay) for _ in range(2)] == [[], []]
        bound = runtime._bound[StepShape(1)]
        memcpys = graph.num_nodes()["memcpy"]
        before = runtime.num_primes
        graph.replay()
        num_gathers = memcpys // group.world_size + runtime.num_primes - before
        assert num_gathers == len(runtime.plan.units), "every unit is gathered once a step"
        text = runtime.programs[StepShape(1)].text()
        return text, bound.lowered.text(), str(bound.sources), str(sorted(graph.num_nodes().items()))


@pytest.mark.parametrize("head", HEADS)
def test_captures_are_equal_whatever_ran_before(head: str, transport: str) -> None:
    """No host flag that a warm-up consumes decides what is captured."""
    cases = [(0, ""), (1, ""), (2, ""), (0, "step"), (0, "capture"), (2, "step")]
    found = {text for case in cases for text in run_on_ranks(captured_after, 2, head, transport, *case)}
    assert len(found) == 1


def share_slots(group: Group, transport: str) -> list[str]:
    model = ByteModel(LAYERS, tied=True)
    sizes = [1, 2, 4]
    choices: dict[str, Any] = {"prefetch_depth": 1, "head": "tail", "transport": transport, "capture_sizes": sizes}
    with compile_bytes(group, model, units="layer", **choices) as runtime:
        graphs = [runtime.graph(size) for size in sizes]
        assert len({id(graph) for graph in graphs}) == len(sizes)
        wrong: list[str] = []
        num_primes = runtime.num_primes  # of the check at bind and of the captures, which gather what they record
        for seed in range(10):
            for graph in graphs:
                assert not {"event_record", "event_wait"} & set(graph.num_nodes()), "events are edges, owned by a graph"
                reorder(graph, seed)
            for first, second in itertools.product([*graphs, None], repeat=2):  # None: the list itself, eagerly
                for graph in (first, second):
                    wrong += wrong_after(runtime, model, graph.replay if graph else lambda: runtime.run(2))
        assert runtime.num_primes <= num_primes + 1, "the slots' state is handed from shape to shape"
        return wrong


def test_graphs_of_several_step_shapes_share_slots_but_no_event(transport: str) -> None:
    """Graph A's event is never waited for by graph B; each pair of shapes may follow each other."""
    assert run_on_ranks(share_slots, 2, transport) == [[], []]


def test_graphs_outlive_each_other(transport: str) -> None:
    """Closing one of two graphs takes nothing from the other, whichever was captured first."""
    for closed in (1, 4):
        model = ByteModel(LAYERS)
        with alone(model, capture_sizes=[1, 4], transport=transport) as runtime:
            kept = runtime.graph(5 - closed)
            runtime._graphs[StepShape(closed)].close()
            gc.collect()
            assert [wrong_after(runtime, model, kept.replay) for _ in range(3)] == [[]] * 3
            runtime.capture()
            assert wrong_after(runtime, model, runtime.graph(closed).replay) == []


def test_nothing_captured_can_be_waited_for_outside() -> None:
    """A step hands out tensors, never an event; the host waits for a word, and its own lists' events."""
    model = ByteModel(LAYERS)
    with alone(model) as runtime:
        graph = runtime.graph(1)
        public = {name: getattr(graph, name) for name in dir(graph) if not name.startswith("_")}
        assert "outputs" in public
        assert not [name for name, value in public.items() if isinstance(value, (Event, Stream)) or "event" in name]
        bound = runtime._bound[StepShape(1)]
        runtime.run(1)
        graph.replay()  # leaves the eager list's events as they were
        assert all(bound.op_list.event_done(event) for event in range(bound.lowered.num_events))


def test_a_list_that_waits_for_another_captures_event_is_refused(rig: Rig) -> None:
    """Forced past the verifier, the driver refuses the capture; nothing is waited for silently."""
    for name, program in good_programs(3):
        lowered = lower(program, 2)
        waits = [i for i, op in enumerate(lowered.ops) if isinstance(op, Wait)]
        for index in waits:
            foreign = lowered.ops[:index] + (replace(lowered.ops[index], event=lowered.num_events),)  # type: ignore[type-var]
            listed = replace(lowered, ops=foreign + lowered.ops[index + 1 :], num_events=lowered.num_events + 1)
            report = verify(program, lowered={program: listed})
            assert 9 in report.rules, f"{name}: {report.text()}"
            if lowered.ops[index].stream == "compute":
                assert "STREAM_CAPTURE_ISOLATION" in rig.step(program, listed).refusal


def test_the_last_prefetch_is_joined(rig: Rig) -> None:
    """The join is part of every list; without it the verifier and the driver refuse, with the same stream."""
    number = 0
    for name, program in good_programs(4):
        lowered = lower(program, 2)
        assert rig.step(program, lowered).refusal == "", name
        if not isinstance(lowered.ops[-1], Wait):
            continue
        unjoined = replace(lowered, ops=lowered.ops[:-1])
        report = verify(program, lowered={program: unjoined})
        assert 8 in report.rules and "stream copy is not joined into compute" in report.text(), name
        assert "cuStreamEndCapture failed: CUDA_ERROR_STREAM_CAPTURE_UNJOINED" in rig.step(program, unjoined).refusal
        assert rig.step(program, lowered).refusal == "", "a refused capture leaves the streams as they were"
        number += 1
    assert number > 10


def test_what_comes_too_early_or_too_late_names_the_missing_step() -> None:
    """There is no runtime before its windows, and every call says which step is missing."""
    model = ByteModel(LAYERS)
    runtime = alone(model, capture_sizes=[])
    with pytest.raises(graphshard.SpecError, match=r"captured: none\. Add it to capture_sizes, or call Ru"):
        runtime.graph(1)
    runtime.capture()
    graph = runtime.graph(1)
    runtime.close()
    shape = StepShape(1)
    uses = [graph.replay, runtime.capture, lambda: runtime.run(1), lambda: runtime.graph(1), lambda: runtime.held]
    uses += [lambda: runtime.prefetch(1), lambda: runtime.buffers(shape, "output"), runtime.buffer_table]
    for use in uses:
        with pytest.raises(graphshard.ProgramError, match="this runtime is closed; compile the model again"):
            use()
    group = LocalGroup(1)[0]
    group.close()
    with pytest.raises(graphshard.CommError, match=r"closed.*: make a new one"):
        compile_bytes(group, model, units="layer")


def test_a_graph_closed_by_hand_says_what_to_do_and_can_be_captured_again() -> None:
    """The advice in the error works."""
    model = ByteModel(LAYERS)
    with alone(model) as runtime:
        graph = runtime.graph(1)
        graph.close()
        graph.close()
        with pytest.raises(graphshard.DeviceError, match=r"1x1 is closed; capture again with Runtime\.capture"):
            graph.replay()
        runtime.capture()
        assert wrong_after(runtime, model, runtime.graph(1).replay) == []


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_a_capture_inside_a_capture_is_refused(whose: str) -> None:
    """Whether the inner one is of the same runtime (another shape) or of a second model's."""
    model, other = ByteModel(LAYERS), ByteModel(LAYERS, name="draft")
    inner: list[Runtime] = []

    def capture_more(segment: Segment, state: StepState) -> None:
        if inner:
            inner.pop().capture()
        segment.run(state)

    with_run(model, 1, capture_more)
    with alone(model, capture_sizes=[]) as runtime, alone(other, capture_sizes=[]) as draft:
        inner.append(runtime if whose == "its own" else draft)
        with pytest.raises(graphshard.ProgramError, match=r"segment layers\.\d\.s0 calls capture while it runs"):
            runtime.capture()
        for good, its_model in ((runtime, model), (draft, other)):
            good.capture()
            assert wrong_after(good, its_model, good.graph(1).replay) == []


def test_captures_of_two_threads_take_turns_or_say_who_holds_them_up() -> None:
    """A short limit ends in an error that names the other capture, a long one in a turn of one's own."""
    model, other = ByteModel(LAYERS), ByteModel(LAYERS, name="draft")
    is_inside, may_go_on = threading.Event(), threading.Event()

    def hold(segment: Segment, state: StepState) -> None:
        is_inside.set()
        assert may_go_on.wait(60.0)
        segment.run(state)

    with_run(model, 1, hold)
    with alone(model, capture_sizes=[]) as runtime, alone(other, capture_sizes=[]) as draft:
        capturing = InThread(runtime.capture)
        assert is_inside.wait(60.0)
        patience, draft.timeout_s = draft.timeout_s, 0.02
        with pytest.raises(graphshard.DeviceError, match=r"cannot be captured: .* another capture is open"):
            draft.capture()
        draft.timeout_s = patience
        waiting = InThread(draft.capture)
        may_go_on.set()
        capturing.result(), waiting.result()
        for good, its_model in ((runtime, model), (draft, other)):
            assert wrong_after(good, its_model, good.graph(1).replay) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "item"])
def test_failed_captures_leave_nothing_behind(how: str, transport: str) -> None:
    """At the first, the middle and the last segment, 100 times each; then a good capture."""
    num_times = 100 if transport == "pull" else 20
    for index in range(3):
        model = ByteModel(LAYERS, temporaries=True)
        failing = Failing(model, index, how)
        expected: Any = RuntimeError if how == "raise" else graphshard.DeviceError
        with alone(model, capture_sizes=[], transport=transport) as runtime:
            for buffer in runtime.buffers(StepShape(1), "output").values():
                buffer.fill_(7)
            with pytest.raises(expected):
                runtime.capture()
            arena_bytes, table = runtime._compute._arena.num_bytes, runtime.buffer_table()
            with no_growth():
                for _ in range(num_times):
                    with pytest.raises(expected):
                        runtime.capture()
            assert (runtime._compute._arena.num_bytes, runtime.buffer_table()) == (arena_bytes, table)
            assert all(bool((b == 7).all()) for b in runtime.buffers(StepShape(1), "output").values())
            failing.is_on = False
            runtime.capture()
            assert runtime._compute._arena.num_bytes <= max(arena_bytes, 4 << 20)
            assert wrong_after(runtime, model, runtime.graph(1).replay) == []


def test_captured_memory_is_pinned_while_its_graph_lives() -> None:
    """Nobody is given a slot, a buffer or an arena block that a graph writes; after `close` all go."""
    model = ByteModel([[33 << 20], [3000]], temporaries=True)  # blocks so large that they are mappings of their own
    runtime = alone(model)
    graph = runtime.graph(1)
    block = runtime._compute._arena._blocks[0]
    arena_block, alive = block.data_ptr(), block.untyped_storage()._weak_ref()
    del block
    pinned = memory_addresses(runtime)
    del runtime._compute._arena._blocks[:]  # the owner of the blocks forgets them; the tapes do not
    gc.collect()
    others = [torch.full((33 << 20,), 0xFF, dtype=torch.uint8) for _ in range(2)]
    assert all(map(is_mapped, pinned)) and not torch.UntypedStorage._expired(alive)
    assert not any(other.data_ptr() <= arena_block < other.data_ptr() + other.numel() for other in others)
    assert wrong_after(runtime, model, graph.replay) == []
    assert all(bool((other == 0xFF).all()) for other in others)
    outputs = runtime.buffers(StepShape(1), "output")
    shards, slots = (next(r.address for r in runtime.buffer_table() if r.name == name) for name in ("shards", "slots"))
    assert is_window(shards) and is_window(slots)
    runtime.close()
    collect()
    gone = not is_window(slots) and torch.UntypedStorage._expired(alive)
    assert gone, "also while graph and runtime are still referred to"
    assert model.wrong(outputs) == [], "what a caller holds stays"
    del outputs, graph, runtime
    collect()
    assert not is_window(shards) and not is_window(slots)
    torch.UntypedStorage._free_weak_ref(alive)


def test_what_a_segment_made_inline_lives_as_long_as_its_graph() -> None:
    """Constants and temporaries without a name; the model itself may go."""
    model = ByteModel(LAYERS, temporaries=True)
    truth = model.tensors()
    with alone(model) as runtime:
        graph = runtime.graph(1)
        runtime._compute._segments = ()
        runtime._compute._states.clear()
        model.segments = ()
        gc.collect()
        garbage = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in range(2900, 5100, 20) for _ in range(3)]
        for output in graph.outputs.values():
            output.zero_()
        for _ in range(3):
            graph.replay()
            assert all(torch.equal(seen, truth[key.split(":")[1]]) for key, seen in graph.outputs.items())
        assert all(bool((tensor == 0xFF).all()) for tensor in garbage)
