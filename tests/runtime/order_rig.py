"""A rank on which any op list runs, also one that the verifier refuses: what does it do to bytes, in which orders?

The real memory, transport, binding, capture and executors, with units and slots that fit every small program. A
compute op compares the slots it reads with the bytes of their units. Every order is two steps from poisoned slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from byte_model import self_naming
from ranks import run_on_ranks
from verify_cases import model_of, plan_of

from graphshard._core import Calls, Driver, DriverError, Graph, Memory, OpList, Stream, Word
from graphshard.comm.group import Group
from graphshard.comm.pull import PullTransport
from graphshard.core.layout import build_layout
from graphshard.core.lowering import Compute, Lowered, lower
from graphshard.core.plan import Residency
from graphshard.core.program import Program
from graphshard.device import open_device
from graphshard.runtime import bind
from graphshard.runtime.bind import POISON, BoundProgram, Hooks
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand

WORLD_SIZE, NUM_UNITS, NUM_SLOTS, UNIT_BYTES = 2, 5, 8, 1024
TIMEOUT_S = 30.0
ORDERS = 200
EARLIEST, LATEST = -2, -3
"""Seeds of the cooperative executor: copies as early and as late as their dependencies allow."""


def _rank(group: Group) -> tuple[RuntimeMemory, PullTransport]:
    model = model_of([(unit,) for unit in range(NUM_UNITS)], [UNIT_BYTES] * NUM_UNITS)
    plan = plan_of([(unit,) for unit in range(NUM_UNITS)], [UNIT_BYTES] * NUM_UNITS)
    stays = tuple(Residency(0, 0, 1, slot) for slot in range(NUM_SLOTS))  # so that every slot has room for a unit
    layout = build_layout(model, replace(plan, num_slots=NUM_SLOTS, residencies=stays))
    device = open_device()
    memory = RuntimeMemory(device, layout, {})
    tensors = {w.name: self_naming("orders", w.name, w.num_bytes) for w in model.weights}
    filler, compiled = SourceFiller(RecipeSource(TensorsInHand(tensors))), Compiled(model, plan, layout, {})
    filler.prepare(compiled, group)
    checksums = filler.fill(compiled, group, memory)
    return memory, PullTransport(device, group, layout, memory.shards, checksums)


@dataclass(frozen=True)
class Step:
    """A program bound to the rig; `graph` is None if the driver refused the capture, for the reason `refusal`."""

    program: Program
    bound: BoundProgram
    calls: Calls
    graph: Graph | None
    refusal: str


class Rig:
    """Rank 0 of two; rank 1 lent its window and is gone."""

    def __init__(self) -> None:
        (self.memory, self.transport), _ = run_on_ranks(_rank, WORLD_SIZE)
        self.driver: Driver = open_device().driver
        names = ("compute", "copy", "copy1", "copy_own", "prefetch")
        self.streams = {name: Stream(self.driver) for name in names}
        self.compute = self.streams["compute"]
        self.done = Word(Memory(self.driver, 4))
        model = model_of([(unit,) for unit in range(NUM_UNITS)], [UNIT_BYTES] * NUM_UNITS)
        self.truth = [self_naming("orders", w.name, w.num_bytes).numpy().tobytes() for w in model.weights]
        self.slots = [self.memory.slot(slot).numpy().data for slot in range(NUM_SLOTS)]
        self.num_wrong = 0
        self._nothing = Calls([])
        self._refills: dict[tuple[object, ...], OpList] = {}

    def step(self, program: Program, lowered: Lowered | None = None, hooks: Hooks | None = None) -> Step:
        """Bind and capture `program`, with a list of one's own if wished; nobody verifies either."""
        lowered = lowered or lower(program, WORLD_SIZE)
        with mock.patch.object(bind, "lower", lambda *_, **__: lowered):
            hooks = hooks or Hooks(poison=True)
            ground = bind.Ground(self.driver, self.memory, self.transport, self.streams, self.done, hooks=hooks)
            bound = bind.bind_program(program, ground)
        calls = Calls([self._reader(op) for op in bound.computes])
        try:
            return Step(program, bound, calls, bound.op_list.capture(calls), "")
        except DriverError as error:
            return Step(program, bound, calls, None, str(error))

    def wrong_orders(
        self, steps: Sequence[Step], seeds: Sequence[int], num_orders: int, executor: str = "cooperative"
    ) -> int:
        """How often wrong bytes were read: `num_orders` times all `steps` in turn, under each seed.

        An executor goes on drawing from its seed, so every launch is another order.
        """
        self.num_wrong = 0
        for seed in seeds:
            execs = [step.graph.instantiate(executor, seed) for step in steps if step.graph is not None]
            assert len(execs) == len(steps)
            for _ in range(num_orders):
                self.poison()
                before: Program | None = None
                for step, graph_exec in zip(steps, execs, strict=True):
                    self.refill(before, step.program)
                    graph_exec.launch(self.compute)
                    before = step.program
            self.synchronize()
        return self.num_wrong

    def wrong_eager(self, steps: Sequence[Step], num_orders: int) -> int:
        """As `wrong_orders`, issued on streams that are threads."""
        self.num_wrong = 0
        for _ in range(num_orders):
            self.poison()
            before: Program | None = None
            for step in steps:
                self.refill(before, step.program)
                step.bound.op_list.issue(step.calls)
                before = step.program
            for stream in self.streams.values():
                assert stream.synchronize(TIMEOUT_S)
        return self.num_wrong

    def poison(self) -> None:
        """Nothing of what slots hold can be mistaken for a unit."""
        self._issue(("poison",), [("fill", 0, self.memory.slot_address(0), POISON, NUM_SLOTS * UNIT_BYTES)])

    def refill(self, before: Program | None, program: Program) -> None:
        """What the host gathers before a step of `program`, if `before` ran last (None: at first)."""
        wanted = {op.slot: op.unit for op in program.outside}
        if before is not program:
            held = before.exit if before is not None else (None,) * len(program.entry)
            wanted |= {s: u for s, u in enumerate(program.entry) if u is not None and (s >= len(held) or held[s] != u)}
        for slot, unit in wanted.items():
            copies = self.transport.copies(unit, self.memory.slot_address(slot))
            self._issue((slot, unit), [copy.bound(0) for copy in copies])

    def synchronize(self) -> None:
        assert self.compute.synchronize(TIMEOUT_S)

    def _issue(self, key: tuple[object, ...], ops: list[tuple[object, ...]]) -> None:
        if key not in self._refills:
            self._refills[key] = OpList(self.driver, [self.compute], 0, ops)
        self._refills[key].issue(self._nothing)

    def _reader(self, op: Compute) -> Any:
        pairs = [(self.slots[slot] if 0 <= slot < NUM_SLOTS else None, self.truth[unit]) for unit, slot in op.reads]

        def read() -> None:
            for slot, truth in pairs:
                if slot is None or bytes(slot) != truth:
                    self.num_wrong += 1

        return read
