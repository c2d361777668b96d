"""An exact interpreter of sequences: every interleaving of the host, `compute`, and the streams of outside gathers.

It lowers nothing but the graphs' own programs. A replay is one item of `compute`: it begins there, runs the graph's
streams among themselves, and has ended when all of them have. A wait is bound, when the host issues it, to the latest
gather. The host issues as early as it can, and stops only where it discards. A slot is a unit or nothing; a copy takes
time, and so does a read. For small sequences only: one copy a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphshard.core.lowering import NO_SLOT, Compute, CopyRun, Record, Wait, lower
from graphshard.core.sequence import (
    Fold,
    Held,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    StepSequence,
)

Unit = tuple[str, int]
Slot = tuple[str, int]
Token = tuple[str, int]
"""A stream, and how many of its items have to be done."""


@dataclass
class Item:
    """What a stream does next: once the host has stopped `stops` times and `after` is done."""

    kind: str  # copy, read, replay, mark
    stops: int = 0
    after: list[Token] = field(default_factory=list)
    slots: list[tuple[Slot, Unit]] = field(default_factory=list)
    graph: str = ""


@dataclass
class Stop:
    """The host waits for `after`, and then drops what `graph` has in slots."""

    graph: str
    after: list[Token]


class Host:
    """Issues sequences; what it has issued is the input of `harm_of`."""

    def __init__(self, sequences: Sequence[StepSequence]) -> None:
        self.graphs = {graph.name: graph for graph in sequences[0].graphs}
        self.target = sequences[0].graphs[-1].name
        self.streams: dict[str, list[Item]] = {"compute": []}
        self.stops: list[Stop] = []
        self.ends: dict[str, Token] = {}
        self.folded: dict[str, Token] = {}
        self.arrived: dict[tuple[str, int, int], Token] = {}
        self.places: dict[Unit, int] = {}
        self.slots: dict[Slot, Unit] = {}
        for state in sequences[0].entry:
            if isinstance(state, Held):
                self.slots[self.slot(state.graph, state.slot)] = (state.graph, state.unit)
                self.places[state.graph, state.unit] = state.slot
            else:
                self.launch(state)
        for sequence in sequences:
            for op in sequence.ops:
                self.issue(op)

    def slot(self, graph: str, slot: int) -> Slot:
        return self.graphs[graph].slot_space, slot

    def put(self, stream: str, item: Item) -> Token:
        item.stops = len(self.stops)
        items = self.streams.setdefault(stream, [])
        items.append(item)
        return stream, len(items)

    def named(self, graph: str, stream: str) -> str:
        if stream == "compute":
            return stream
        return f"{self.target if stream == 'copy' else graph} {stream}"

    def launch(self, op: PrefetchLaunch) -> None:
        after = [self.ends[op.graph]] if op.graph in self.ends else []
        written = [(self.slot(op.graph, op.slot), (op.graph, op.unit))]
        token = self.put(self.named(op.graph, op.stream), Item("copy", after=after, slots=written))
        self.arrived[op.graph, op.unit, op.slot] = token

    def issue(self, op: object) -> None:
        if isinstance(op, PrefetchLaunch):
            self.launch(op)
        elif isinstance(op, PrefetchWait):
            token = self.arrived.get((op.graph, op.unit, op.slot))
            self.put(self.named(op.graph, op.stream), Item("mark", after=[token] if token else []))
            self.places[op.graph, op.unit] = op.slot
        elif isinstance(op, PrefetchDiscard):
            mine = [key for key in self.arrived if key[0] == op.graph]
            after = [self.arrived.pop(key) for key in mine]
            ends = [ended[op.graph] for ended in (self.ends, self.folded) if op.graph in ended]
            self.stops.append(Stop(op.graph, after + ends))
            self.lose(op.graph)
        elif isinstance(op, Replay):
            self.ends[op.graph] = self.put("compute", Item("replay", graph=op.graph))
            self.lose(op.graph)
            program = self.graphs[op.graph].program
            self.places |= {(op.graph, unit): slot for slot, unit in enumerate(program.exit) if unit is not None}
        else:
            assert isinstance(op, Fold)
            units = [(op.graph, unit) for unit in op.units]
            reads = [(self.slot(op.graph, self.places.get(unit, NO_SLOT)), unit) for unit in units]
            self.folded[op.graph] = self.put(self.named(op.graph, op.stream), Item("read", slots=reads))

    def lose(self, graph: str) -> None:
        self.places = {unit: slot for unit, slot in self.places.items() if unit[0] != graph}


def inner_streams(host: Host, graph: str) -> dict[str, list[Item]]:
    """The streams of a replay of `graph`."""
    streams: dict[str, list[Item]] = {}
    events: dict[int, Token] = {}
    for op in lower(host.graphs[graph].program, 1).ops:
        items = streams.setdefault(op.stream, [])
        if isinstance(op, Record):
            items.append(Item("mark"))
            events[op.event] = (op.stream, len(items))
        elif isinstance(op, Wait):
            items.append(Item("mark", after=[events[op.event]]))
        elif isinstance(op, CopyRun):
            items.append(Item("copy", slots=[(host.slot(graph, op.slot), (graph, op.unit))]))
        else:
            assert isinstance(op, Compute)
            items.append(Item("read", slots=[(host.slot(graph, slot), (graph, unit)) for unit, slot in op.reads]))
    return streams


# The state: how often the host has stopped; for each stream, 2 * items done + (1 while one runs), those of the running
# replay after the others; what each slot holds, the streams whose copy into it runs and is spoiled.
State = tuple[int, tuple[int, ...], tuple[int, ...], tuple[tuple[Slot, Unit | None], ...], frozenset[str]]


class Run:
    """All states that `host`'s streams can reach."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.names = list(host.streams)
        self.inner = {graph: inner_streams(host, graph) for graph in host.graphs}

    def harm(self, max_states: int = 200_000) -> str | None:
        """The first wrong read, or a state in which nothing goes on; None if there is neither."""
        start: State = (0, (0,) * len(self.names), (), tuple(sorted(self.host.slots.items())), frozenset())
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            followers = self.followers(state)
            if isinstance(followers, str):
                return followers
            if not followers and not self.is_over(state):
                return f"stuck at {state}"
            for follower in followers:
                if follower not in seen:
                    seen.add(follower)
                    todo.append(follower)
            assert len(seen) <= max_states, "use smaller sequences"
        return None

    def is_over(self, state: State) -> bool:
        lengths = [2 * len(self.host.streams[name]) for name in self.names]
        return list(state[1]) == lengths and state[0] == len(self.host.stops)

    def lanes(self, state: State) -> list[tuple[str, list[Item], int]]:
        """Every stream by name, with its items and where it is; a running replay's own streams last."""
        lanes = [(name, self.host.streams[name], at) for name, at in zip(self.names, state[1], strict=True)]
        replay = self.replaying(state)
        if replay:
            inner = self.inner[replay]
            lanes += [(f"in {name}", inner[name], at) for name, at in zip(inner, state[2], strict=True)]
        return lanes

    def replaying(self, state: State) -> str:
        at = state[1][0]
        return self.host.streams["compute"][at // 2].graph if at & 1 and state[2] else ""

    def followers(self, state: State) -> list[State] | str:
        found: list[State] = []
        lanes = self.lanes(state)
        done = {name: at // 2 for name, _, at in lanes}
        running = {name: items[at // 2] for name, items, at in lanes if at & 1}
        if state[0] < len(self.host.stops):
            stop = self.host.stops[state[0]]
            if all(done[stream] >= count for stream, count in stop.after):
                slots = tuple((slot, None if unit and unit[0] == stop.graph else unit) for slot, unit in state[3])
                found.append((state[0] + 1, *state[1:3], slots, state[4]))
        for lane, (name, items, at) in enumerate(lanes):
            if at // 2 >= len(items):
                continue
            item = items[at // 2]
            if at & 1:
                found += self.end(state, lane, name, item)
                continue
            prefix = "in " if name.startswith("in ") else ""
            if item.stops > state[0] or any(done[prefix + stream] < count for stream, count in item.after):
                continue
            begun = self.begin(state, lane, name, item, running)
            if isinstance(begun, str):
                return begun
            found.append(begun)
        return found

    def begin(self, state: State, lane: int, name: str, item: Item, running: dict[str, Item]) -> State | str:
        slots, spoiled = dict(state[3]), state[4]
        if item.kind == "mark":
            return self.moved(state, lane, 2)
        if item.kind == "replay":
            inner = (0,) * len(self.inner[item.graph])
            return (state[0], self.moved(state, lane, 1)[1], inner, *state[3:])
        for slot, unit in item.slots:
            others = [other for other, what in running.items() if slot in [where for where, _ in what.slots]]
            if item.kind == "read" and slots.get(slot) != unit:
                return f"{name} reads {unit} in {slot}, which holds {slots.get(slot)}"
            if item.kind == "copy":
                if any(running[other].kind == "read" for other in others):
                    return f"{name} copies {unit} into {slot} under a read"
                if others:
                    spoiled = spoiled | {name, *others}
                slots[slot] = None
        return (*self.moved(state, lane, 1)[:3], tuple(sorted(slots.items())), spoiled)

    def end(self, state: State, lane: int, name: str, item: Item) -> list[State]:
        if item.kind == "replay":
            inner = self.inner[item.graph]
            if any(at < 2 * len(inner[stream]) for stream, at in zip(inner, state[2], strict=True)):
                return []
            return [(state[0], self.moved(state, lane, 1)[1], (), *state[3:])]
        slots = dict(state[3])
        if item.kind == "copy" and name not in state[4]:
            slots |= dict(item.slots)
        return [(*self.moved(state, lane, 1)[:3], tuple(sorted(slots.items())), state[4] - {name})]

    def moved(self, state: State, lane: int, by: int) -> State:
        own, inner = list(state[1]), list(state[2])
        if lane < len(own):
            own[lane] += by
        else:
            inner[lane - len(own)] += by
        return (state[0], tuple(own), tuple(inner), *state[3:])


def harm_of(*sequences: StepSequence) -> str | None:
    """What the host can bring about by issuing `sequences` in turn: a wrong read in words, or None."""
    return Run(Host(sequences)).harm()
