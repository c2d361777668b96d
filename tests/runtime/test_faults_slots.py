"""Faults of slots and their order: stalls hold each op in turn, so that a machine's speed hides nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from fault_tools import InThread, Latch, alone, collect, gemms_of, is_mapped, until
from mutate import modulo_slots, program_mutants
from order_rig import EARLIEST, LATEST, ORDERS, Rig
from ranks import run_on_ranks
from torch import Tensor
from verify_cases import INSIDE, harm, program_of

import graphshard
from graphshard.comm.group import Group
from graphshard.core.lowering import Lowered, Record, Wait, lower
from graphshard.core.ops import AgLaunch, WaitOnce
from graphshard.core.program import Program
from graphshard.core.specs import StepShape
from graphshard.device import open_device
from graphshard.runtime.bind import Hooks
from graphshard.verify import verify

HEADS = ("inside", "outside", "tail")
LAYERS = [[3000], [4000], [5000]]
STEP = StepShape(1)


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


# --- numbers of units and slots that do not divide ---


def target_and_draft(group: Group, num_layers: int, depth: int, head: str, transport: str) -> list[str]:
    """Two models in turn, of unlike numbers of units, several steps back to back."""
    target = ByteModel([[1000 + layer] for layer in range(num_layers)], name="target")
    draft = ByteModel([[700], [800]], name="draft")
    choices = {"units": "layer", "prefetch_depth": depth, "head": head, "transport": transport}
    with compile_bytes(group, target, **choices) as first, compile_bytes(group, draft, **choices) as second:
        wrong = []
        for _ in range(3):
            for runtime, model, times in ((first, target, 2), (second, draft, 3)):
                for _ in range(times):
                    wrong += wrong_after(runtime, model, runtime.graph(1).replay)
                wrong += wrong_after(runtime, model, lambda: runtime.run(1))  # noqa: B023
        return wrong


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 7, pytest.param(61, marks=pytest.mark.slow)])
def test_slots_fit_whatever_the_number_of_units(num_layers: int, depth: int, head: str, transport: str) -> None:
    """Also where the slots do not divide the units, beside a second model with slots of its own."""
    assert run_on_ranks(target_and_draft, 2, num_layers, depth, head, transport) == [[], []]


@pytest.mark.parametrize("num_units", [2, 3, 4, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_slots_modulo_k_show_wrong_bytes_where_the_wrap_does_not_fit(rig: Rig, num_units: int, depth: int) -> None:
    """The arithmetic that others used, forced past the verifier, is as wrong as the verifier says."""
    good = program_of([(u,) for u in range(num_units)], head="tail", prefetch_depth=depth)
    num_held = sum(unit is not None for unit in good.entry)
    mutant = modulo_slots(good, num_held + 1)
    step = rig.step(mutant)
    num_wrong = rig.wrong_orders([step] * 4, (EARLIEST, LATEST), 1) + rig.wrong_orders([step] * 4, [0], ORDERS // 4)
    assert (num_wrong == 0) == verify(mutant).is_good == (num_units % (num_held + 1) == 0)


# --- neighbours ---


@pytest.mark.parametrize("layers", [[[900], [900]], [[900]], [[900], [900], [900]]])
def test_neighbours_do_not_share_a_slot_while_one_is_read(layers: list[list[int]]) -> None:
    """With each reader stalled in turn until its neighbour has arrived, equal sizes or not."""
    model = ByteModel(layers)
    compiled = alone(model, capture_sizes=[])
    program, stays = compiled.programs[STEP], compiled.plan.residencies
    compiled.close()
    for number, gemm in enumerate(gemms_of(program)):
        latch = Latch()
        hooks = Hooks(poison=True, stalls=latch.stalls(gemm))
        with alone(model, capture_sizes=[], hooks=hooks) as runtime:
            runtime._memory._slot_bytes.fill_(0xFF)
            step = InThread(lambda: wrong_after(runtime, model, lambda: runtime.run(1)))
            if number + 1 < len(stays):
                neighbour = stays[number + 1]
                assert neighbour.slot != stays[number].slot
                size, truth = layers[number + 1][0], model.tensors()[f"bytes.{number + 1}.w0"]
                slot = runtime._memory.slot(neighbour.slot)
                until(lambda: torch.equal(slot[:size], truth), "the neighbour has arrived")  # noqa: B023
            latch.open()
            assert step.result() == []


def test_an_embedding_and_a_head_alone() -> None:
    """No layer between the two readers of one weight; either alone is a neighbour of itself."""
    for choices in ({"include": ["*"]}, {"outside_layers": True}, {}):
        model = ByteModel([[900]], tied=True)
        with alone(model, head="tail", **choices) as runtime:
            for act in (runtime.graph(1).replay, lambda: runtime.run(1)) * 2:
                assert wrong_after(runtime, model, act) == []


# --- memory dropped while it is read ---


@pytest.mark.parametrize("how", ["eager", "captured"])
def test_memory_is_kept_until_compute_has_read_it(how: str) -> None:
    """Everybody lets go of a runtime while a step reads a slot; nobody else is given its memory."""
    model = ByteModel(LAYERS)
    probe = alone(model, capture_sizes=[])
    gemm = gemms_of(probe.programs[STEP])[0]
    probe.close()
    latch = Latch()
    runtime = alone(model, hooks=Hooks(poison=True, stalls=latch.stalls(gemm)))
    runtime.timeout_s = 0.1
    driver, outputs = runtime.driver, runtime.buffers(STEP, "output")
    addresses = {row.name: row.address for row in runtime.buffer_table()}
    with pytest.raises(graphshard.CommError, match=r"waited 0\.1 s for step 1 of shape 1x1"):
        runtime.run(1) if how == "eager" else runtime.graph(1).replay()
    runtime.close()
    del runtime
    gc.collect()
    assert is_mapped(addresses["slots"]) and is_mapped(addresses["shards"]) and driver.num_retired > 0
    others = [open_device().allocate(1 << 16, exportable=True) for _ in range(8)]
    for other in others:
        memoryview(other)[:] = b"\xff" * other.num_bytes
    latch.open()
    until(lambda: driver.num_retired == 0, "the step has ended, and what it used is gone")
    assert model.wrong(outputs) == [], "the step went on over what it began with"
    assert not is_mapped(addresses["slots"])


def test_views_keep_what_they_show() -> None:
    """A caller's view of a buffer or a slot outlives the runtime; the rest goes."""
    model = ByteModel(LAYERS)
    runtime = alone(model)
    runtime.graph(1).replay()
    slot, outputs = runtime._memory.slot(0), runtime.buffers(STEP, "output")
    before, shards = slot.clone(), runtime._memory.shards.address
    del runtime
    collect()
    assert not is_mapped(shards)
    assert torch.equal(slot, before) and model.wrong(outputs) == []


# --- gathers beside loading ---


class LateTensors(Mapping[str, Tensor]):
    """A checkpoint that is looked at at once, whose bytes come when the latch is open; it says when all were read."""

    def __init__(self, tensors: Mapping[str, Tensor], latch: Callable[[], object], told: Callable[[], None]) -> None:
        self._tensors, self._latch, self._told = tensors, latch, told
        self._seen: set[str] = set()
        self._unread = set(tensors)
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Tensor:
        with self._lock:
            if name not in self._seen:  # for its dtype and shape
                self._seen.add(name)
                return self._tensors[name]
        self._latch()
        with self._lock:
            if self._unread == {name}:
                self._told()
            self._unread.discard(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_no_rank_gathers_before_every_rank_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 begins to load when the others stand at the border; they wait, and see its bytes."""
    order: list[str] = []
    arrived = [threading.Event() for _ in range(3)]
    gather = Group.all_gather

    def all_gather(self: Group, *args: Any, **named: Any) -> Any:
        if named.get("name") == "load":
            arrived[self.rank].set()
        if named.get("name") == "window list":
            order.append(f"rank {self.rank} maps windows")
        return gather(self, *args, **named)

    monkeypatch.setattr(Group, "all_gather", all_gather)

    def rank(group: Group) -> list[str]:
        model = ByteModel(LAYERS)

        def latch() -> None:
            if group.rank == 2:
                assert all(event.wait(60.0) for event in arrived[:2]), "ranks 0 and 1 never came to the border"

        late = LateTensors(model.tensors(), latch, lambda: order.append(f"rank {group.rank} has loaded"))
        with compile_bytes(group, model, checkpoint=late, units="layer", prefetch_depth=1) as runtime:
            return [line for act in (runtime.graph(1).replay,) * 2 for line in wrong_after(runtime, model, act)]

    assert run_on_ranks(rank, 3) == [[], [], []]
    assert {line.split(" ", 2)[2] for line in order[:3]} == {"has loaded"} and order[2] == "rank 2 has loaded"


# --- gates that are moved or dropped ---


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_gate_that_is_moved_or_dropped_is_caught_and_harms_as_said(rig: Rig, depth: int, head: str) -> None:
    """The verifier refuses each; where it says wrong bytes, some order really shows them, else none does."""
    program = program_of([(0,), (1,), (0,), (2,), (3,)], head=head, prefetch_depth=depth)
    num_harmful = 0
    for mutant in program_mutants(program):
        if "gate" not in mutant.kind:
            continue
        report = verify(mutant.program)
        assert not mutant.by_definition or 5 in report.rules, report.text()
        is_harmful = any(violation.wrong_bytes for violation in report.violations)
        step = rig.step(mutant.program)
        num_wrong = rig.wrong_orders([step, step], (EARLIEST, LATEST), 1)
        num_wrong = num_wrong or rig.wrong_orders([step, step], [0], ORDERS // 2)
        assert (num_wrong > 0) == is_harmful, f"{mutant.kind}: {report.text()}\n{mutant.program.text()}"
        num_harmful += is_harmful
    assert num_harmful > 0 or depth == 0, "with depth 0 the last gather into the slot is always behind compute"


# --- both directions of a slot's reuse ---


def without_gate_waits(program: Program) -> Lowered:
    """The list of `program` with no gather behind its slot's gate."""
    lowered = lower(program, 2)
    gates = {op.event for op in lowered.ops if isinstance(op, Record) and op.op >= 0 and op.stream == "compute"}
    ops = tuple(op for op in lowered.ops if not (isinstance(op, Wait) and op.op >= 0 and op.event in gates))
    assert len(ops) < len(lowered.ops)
    return replace(lowered, ops=ops)


def test_both_directions_of_a_slots_reuse_are_waited_for(rig: Rig) -> None:
    """Gather after gemm (the gate), gemm after gather (the wait); without either, bytes are wrong."""
    program = Program.parse(INSIDE)
    good = rig.step(program)
    assert rig.wrong_orders([good, good], (EARLIEST, LATEST, *range(ORDERS)), 1) == 0
    ungated = without_gate_waits(program)
    assert verify(program, lowered={program: ungated}).rules == {6} and harm(program, ungated) is not None
    step = rig.step(program, ungated)
    assert rig.wrong_orders([step], [EARLIEST], 1) > 0 and rig.wrong_orders([step], [LATEST], 1) == 0
    waits = [index for index, op in enumerate(program.ops) if isinstance(op, WaitOnce)]
    for index in waits:
        unwaited = replace(program, ops=program.ops[:index] + program.ops[index + 1 :])
        assert verify(unwaited).rules == {3}
        step = rig.step(unwaited)
        assert rig.wrong_orders([step], [LATEST], 1) > 0


def second_step_meets_first(rig: Rig, lowered: Lowered) -> int:
    """Two eager steps whose first one's last gemm is held until the second one's first gather came, if it can."""
    program = Program.parse(INSIDE)
    latch = Latch()
    step = rig.step(program, lowered, Hooks(poison=True, stalls=latch.stalls(gemms_of(program)[-1])))
    rig.num_wrong = 0
    rig.poison()
    step.bound.op_list.issue(step.calls)
    step.bound.op_list.issue(step.calls)
    if not any(isinstance(op, Wait) and op.stream == "copy" and op.op < 0 for op in lowered.ops):
        first = bytes(rig.truth[0])
        until(lambda: bytes(rig.slots[0]) == first and latch.word.value == 0, "the second step's gather has come")
    latch.open()
    for stream in rig.streams.values():
        assert stream.synchronize(60.0)
    return rig.num_wrong


def test_slots_are_reused_across_two_steps_in_order(rig: Rig) -> None:
    """The list's fork orders a step's gathers after the last step's readers; without it they meet."""
    program = Program.parse(INSIDE)
    lowered = lower(program, 2)
    assert second_step_meets_first(rig, lowered) == 0
    unforked = replace(lowered, ops=tuple(op for op in lowered.ops if not (isinstance(op, Wait) and op.op < 0)))
    assert verify(program, lowered={program: unforked}).rules == {6, 8}
    assert second_step_meets_first(rig, unforked) > 0


def test_two_programs_follow_each_other_over_the_same_slots(rig: Rig) -> None:
    """Across two graphs: what the one leaves and the other expects is gathered between them."""
    chain = [(u,) for u in range(4)]
    programs = [program_of(chain, head=head, prefetch_depth=depth) for head in HEADS for depth in (0, 1, 2)]
    steps = [rig.step(program) for program in programs]
    for first in steps:
        for second in steps:
            num_wrong = rig.wrong_orders([first, second, first], (EARLIEST, LATEST, 0, 1), 2)
            assert num_wrong == 0, f"{first.program.text()}{second.program.text()}"
    tail, head = (rig.step(program_of(chain, head=head, prefetch_depth=1)) for head in ("tail", "inside"))
    refill, rig.refill = rig.refill, lambda before, program: None  # type: ignore[method-assign]
    try:
        assert rig.wrong_orders([head, tail], [0], 1) > 0, "without what the runtime's table gathers, bytes are wrong"
    finally:
        rig.refill = refill  # type: ignore[method-assign]


# --- waits for the step launched last ---


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("how", ["eager", "captured"])
def test_the_host_waits_for_the_step_it_launched_last(how: str, head: str) -> None:
    """Only the second step is stalled, so what the first one left behind cannot end its wait."""
    model = ByteModel(LAYERS)
    choices: dict[str, Any] = {"head": head, "capture_sizes": []}
    probe = alone(model, **choices)
    last = gemms_of(probe.programs[STEP])[-1]
    probe.close()
    latch = Latch(is_open=True)
    with alone(model, hooks=Hooks(poison=True, stalls=latch.stalls(last)), **choices) as runtime:
        runtime.capture()
        act: Callable[[], object] = runtime.graph(1).replay if how == "captured" else lambda: runtime.run(1)
        for _ in range(2):
            assert wrong_after(runtime, model, act) == []
            latch.close()
            patience, runtime.timeout_s = runtime.timeout_s, 0.1
            with pytest.raises(graphshard.CommError, match=r"waited 0\.1 s for step"):
                act()
            with pytest.raises(graphshard.DeviceError, match="is still running"):
                runtime.prefetch(1)
            latch.open()
            runtime.timeout_s = patience
            until(lambda: all(s.is_idle() for s in runtime._streams.values()), "the late step has ended")
            assert wrong_after(runtime, model, act) == [], "late, and yet nothing is lost"


def test_a_gather_from_outside_waits_for_the_step_launched_last() -> None:
    """The step's tail is stalled the second time only; a gather on another stream comes after it."""
    model = ByteModel(LAYERS)
    probe = alone(model, head="tail", capture_sizes=[])
    tail = max(index for index, op in enumerate(probe.programs[STEP].ops) if isinstance(op, AgLaunch))
    probe.close()
    latch = Latch(is_open=True)
    with alone(model, head="tail", hooks=Hooks(poison=True, stalls=latch.stalls(tail))) as runtime:
        graph, prefetch = runtime.graph(1), runtime._streams["prefetch"]
        for _ in range(3):
            assert wrong_after(runtime, model, graph.replay) == []
            assert runtime._streams["compute"].synchronize(30.0), "the first step's tail is to pass the open latch"
            latch.close()
            assert wrong_after(runtime, model, graph.replay) == [], "outputs are ready before the tail is joined"
            runtime._slots.forget()
            runtime.prefetch(1)
            assert not prefetch.is_idle(), "the gather waits, though the first step's end is long done"
            latch.open()
            assert wrong_after(runtime, model, graph.replay) == []
