"""A program: the fixed op list of one step, and what the slots hold when it begins and ends.

    program num_slots=2 num_units=4 num_segments=9 num_ops=18
    entry    0=- 1=-
    exit     0=2 1=3
       0  ag_launch unit=0 slot=0 stream=copy
       1  wait_once unit=0 slot=0 stream=compute
       ...

A program with tensor-parallel blocks has a line for each of them before the ops:

    block    index=0 begin=3 end=5 first=9

`Program.text()` prints it so, and `Program.parse` reads it back; the numbers before the ops are for the reader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from graphshard.core.errors import ProgramError
from graphshard.core.ops import (
    BLOCK_PARTS,
    ActGather,
    AgLaunch,
    BlockPart,
    Gemm,
    Op,
    RecordGate,
    RecordOutputs,
    ReduceScatter,
    StreamName,
    WaitOnce,
)
from graphshard.core.specs import ModelSpec, SegmentSpec
from graphshard.core.text import digest_of, parse_fields, parse_name

MAX_SLOTS = 2**14
MAX_UNITS = 2**20
"""Far above any program's, and small enough to be looked at one by one."""

_OP_LINE = re.compile(r"(?:(\d+)\s+)?([a-z_]+)\s*(.*)")

_OP_FIELDS: dict[str, tuple[str, ...]] = {
    "ag_launch": ("unit", "slot", "stream"),
    "wait_once": ("unit", "slot", "stream"),
    "gemm": ("layer", "segment", "units", "stream", "begin", "end"),
    "record_gate": ("unit", "slot", "stream"),
    "record_outputs": ("stream",),
    "act_gather": ("block", "stream"),
    "reduce_scatter": ("block", "stream"),
}
_STREAMS: dict[str, StreamName] = {name: name for name in get_args(StreamName)}


@dataclass(frozen=True, slots=True)
class SlicedBlock:
    """Block `index` of the model, tensor-parallel: instead of segments `[begin, end)` its own three run.

    They are numbered from `first` on, see Note [segment numbers].
    """

    index: int
    begin: int
    end: int
    first: int

    def part_of(self, segment: int) -> BlockPart | None:
        """Which of the block's three segments number `segment` is; None if it is another's."""
        return BLOCK_PARTS[segment - self.first] if 0 <= segment - self.first < len(BLOCK_PARTS) else None

    def __str__(self) -> str:
        return f"index={self.index} begin={self.begin} end={self.end} first={self.first}"


def first_of_block(model: ModelSpec, block: int) -> int:
    """The number by which a gemm runs the first of the three segments of `model.blocks[block]`."""
    return len(model.segments) + len(model.folds) + len(BLOCK_PARTS) * block


def numbered_segments(model: ModelSpec) -> tuple[SegmentSpec, ...]:
    """Every segment that a gemm may run, by its number (Note [segment numbers])."""
    return (*model.segments, *model.folds, *(one for block in model.blocks for one in block.sliced_segments))


@dataclass(frozen=True)
class Program:
    """`ops` in issue order, and the state of the slots around them.

    `entry[s]` is the unit that slot s must hold when it begins (None: anything), `exit[s]` the unit that it holds when
    it ends (None: nothing that can be relied on). `outside` are the gathers that the host issues before a replay (the
    head policy `outside`).
    """

    ops: tuple[Op, ...]
    num_slots: int
    num_units: int
    num_segments: int
    entry: tuple[int | None, ...]
    exit: tuple[int | None, ...]
    outside: tuple[AgLaunch, ...] = ()
    blocks: tuple[SlicedBlock, ...] = ()
    """Those that are tensor-parallel, in order. A step of such a program needs all ranks, under any transport."""

    @property
    def prime(self) -> tuple[AgLaunch, ...]:
        """The gathers that bring the slots from any state to `entry`, in slot order, on stream `prefetch`."""
        return tuple(AgLaunch(unit, slot, "prefetch") for slot, unit in enumerate(self.entry) if unit is not None)

    def text(self) -> str:
        """Stable text, the base of `digest`; `parse` reads it back."""
        header = f"program num_slots={self.num_slots} num_units={self.num_units} num_segments={self.num_segments}"
        lines = [
            f"{header} num_ops={len(self.ops)}",
            _state_line("entry", self.entry),
            _state_line("exit", self.exit),
        ]
        lines += [f"outside  {op}" for op in self.outside]
        lines += [f"block    {block}" for block in self.blocks]
        lines += [f"{index:4d}  {op}" for index, op in enumerate(self.ops)]
        return "\n".join(lines) + "\n"

    @cached_property
    def digest(self) -> str:
        """The sha256 of `text()`: equal op lists have equal digests on every rank."""
        return digest_of(self.text())

    @staticmethod
    def parse(text: str) -> Program:
        """The program that `text` prints. Blank lines and `#` comments are skipped, op numbers are not compared.

        Raises:
            ProgramError: naming the line and what was expected there.
        """
        return _Parser(text).program()


def _state_line(name: str, units: tuple[int | None, ...]) -> str:
    held = " ".join(f"{slot}={'-' if unit is None else unit}" for slot, unit in enumerate(units))
    return f"{name:<8} {held}".rstrip()


class _Parser:
    """One pass over the lines; `fail` knows which one it is at."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.number = 0
        self.line = ""

    def fail(self, problem: str) -> ProgramError:
        where = f"line {self.number}" if self.line else "the text"
        found = f", found {self.line[:80]!r}" if self.line else ""
        return ProgramError(f"cannot read the program: {where}: {problem}{found}")

    def program(self) -> Program:
        sizes: dict[str, int] | None = None
        states: dict[str, tuple[int | None, ...]] = {}
        outside: list[AgLaunch] = []
        blocks: list[SlicedBlock] = []
        ops: list[Op] = []
        for number, line in enumerate(self.text.splitlines(), start=1):
            self.number, self.line = number, line.strip()
            first, _, rest = self.line.partition(" ")
            if not self.line or self.line.startswith("#"):
                continue
            if first == "program":
                sizes = self.sizes(rest)
            elif sizes is None:
                raise self.fail("expected `program num_slots=... num_units=... num_segments=...` first")
            elif first in ("entry", "exit"):
                states[first] = self.state(rest, sizes["num_slots"])
            elif first == "outside":
                outside.append(self.outside(rest))
            elif first == "block":
                found = self.fields(rest, ("index", "begin", "end", "first"))
                blocks.append(SlicedBlock(**{name: self.integer(name, value) for name, value in found.items()}))
            else:
                ops.append(self.op(self.line))
        if sizes is None:
            self.line = ""
            raise self.fail("there is no line that begins with `program`")
        if sizes.get("num_ops", len(ops)) != len(ops):
            self.line = ""
            raise self.fail(f"num_ops is {sizes['num_ops']}, and there are {len(ops)} ops; correct it, or leave it out")
        anything: tuple[int | None, ...] = (None,) * sizes["num_slots"]
        return Program(
            ops=tuple(ops),
            num_slots=sizes["num_slots"],
            num_units=sizes["num_units"],
            num_segments=sizes["num_segments"],
            entry=states.get("entry", anything),
            exit=states.get("exit", anything),
            outside=tuple(outside),
            blocks=tuple(blocks),
        )

    def sizes(self, rest: str) -> dict[str, int]:
        found = self.fields(rest, ("num_slots", "num_units", "num_segments"), optional=("num_ops",))
        sizes = {name: self.integer(name, value) for name, value in found.items()}
        if min(sizes.values()) < 0:
            raise self.fail("sizes start at 0")
        for name, most in (("num_slots", MAX_SLOTS), ("num_units", MAX_UNITS), ("num_segments", MAX_UNITS)):
            if sizes[name] > most:
                raise self.fail(f"{name} is at most {most}")
        return sizes

    def state(self, rest: str, num_slots: int) -> tuple[int | None, ...]:
        names = tuple(map(str, range(num_slots)))
        found = self.fields(rest, names)
        return tuple(None if found[name] == "-" else self.integer(name, found[name]) for name in names)

    def outside(self, rest: str) -> AgLaunch:
        op = self.op(rest.strip())
        if not isinstance(op, AgLaunch):
            raise self.fail("only ag_launch can be outside")
        return op

    def op(self, line: str) -> Op:
        match = _OP_LINE.fullmatch(line)
        name = match.group(2) if match else ""
        if match is None or name not in _OP_FIELDS:
            raise self.fail(f"expected an op ({', '.join(_OP_FIELDS)})")
        found = self.fields(match.group(3), _OP_FIELDS[name])
        stream = _STREAMS.get(found["stream"])
        if stream is None:
            raise self.fail(f"expected a stream ({', '.join(_STREAMS)}), not {found['stream']!r}")
        if name == "record_outputs":
            return RecordOutputs(stream)
        if name == "gemm":
            return self.gemm(found, stream)
        if "block" in found:
            block = self.integer("block", found["block"])
            return ActGather(block, stream) if name == "act_gather" else ReduceScatter(block, stream)
        unit, slot = self.integer("unit", found["unit"]), self.integer("slot", found["slot"])
        if name == "ag_launch":
            return AgLaunch(unit, slot, stream)
        return WaitOnce(unit, slot, stream) if name == "wait_once" else RecordGate(unit, slot, stream)

    def gemm(self, found: dict[str, str], stream: StreamName) -> Gemm:
        units = () if found["units"] == "-" else tuple(self.integer("units", u) for u in found["units"].split(","))
        layer = None if found["layer"] == "-" else self.integer("layer", found["layer"])
        begin, end = self.integer("begin", found["begin"]), self.integer("end", found["end"])
        try:
            segment = parse_name(found["segment"])
        except ValueError:
            raise self.fail("segment is not a word or a quoted text") from None
        return Gemm(begin, end, layer, segment, units, stream)

    def fields(self, text: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, str]:
        """The `name=value` pairs of `text`: each of `names` once, in any order, and nothing else."""
        try:
            return parse_fields(text, names, optional)
        except ValueError as error:
            raise self.fail(str(error)) from None

    def integer(self, name: str, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise self.fail(f"{name} is {text!r}, which is not a whole number") from None
