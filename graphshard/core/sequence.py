"""A sequence: what the host issues in one step that is made of several graphs, in issue order, and what is around it.

    sequence num_ops=5
    graph    name=draft
    | program num_slots=2 num_units=4 ...
    graph    name=target
    | program num_slots=2 num_units=9 ...
    entry    prefetch_launch graph=draft unit=0 slot=0 stream=prefetch
    exit     prefetch_launch graph=draft unit=0 slot=0 stream=prefetch
       0  prefetch_wait graph=draft unit=0 slot=0 stream=compute
       1  replay graph=draft stream=compute
       2  replay graph=target stream=compute
       3  prefetch_launch graph=draft unit=0 slot=0 stream=prefetch
       4  fold graph=target segment=commit_fold units=- stream=compute

`compute` is the stream on which all graphs are launched. Every other stream belongs to a graph, and gathers that the
host issues have one of their own, `prefetch`; `copy` is the copy stream of the last graph, the target, which its own
gathers use when it runs eagerly. A replay stands for a run too: the ops are the same.

The lines behind `|` are the graphs' programs, as `Program.text()` prints them. `StepSequence.parse` reads it all back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from graphshard.core.errors import ProgramError
from graphshard.core.ops import StreamName
from graphshard.core.program import Program
from graphshard.core.text import digest_of, name_text, parse_fields, parse_name

Place = tuple[str, int, int]
"""Graph, unit and slot."""


@dataclass(frozen=True, slots=True)
class PrefetchLaunch:
    """Gather `unit` into `slot` of `graph` from outside, after the graph's latest replay; nothing waits yet."""

    graph: str
    unit: int
    slot: int
    stream: StreamName = "prefetch"

    @property
    def place(self) -> Place:
        """Where the unit lies, or will."""
        return self.graph, self.unit, self.slot

    def __str__(self) -> str:
        return f"prefetch_launch graph={name_text(self.graph)} unit={self.unit} slot={self.slot} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class PrefetchWait:
    """`stream` waits for the latest `PrefetchLaunch` of `unit` into `slot`: once, and never inside a capture."""

    graph: str
    unit: int
    slot: int
    stream: StreamName = "compute"

    @property
    def place(self) -> Place:
        """Where the unit lies, or will."""
        return self.graph, self.unit, self.slot

    def __str__(self) -> str:
        return f"prefetch_wait graph={name_text(self.graph)} unit={self.unit} slot={self.slot} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class PrefetchDiscard:
    """Wait on the host for `graph` and what it has in flight from outside; from here on its slots hold nothing."""

    graph: str
    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"prefetch_discard graph={name_text(self.graph)} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class Replay:
    """Launch `graph` on `stream`; it expects in its slots what its program says of the entry."""

    graph: str
    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"replay graph={name_text(self.graph)} stream={self.stream}"


COMMIT_FOLD = "commit_fold"
"""The fold of a target that makes accepted tokens count."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Run `segment` of `graph`'s model between steps, for all layers at once: resident weights, so `units` is empty."""

    graph: str
    segment: str
    units: tuple[int, ...] = ()
    stream: StreamName = "compute"

    def __str__(self) -> str:
        units = ",".join(map(str, self.units)) or "-"
        names = f"graph={name_text(self.graph)} segment={name_text(self.segment)}"
        return f"fold {names} units={units} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class Held:
    """`slot` of `graph` holds `unit`, and whatever `compute` runs next may read it. A state, never an op."""

    graph: str
    unit: int
    slot: int

    @property
    def place(self) -> Place:
        """Where the unit lies, or will."""
        return self.graph, self.unit, self.slot

    def __str__(self) -> str:
        return f"held graph={name_text(self.graph)} unit={self.unit} slot={self.slot}"


SequenceOp = PrefetchLaunch | PrefetchWait | PrefetchDiscard | Replay | Fold
SlotState = PrefetchLaunch | Held
"""What is in flight, or lies in a slot, between two sequences."""


@dataclass(frozen=True)
class SequenceGraph:
    """A graph that sequences replay: its program, and the slots that it uses.

    Graphs with the same `space` would share their slots; by default each has its own, named after it.
    """

    name: str
    program: Program
    space: str = ""

    @property
    def slot_space(self) -> str:
        """The name of the slots' space."""
        return self.space or self.name


@dataclass(frozen=True)
class StepSequence:
    """`ops` in issue order over `graphs` (the target last), and the state of the slots around them.

    `entry` is what must be in flight or held when it begins; `exit` is what it leaves, as far as a graph reads it at
    its entry. All else in the slots is not relied on.
    """

    graphs: tuple[SequenceGraph, ...]
    ops: tuple[SequenceOp, ...]
    entry: tuple[SlotState, ...] = ()
    exit: tuple[SlotState, ...] = ()

    def graph(self, name: str) -> SequenceGraph:
        """The graph called `name`; ProgramError with the known names."""
        for graph in self.graphs:
            if graph.name == name:
                return graph
        known = ", ".join(graph.name for graph in self.graphs) or "none"
        raise ProgramError(f"the sequence has no graph {name!r}; known are {known}")

    def text(self) -> str:
        """Stable text, the base of `digest`; `parse` reads it back."""
        lines = [f"sequence num_ops={len(self.ops)}"]
        for graph in self.graphs:
            space = f" space={name_text(graph.space)}" if graph.space else ""
            lines.append(f"graph    name={name_text(graph.name)}{space}")
            lines += [f"| {line}" for line in graph.program.text().splitlines()]
        return "\n".join([*lines, *self.op_lines()]) + "\n"

    def op_lines(self) -> list[str]:
        """The lines of `text` that follow the graphs: the states around it, and the ops."""
        lines = [f"entry    {state}" for state in self.entry] + [f"exit     {state}" for state in self.exit]
        return lines + [f"{index:4d}  {op}" for index, op in enumerate(self.ops)]

    @cached_property
    def digest(self) -> str:
        """The sha256 of `text()`: ranks with equal digests issue the same, graphs included."""
        return digest_of(self.text())

    @staticmethod
    def parse(text: str) -> StepSequence:
        """The sequence that `text` prints. Blank lines and `#` comments are skipped, op numbers are not compared.

        Raises:
            ProgramError: naming the line and what was expected there.
        """
        return _Parser(text).sequence()


_OP_LINE = re.compile(r"(?:(\d+)\s+)?([a-z_]+)\s*(.*)")
_PLACE = ("graph", "unit", "slot")
_FIELDS: dict[str, tuple[str, ...]] = {
    "prefetch_launch": (*_PLACE, "stream"),
    "prefetch_wait": (*_PLACE, "stream"),
    "prefetch_discard": ("graph", "stream"),
    "replay": ("graph", "stream"),
    "fold": ("graph", "segment", "units", "stream"),
    "held": _PLACE,
}
_STREAMS: dict[str, StreamName] = {name: name for name in get_args(StreamName)}


class _Parser:
    """One pass over the lines; `fail` knows which one it is at."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = 0
        self.line = ""
        self.graphs: list[tuple[str, str, int, list[str]]] = []  # name, space, line, lines of the program

    def fail(self, problem: str) -> ProgramError:
        where = f"line {self.number}" if self.line else "the text"
        found = f", found {self.line[:80]!r}" if self.line else ""
        return ProgramError(f"cannot read the sequence: {where}: {problem}{found}")

    def sequence(self) -> StepSequence:
        is_begun, num_ops = False, ""
        states: dict[str, list[SlotState]] = {"entry": [], "exit": []}
        ops: list[SequenceOp] = []
        for number, line in enumerate(self.text.splitlines(), start=1):
            self.number, self.line = number, line.strip()
            first, _, rest = self.line.partition(" ")
            if not self.line or self.line.startswith("#"):
                continue
            if first == "sequence":
                num_ops = self.fields(rest, (), optional=("num_ops",)).get("num_ops", "")
                is_begun = True
            elif not is_begun:
                raise self.fail("expected `sequence` first")
            elif first == "graph":
                found = self.fields(rest, ("name",), optional=("space",))
                self.graphs.append((self.name(found["name"]), self.name(found.get("space", "")), number, []))
            elif first == "|":
                if not self.graphs:
                    raise self.fail("a program's line follows its graph's")
                self.graphs[-1][3].append(rest)
            elif first in states:
                states[first].append(self.state(rest))
            else:
                ops.append(self.op(self.line))
        if not is_begun:
            self.line = ""
            raise self.fail("there is no line that begins with `sequence`")
        if num_ops not in ("", str(len(ops))):
            self.line = ""
            raise self.fail(f"num_ops is {num_ops}, and there are {len(ops)} ops; correct it, or leave it out")
        return StepSequence(
            tuple(map(self.graph, self.graphs)), tuple(ops), tuple(states["entry"]), tuple(states["exit"])
        )

    def graph(self, read: tuple[str, str, int, list[str]]) -> SequenceGraph:
        name, space, number, lines = read
        try:
            program = Program.parse("\n".join(lines))
        except ProgramError as error:
            raise ProgramError(f"graph {name}, whose program begins after line {number}: {error}") from None
        return SequenceGraph(name, program, space)

    def state(self, rest: str) -> SlotState:
        item = self.item(rest.strip())
        if not isinstance(item, PrefetchLaunch | Held):
            raise self.fail("only prefetch_launch and held are states")
        return item

    def op(self, line: str) -> SequenceOp:
        item = self.item(line)
        if isinstance(item, Held):
            raise self.fail("held is a state of entry or exit, not an op")
        return item

    def item(self, line: str) -> SequenceOp | Held:
        match = _OP_LINE.fullmatch(line)
        kind = match.group(2) if match else ""
        if match is None or kind not in _FIELDS:
            raise self.fail(f"expected an op ({', '.join(_FIELDS)})")
        found = self.fields(match.group(3), _FIELDS[kind])
        graph = self.name(found["graph"])
        if kind == "held":
            return Held(graph, self.integer("unit", found["unit"]), self.integer("slot", found["slot"]))
        stream = _STREAMS.get(found["stream"])
        if stream is None:
            raise self.fail(f"expected a stream ({', '.join(_STREAMS)}), not {found['stream']!r}")
        if kind == "replay":
            return Replay(graph, stream)
        if kind == "prefetch_discard":
            return PrefetchDiscard(graph, stream)
        if kind == "fold":
            units = () if found["units"] == "-" else tuple(self.integer("units", u) for u in found["units"].split(","))
            return Fold(graph, self.name(found["segment"]), units, stream)
        make = PrefetchLaunch if kind == "prefetch_launch" else PrefetchWait
        return make(graph, self.integer("unit", found["unit"]), self.integer("slot", found["slot"]), stream)

    def fields(self, text: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, str]:
        try:
            return parse_fields(text, names, optional)
        except ValueError as error:
            raise self.fail(str(error)) from None

    def name(self, text: str) -> str:
        try:
            return parse_name(text)
        except ValueError:
            raise self.fail(f"{text} is not a word or a quoted text") from None

    def integer(self, name: str, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self.fail(f"{name} is {text!r}, which is not a whole number") from None
