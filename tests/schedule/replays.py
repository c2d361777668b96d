"""A judge of its own for emitted programs: the lowered list, unrolled over several replays, read with clocks.

It shares nothing with the verifier. A gather may begin when everything that touched its slot before is done; a read
must find the right unit there, whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from graphshard.core.lowering import Compute, CopyRun, Lowered, Record, Wait, lower, lower_gathers
from graphshard.core.plan import Plan
from graphshard.core.program import Program
from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.emit import emit

HOST = DeviceSpec("host", "test", 2**33)
Clock = dict[str, int]


@dataclass
class Slot:
    unit: int | None = None
    writes: list[tuple[str, int]] = field(default_factory=list)  # the latest gather's copies: (stream, position)
    reads: list[tuple[str, int]] = field(default_factory=list)  # since that gather


class Judge:
    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot() for _ in range(num_slots)]
        self.clocks: dict[str, Clock] = {}
        self.gather: dict[int, object] = {}

    def run(self, lowered: Lowered, number: object) -> None:
        """Issue one list; its first stream goes on from where it was, all others are forked from it."""
        events: dict[int, Clock] = {}
        for op in lowered.ops:
            clock = self.clocks.setdefault(op.stream, {})
            if isinstance(op, Wait):
                self.merge(clock, events[op.event])
            elif isinstance(op, CopyRun):
                self.write(op, clock, (number, op.op))
            elif isinstance(op, Compute):
                self.read(op, clock)
            clock[op.stream] = clock.get(op.stream, 0) + 1
            if isinstance(op, Record):
                events[op.event] = dict(clock)

    def order(self, first: str, then: str) -> None:
        """The host lets stream `then` wait for all that is on `first`."""
        self.merge(self.clocks.setdefault(then, {}), self.clocks.setdefault(first, {}))

    @staticmethod
    def merge(clock: Clock, other: Clock) -> None:
        for stream, count in other.items():
            clock[stream] = max(clock.get(stream, 0), count)

    def write(self, op: CopyRun, clock: Clock, gather: object) -> None:
        slot = self.slots[op.slot]
        if self.gather.get(op.slot) != gather:
            for stream, position in slot.reads + slot.writes:
                assert clock.get(stream, 0) > position, f"{op} overwrites unit {slot.unit} that is still in use"
            self.gather[op.slot] = gather
            self.slots[op.slot] = slot = Slot(op.unit)
        slot.writes.append((op.stream, clock.get(op.stream, 0)))

    def read(self, op: Compute, clock: Clock) -> None:
        for unit, number in op.reads:
            slot = self.slots[number]
            assert slot.unit == unit, f"{op} finds unit {slot.unit} in slot {number}"
            for stream, position in slot.writes:
                assert clock.get(stream, 0) > position, f"{op} reads unit {unit} before it is there"
            slot.reads.append((op.stream, clock.get(op.stream, 0)))


def check_replays(
    model: ModelSpec, plan: Plan, times: int = 3, num_copy_streams: int = 1, own: bool = False
) -> Program:
    """Emit, lower and judge `times` replays in a row, primed as the runtime does it; gives the program back."""
    program = emit(model, plan)
    lowered = lower(program, plan.world_size, num_copy_streams, own)
    check_segments(model, plan, lowered, program.entry)
    judge = Judge(plan.num_slots)
    for time in range(times):
        held = [slot.unit for slot in judge.slots]
        mismatch = any(unit is not None and unit != held[slot] for slot, unit in enumerate(program.entry))
        gathers = program.outside or (program.prime if mismatch else ())
        assert time == 0 or bool(gathers) == bool(program.outside), "only the first replay is primed"
        judge.order("compute", "prefetch")
        judge.run(lower_gathers(gathers, plan.world_size), ("outside", time))
        judge.order("prefetch", "compute")
        judge.run(lowered, time)
        held = [slot.unit for slot in judge.slots]
        assert all(unit is None or unit == held[slot] for slot, unit in enumerate(program.exit))
    return program


def check_segments(model: ModelSpec, plan: Plan, lowered: Lowered, held: Sequence[int | None]) -> None:
    """Every segment runs once, in order, and every sharded weight that it reads is read in its residency's slot.

    A unit that is held twice when the step begins may be read in the slot of its later residency: it is there too.
    """
    unit_of = {decision.weight: decision.unit for decision in plan.decisions}
    reached = 0
    for op in lowered.ops:
        if isinstance(op, Compute):
            assert op.begin == reached < op.end
            reached = op.end
            for index in range(op.begin, op.end):
                for name in model.segments[index].reads:
                    unit = unit_of[name]
                    stays = [stay for stay in plan.residencies if stay.unit == unit and index < stay.end]
                    slots = [stay.slot for stay in stays if stay.begin <= index]
                    slots += [stay.slot for stay in stays if held[stay.slot] == unit and slots]
                    assert unit is None or {(unit, slot) for slot in slots} & set(op.reads)
    assert reached == len(model.segments)


def random_model(seed: int, max_layers: int = 5) -> ModelSpec:
    """Layers of unlike sizes; segments that read several weights, none, a neighbour's, or one from far away."""
    generator = random.Random(seed)
    weights: list[WeightSpec] = []
    segments: list[SegmentSpec] = []

    def add_segment(layer: int | None, index: int) -> None:
        reads = []
        for number in range(generator.choice([0, 1, 1, 1, 2, 3])):
            prefix = "" if layer is None else f"layers.{layer}."
            weights.append(WeightSpec(f"{prefix}s{index}.w{number}", (generator.randrange(0, 2000),), "uint8"))
            reads.append(weights[-1].name)
        if weights and generator.random() < 0.15:
            reads.append(generator.choice(weights).name)
        segments.append(SegmentSpec(f"s{index}", layer, tuple(dict.fromkeys(reads))))

    if generator.random() < 0.5:
        add_segment(None, 0)
    for layer in range(generator.randrange(max_layers + 1)):
        for _ in range(generator.randrange(1, 5)):
            add_segment(layer, len(segments))
    if generator.random() < 0.5:
        add_segment(None, len(segments))
    return ModelSpec(f"random-{seed}", tuple(weights), tuple(segments))


def layered(sizes: list[int]) -> ModelSpec:
    """One weight and one segment a layer."""
    return ModelSpec(
        "layered",
        tuple(WeightSpec(f"layers.{i}.w", (size,), "uint8") for i, size in enumerate(sizes)),
        tuple(SegmentSpec("w", i, (f"layers.{i}.w",)) for i in range(len(sizes))),
    )
