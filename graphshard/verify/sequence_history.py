"""A sequence read in issue order: every stay of a unit in a slot between graphs, with the ops that touch it."""

from __future__ import annotations

from dataclasses import dataclass, field

from graphshard.core.ops import AgLaunch
from graphshard.core.program import Program
from graphshard.core.sequence import (
    Held,
    Place,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SlotState,
    StepSequence,
)


@dataclass(slots=True)
class Stay:
    """`unit` lies in `slot` of `graph`, for a replay to find it there: gathered from outside, or left by a replay.

    `op` issued it (None: it is the sequence's entry). Until `waits` has one on compute it is in flight, unless it
    `is_held`. `reads` are replays that expect it. `ended` is the op that overwrites or discards it.
    """

    graph: str
    unit: int
    slot: int
    op: int | None
    is_held: bool
    launch: PrefetchLaunch | None = None
    waits: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    ended: int | None = None
    again: Stay | None = None
    """The gather of the same unit that overwrote it."""

    @property
    def place(self) -> Place:
        """Graph, unit and slot."""
        return self.graph, self.unit, self.slot


@dataclass(frozen=True, slots=True)
class Missing:
    """Replay `op` expects `unit` in `slot`, where there is `held` instead (None: nothing to rely on)."""

    op: int
    graph: str
    unit: int
    slot: int
    held: Stay | None


@dataclass(slots=True)
class SequenceHistory:
    """All stays in issue order, what has none, and what is left at the end."""

    stays: list[Stay] = field(default_factory=list)
    stray_waits: list[int] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    left: tuple[SlotState, ...] = ()


def sequence_history(sequence: StepSequence) -> SequenceHistory:
    """Walk `sequence` once. All graphs, units and slots that it names exist."""
    walk = _Walk(sequence)
    for item in sequence.entry:
        launch = item if isinstance(item, PrefetchLaunch) else None
        walk.enter(Stay(item.graph, item.unit, item.slot, None, isinstance(item, Held), launch))
    for index, op in enumerate(sequence.ops):
        if isinstance(op, PrefetchLaunch):
            walk.enter(Stay(op.graph, op.unit, op.slot, index, False, op))
        elif isinstance(op, PrefetchWait):
            walk.wait_for(index, op)
        elif isinstance(op, PrefetchDiscard):
            walk.discard(index, op.graph)
        elif isinstance(op, Replay):
            walk.replay(index, sequence.graph(op.graph))
    walk.leave()
    return walk.found


class _Walk:
    """What lies in every slot of every space so far."""

    def __init__(self, sequence: StepSequence) -> None:
        self.sequence = sequence
        self.spaces = {graph.name: graph.slot_space for graph in sequence.graphs}
        self.here: dict[tuple[str, int], Stay] = {}
        self.found = SequenceHistory()

    def enter(self, stay: Stay) -> None:
        key = (self.spaces[stay.graph], stay.slot)
        before = self.here.get(key)
        if before is not None:
            before.ended = stay.op
            before.again = stay if before.place == stay.place else None
        self.here[key] = stay
        self.found.stays.append(stay)

    def wait_for(self, index: int, op: PrefetchWait) -> None:
        stay = self.here.get((self.spaces[op.graph], op.slot))
        if stay is None or stay.place != op.place:
            self.found.stray_waits.append(index)
        else:
            stay.waits.append(index)

    def discard(self, index: int, graph: str) -> None:
        for key, stay in list(self.here.items()):
            if stay.graph == graph:
                stay.ended = index
                del self.here[key]

    def replay(self, index: int, graph: SequenceGraph) -> None:
        program = graph.program
        for slot, unit in enumerate(program.entry):
            if unit is None:
                continue
            stay = self.here.get((graph.slot_space, slot))
            if stay is not None and stay.place == (graph.name, unit, slot):
                stay.reads.append(index)
            else:
                self.found.missing.append(Missing(index, graph.name, unit, slot, stay))
        written = {op.slot for op in program.ops if isinstance(op, AgLaunch)}
        for slot in range(program.num_slots):
            self.pass_slot(index, graph, slot, slot in written)

    def pass_slot(self, index: int, graph: SequenceGraph, slot: int, is_written: bool) -> None:
        """What a replay of `graph` does to `slot`: it may overwrite it, and may leave there what it found."""
        program, key = graph.program, (graph.slot_space, slot)
        stay, unit = self.here.get(key), kept_unit(program, slot)
        if is_written:
            if stay is not None:
                stay.ended = index
                del self.here[key]
            if unit is not None:
                self.enter(Stay(graph.name, unit, slot, index, True))
        elif stay is not None and stay.graph == graph.name and unit is None:
            stay.ended = index
            del self.here[key]

    def leave(self) -> None:
        order = {graph.name: number for number, graph in enumerate(self.sequence.graphs)}
        left = sorted(self.here.values(), key=lambda stay: (order[stay.graph], stay.slot))
        self.found.left = tuple(state_of(stay, self.sequence) for stay in left)


def kept_unit(program: Program, slot: int) -> int | None:
    """The unit that `program` expects in `slot` and leaves there for its next run; None if it does not."""
    entry = program.entry[slot] if slot < len(program.entry) else None
    return entry if slot < len(program.exit) and program.exit[slot] == entry else None


def is_waited(stay: Stay, sequence: StepSequence) -> bool:
    """Whether the launching stream has waited for `stay`, as far as issue order tells."""
    return stay.is_held or any(sequence.ops[wait].stream == "compute" for wait in stay.waits)


def state_of(stay: Stay, sequence: StepSequence) -> SlotState:
    """How an exit states it: in flight, or held."""
    if stay.launch is not None and not is_waited(stay, sequence):
        return stay.launch
    return Held(stay.graph, stay.unit, stay.slot)
