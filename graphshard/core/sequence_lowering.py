"""Lowering a sequence: every graph's own list and the host's gathers around it, as one list over named streams.

Streams are `compute`, which is every graph's origin, and `{graph}.{stream}` for all others: the draft's copy stream is
not the target's. Units and slots are numbered through: `LoweredSequence.units` and `.slots` say where each graph's
begin, and graphs that share a space share its slots.

    prefetch_launch   wait(end of the graph's latest replay), copies, record(arrived)    on the stream that it names
    prefetch_wait     wait(arrived) on its stream; no call where nothing was launched
    prefetch_discard  on `host`: wait(arrived), wait(end of the graph's latest replay), a copy of nothing over what it
                      has in slots, record; compute and all later gathers from outside wait for that
    replay            the graph's list, from its fork to its join; record(its end) on compute
    fold              compute
Several sequences are lowered into one list, as the host issues them. What the first one expects in flight is issued
before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphshard.core.errors import ProgramError
from graphshard.core.lowering import (
    NO_SLOT,
    ORIGIN,
    OUTSIDE_OP,
    Compute,
    CopyRun,
    Lowered,
    LoweredOp,
    Record,
    Wait,
    lower,
)
from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    Held,
    Place,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceOp,
    StepSequence,
)

ENTRY_STEP = -1
"""The step of what was issued before the first sequence."""
HOST = "host"
"""The stream of what the host itself does between graphs."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a lowered op comes from: op `op` of sequence `step`; `program_op` inside a replay (-1: its fork, join)."""

    step: int
    op: int
    graph: str
    program_op: int | None = None
    """None: the host issued it from outside."""


@dataclass(frozen=True)
class LoweredSequence:
    """`lowered.ops[i].op` is an index into `sources`."""

    lowered: Lowered
    sources: tuple[Source, ...]
    units: Mapping[str, int]
    """The number of each graph's unit 0."""
    slots: Mapping[str, int]
    """The number of slot 0 of each space."""
    entry: tuple[int | None, ...]
    """The unit that each slot holds before the list begins, beside what is in flight then."""
    nothing: int
    """The unit that stands for bytes that nobody may rely on."""

    def source(self, op: LoweredOp) -> Source:
        """Where `op` comes from."""
        return self.sources[op.op]


def stream_name(graph: str, stream: str) -> str:
    """A graph's stream as the list names it: `compute` is shared, all others are the graph's own."""
    return ORIGIN if stream == ORIGIN else f"{graph}.{stream}"


def lower_sequences(
    sequences: Sequence[StepSequence],
    num_copies: int | Mapping[str, int],
    lists: Mapping[str, Lowered] | None = None,
) -> LoweredSequence:
    """Lower `sequences`, issued one after another over the same graphs, into one list.

    Args:
        sequences: At least one; all over the same graphs.
        num_copies: Copies of a gather, for all graphs or by graph's name.
        lists: The graphs' own lists by name; without them each program is lowered over one copy stream.

    Raises:
        ProgramError: the sequences have other graphs, or an op names one that is not there.
    """
    assert sequences, "lowering needs at least one sequence"
    for sequence in sequences:
        if sequence.graphs != sequences[0].graphs:
            raise ProgramError("the sequences have different graphs: lower those of one target and one draft together")
    lowering = _Lowering(sequences[0], num_copies, lists or {})
    lowering.enter(sequences[0])
    for step, sequence in enumerate(sequences):
        for index, op in enumerate(sequence.ops):
            lowering.op(step, index, op)
    return lowering.made()


class _Lowering:
    """The list so far, and the events that later ops wait for."""

    def __init__(
        self, sequence: StepSequence, num_copies: int | Mapping[str, int], lists: Mapping[str, Lowered]
    ) -> None:
        self.sequence = sequence
        self.programs: dict[str, Program] = {graph.name: graph.program for graph in sequence.graphs}
        self.copies = {name: num_copies if isinstance(num_copies, int) else num_copies[name] for name in self.programs}
        self.lists = {
            name: lists.get(name) or lower(program, self.copies[name]) for name, program in self.programs.items()
        }
        self.spaces = {graph.name: graph.slot_space for graph in sequence.graphs}
        self.nothing = 0
        self.units: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self.num_slots = 0
        self.number()
        self.ops: list[LoweredOp] = []
        self.sources: list[Source] = []
        self.num_events = 0
        self.ends: dict[str, int] = {}  # graph -> event of its latest replay's end
        self.folded: dict[str, int] = {}  # graph -> event of its latest fold that reads slots
        self.stopped: int | None = None  # event of the host's latest discard
        self.arrived: dict[Place, int] = {}  # event of its latest gather
        self.held: dict[tuple[str, int], int] = {}  # graph, unit -> the slot where a fold finds it
        self.owners: dict[int, str] = {}  # slot -> graph whose unit it holds, by issue order
        self.entry: list[int | None] = [None] * self.num_slots

    def number(self) -> None:
        """Number units and slots through."""
        sizes: dict[str, int] = {}
        unit = 0
        for name, program in self.programs.items():
            self.units[name] = unit
            unit += program.num_units
            self.nothing = unit
            sizes[self.spaces[name]] = max(sizes.get(self.spaces[name], 0), program.num_slots)
        for space, size in sizes.items():
            self.slots[space] = self.num_slots
            self.num_slots += size

    def enter(self, sequence: StepSequence) -> None:
        """What lies in the slots, and what is in flight, when the first sequence begins."""
        held = [item for item in sequence.entry if isinstance(item, Held)]
        for item in held:
            slot = self.slot(item.graph, item.slot)
            self.entry[slot], self.owners[slot] = self.unit(item.graph, item.unit), item.graph
            self.held[item.graph, item.unit] = item.slot
        if held:  # whoever left it there has ended
            before = self.record(ORIGIN, self.source(ENTRY_STEP, OUTSIDE_OP, ""))
            self.ends = dict.fromkeys(self.programs, before)
        for index, state in enumerate(sequence.entry):
            if isinstance(state, PrefetchLaunch):
                self.launch(state, self.source(ENTRY_STEP, index, state.graph))

    def op(self, step: int, index: int, op: SequenceOp) -> None:
        self.sequence.graph(op.graph)  # raises with the known names
        if isinstance(op, Replay):
            self.replay(step, index, op)
            return
        source = self.source(step, index, op.graph)
        if isinstance(op, PrefetchLaunch):
            self.launch(op, source)
        elif isinstance(op, PrefetchWait):
            self.wait_for(op, stream_name(self.owner(op), op.stream), source)
        elif isinstance(op, PrefetchDiscard):
            self.discard(op.graph, source)
        else:
            assert isinstance(op, Fold), op
            reads = tuple((self.unit(op.graph, unit), self.place(op.graph, unit)) for unit in op.units)
            self.ops.append(Compute(0, 0, reads, stream_name(op.graph, op.stream), source))
            if reads:
                self.folded[op.graph] = self.record(stream_name(op.graph, op.stream), source)

    def owner(self, op: PrefetchLaunch | PrefetchWait) -> str:
        """Whose stream it names: `copy` is the last graph's, the target's."""
        return self.sequence.graphs[-1].name if op.stream == "copy" else op.graph

    def launch(self, op: PrefetchLaunch, source: int) -> None:
        stream = stream_name(self.owner(op), op.stream)
        events = (self.ends.get(op.graph), self.stopped)
        self.ops += [Wait(event, stream, source) for event in events if event is not None]
        unit, slot = self.unit(op.graph, op.unit), self.slot(op.graph, op.slot)
        self.copy(op.graph, unit, slot, stream, source)
        self.arrived[op.place] = self.record(stream, source)

    def copy(self, graph: str, unit: int, slot: int, stream: str, source: int) -> None:
        self.ops.append(CopyRun(unit, slot, 0, self.copies[graph], stream, source))
        self.owners[slot] = graph

    def discard(self, graph: str, source: int) -> None:
        arrived = [key for key in self.arrived if key[0] == graph]
        events = [self.arrived.pop(key) for key in arrived]
        events += [ended[graph] for ended in (self.ends, self.folded) if graph in ended]
        self.ops += [Wait(event, HOST, source) for event in events]
        for slot in [slot for slot, owner in self.owners.items() if owner == graph]:
            self.copy(graph, self.nothing, slot, HOST, source)
            del self.owners[slot]
        self.stopped = self.record(HOST, source)
        self.ops.append(Wait(self.stopped, ORIGIN, source))
        self.forget(graph)

    def forget(self, graph: str) -> None:
        """Nothing is known of where `graph` has its units."""
        self.held = {key: slot for key, slot in self.held.items() if key[0] != graph}

    def wait_for(self, op: PrefetchWait, stream: str, source: int) -> None:
        event = self.arrived.get(op.place)
        if event is not None:
            self.ops.append(Wait(event, stream, source))
        self.held[op.graph, op.unit] = op.slot

    def replay(self, step: int, index: int, op: Replay) -> None:
        """The graph's own list; its events and streams are its own, `compute` is the launching stream."""
        program, first_event = self.programs[op.graph], self.num_events
        self.num_events += self.lists[op.graph].num_events
        sources = {number: self.source(step, index, op.graph, number) for number in range(-1, len(program.ops))}
        for inner in self.lists[op.graph].ops:
            stream, source = stream_name(op.graph, inner.stream), sources[inner.op]
            if isinstance(inner, Record | Wait):
                self.ops.append(replace(inner, event=first_event + inner.event, stream=stream, op=source))
            elif isinstance(inner, CopyRun):
                unit, slot = self.unit(op.graph, inner.unit), self.slot(op.graph, inner.slot)
                self.ops.append(replace(inner, unit=unit, slot=slot, stream=stream, op=source))
                self.owners[slot] = op.graph
            elif isinstance(inner, Compute):
                reads = tuple((self.unit(op.graph, unit), self.slot(op.graph, slot)) for unit, slot in inner.reads)
                self.ops.append(replace(inner, reads=reads, stream=stream, op=source))
            else:  # activations are no matter of slots
                self.ops.append(replace(inner, stream=stream, op=source))
        self.ends[op.graph] = self.record(ORIGIN, sources[OUTSIDE_OP])
        self.forget(op.graph)
        self.held |= {(op.graph, unit): slot for slot, unit in enumerate(program.exit) if unit is not None}

    def place(self, graph: str, unit: int) -> int:
        """The slot in which `graph` has `unit`, as far as the host knows."""
        return self.slot(graph, self.held.get((graph, unit), NO_SLOT))

    def unit(self, graph: str, unit: int) -> int:
        return self.units[graph] + unit

    def slot(self, graph: str, slot: int) -> int:
        return slot if slot == NO_SLOT else self.slots[self.spaces[graph]] + slot

    def source(self, step: int, op: int, graph: str, program_op: int | None = None) -> int:
        self.sources.append(Source(step, op, graph, program_op))
        return len(self.sources) - 1

    def record(self, stream: str, source: int) -> int:
        event = self.num_events
        self.num_events += 1
        self.ops.append(Record(event, stream, source))
        return event

    def made(self) -> LoweredSequence:
        streams = tuple(dict.fromkeys((ORIGIN, *(op.stream for op in self.ops))))
        outputs = self.record(ORIGIN, self.source(ENTRY_STEP, OUTSIDE_OP, ""))
        lowered = Lowered(tuple(self.ops), streams, self.num_events, outputs)
        return LoweredSequence(lowered, tuple(self.sources), self.units, self.slots, tuple(self.entry), self.nothing)
