"""Lowering: each op of a program as the driver calls that carry it out.

Pure data, and shared: the verifier, the digest and the runtime all read this list.

Streams are names: `compute` is the origin (it begins and ends the list, as a capture demands), `copy`, `copy1`, ...
`copy{k-1}` carry gathers, `copy_own` the own chunk if it has a branch of its own, `prefetch` what the host issues. An
event is an int, recorded exactly once in a list.

    ag_launch   wait(gate of the slot's last reader) on copy; with k > 1 copy streams or a branch for the own chunk:
                record(fork) on copy, wait(fork) on each branch; copies; record(join) on each branch, wait(join) on
                copy; record(ready)
    wait_once   wait(ready) on compute
    gemm        compute
    record_gate record(gate) on compute
    act_gather  flag(entry), await(entry), copies(tokens)            with one copy a gather: collective(all_gather)
    reduce_scatter  flag(exit), await(exit), copies(partial), sum    with one copy a gather: collective(reduce_scatter)
The list begins with a fork of every other stream from `compute` and ends with a join of every stream that is not yet
an ancestor of `compute`'s last op. So a list run twice is ordered by `compute` alone, eager or captured.

A program with faults is lowered too, as far as it goes: a wait for a gather that nobody launched becomes no call, a
read of a unit that is nowhere gets slot -1. Saying so is the verifier's work.

# Note [two barriers a block]
Activations of a block lie at fixed addresses that peers read: `tp.tokens` and `tp.partial`, the same for every block.
Each rank's compute stream does, block after block: prepare writes tokens; entry barrier; copy all ranks' tokens;
compute writes partial; exit barrier; copy all ranks' partial of the own tokens; sum. With two barriers nothing is
overwritten before all have read it:
  tokens   are written again by the next block's prepare, behind this rank's exit barrier. A peer comes to that barrier
           only after its copies of these tokens.
  partial  is written again by the next block's compute, behind the next entry barrier. A peer comes to that one only
           after its copies of this partial.
And nothing is read before it is there: copies of tokens stand behind the entry barrier, which every rank comes to after
its prepare; copies of partial behind the exit barrier, which every rank comes to after its compute. What the copies
fill, and the sum, is read by this rank's own stream alone. The same holds over the border of two steps, whatever
program the second one has: a block is whole within its step. Flags are those of `csrc/runtime/flags.h`: a rank writes a
word at each peer, waits for the words of all peers, and resets them; entry and exit have words of their own, and a rank
comes to the next entry only after an exit that each peer came to after it had reset the entry's word. All of it is on
one stream, compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from graphshard.core.errors import SpecError
from graphshard.core.ops import ActGather, AgLaunch, Gemm, Op, RecordGate, RecordOutputs, ReduceScatter, WaitOnce
from graphshard.core.program import Program
from graphshard.core.text import digest_of, text_of

ORIGIN = "compute"
OUTSIDE_OP = -1
"""The op index of what belongs to no op: prologue and epilogue."""
NO_SLOT = -1
"""The slot of a unit that is read and was never gathered."""


@dataclass(frozen=True, slots=True)
class Record:
    """Record `event` on `stream`. `op` is the index of the program's op it comes from; -1 in prologue and epilogue."""

    event: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class Wait:
    """`stream` waits for `event`."""

    event: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Copies `begin` to `end` of the gather of `unit` into `slot`, in this rank's order (rank + 1 first, own last)."""

    unit: int
    slot: int
    begin: int
    end: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Segments `begin` to `end` (Note [segment numbers]); they read `(unit, slot)` pairs."""

    begin: int
    end: int
    reads: tuple[tuple[int, int], ...]
    stream: str
    op: int


Barrier = Literal["entry", "exit"]


@dataclass(frozen=True, slots=True)
class FlagWrite:
    """Write this rank's flag of `barrier` at every peer, with a header that says which block it is about."""

    barrier: Barrier
    block: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class FlagWait:
    """`stream` waits for every peer's flag of `barrier`, and resets them."""

    barrier: Barrier
    block: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class ActCopies:
    """A copy from every rank, the own one too, into this rank's own memory.

    tokens   all of each rank's `tp.tokens`, to `tp.gathered` in rank order
    partial  the rows of this rank's tokens in each rank's `tp.partial`, to a place for each rank
    """

    what: Literal["tokens", "partial"]
    block: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class ActSum:
    """`tp.summed` = the copied partials, added in rank order: compute of the runtime's own."""

    block: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class ActCollective:
    """The same by a collective of a communicator: tokens to `tp.gathered`, or partial to `tp.summed`."""

    kind: Literal["all_gather", "reduce_scatter"]
    block: int
    stream: str
    op: int


ActOp = FlagWrite | FlagWait | ActCopies | ActSum | ActCollective
LoweredOp = Record | Wait | CopyRun | Compute | ActOp


@dataclass(frozen=True)
class Lowered:
    """A program lowered for `num_copies` copies a gather (the world size) over `streams`, the origin first."""

    ops: tuple[LoweredOp, ...]
    streams: tuple[str, ...]
    num_events: int
    outputs_event: int
    """Recorded by `record_outputs`, or the last record on compute before the final join."""

    def text(self) -> str:
        """Stable text, the base of `digest`."""
        return text_of(self)

    @cached_property
    def digest(self) -> str:
        """The sha256 of `text()`."""
        return digest_of(self.text())


def lower(program: Program, num_copies: int, num_copy_streams: int = 1, own_branch: bool = False) -> Lowered:
    """Lower `program` for gathers of `num_copies` copies (the world size) over `num_copy_streams` copy streams.

    With `own_branch` the last copy, which is the rank's own chunk, has the stream `copy_own`. `program.outside` is not
    in the list: see `lower_gathers`.
    """
    lowering = _Lowering(program.ops, ORIGIN, num_copies, num_copy_streams, own_branch)
    lowering.enter(program.entry)
    lowering.fork()
    for index, op in enumerate(program.ops):
        lowering.op(index, op)
    outputs = lowering.outputs_event
    if outputs is None:
        outputs = lowering.record(ORIGIN, OUTSIDE_OP)
    lowering.join()
    return lowering.lowered(outputs)


def lower_gathers(gathers: Sequence[AgLaunch], num_copies: int) -> Lowered:
    """Lower gathers that the host issues (`Program.outside` or `Program.prime`): a list of its own on their stream.

    Whoever issues it orders it after the slots' last use, and lets the next reader wait for `outputs_event`, its last
    record.
    """
    origin = gathers[0].stream if gathers else "prefetch"
    lowering = _Lowering(gathers, origin, num_copies, 1, False)
    lowering.fork()
    for index, gather in enumerate(gathers):
        lowering.op(index, gather)
    lowering.join()
    return lowering.lowered(lowering.record(origin, OUTSIDE_OP))


class _Lowering:
    """The list so far, the events that later ops need, and what each stream has seen of the others."""

    def __init__(
        self, ops: Sequence[Op], origin: str, num_copies: int, num_copy_streams: int, own_branch: bool
    ) -> None:
        if num_copies < 1 or num_copy_streams < 1:
            raise SpecError(f"{num_copies} copies over {num_copy_streams} streams: both start at 1")
        self.ops: list[LoweredOp] = []
        self.num_events = 0
        self.outputs_event: int | None = None
        self.num_copies = num_copies
        self.branches = _branches(num_copies, num_copy_streams, own_branch)
        self.streams = _streams(ops, origin, self.branches)
        self.ready: dict[tuple[int, int], int] = {}  # (unit, slot) -> event of its latest gather
        self.gates: dict[int, int] = {}  # slot -> event of its latest gate
        self.held: dict[int, int] = {}  # unit -> slot where it may be read
        self.launched: dict[int, int] = {}  # unit -> slot of its latest gather
        self.seen = {stream: dict.fromkeys(self.streams, 0) for stream in self.streams}
        self.seen_by_event: list[dict[str, int]] = []

    def enter(self, entry: Sequence[int | None]) -> None:
        """Slots that hold a unit when the list begins."""
        self.held = {unit: slot for slot, unit in enumerate(entry) if unit is not None}

    def fork(self) -> None:
        if len(self.streams) > 1:
            event = self.record(self.streams[0], OUTSIDE_OP)
            for stream in self.streams[1:]:
                self.wait(event, stream, OUTSIDE_OP)

    def join(self) -> None:
        origin = self.streams[0]
        for stream in self.streams[1:]:
            if self.seen[origin][stream] < self.seen[stream][stream]:
                # join: a capture may not end with a stream still forked
                self.wait(self.record(stream, OUTSIDE_OP), origin, OUTSIDE_OP)

    def op(self, index: int, op: Op) -> None:
        if isinstance(op, AgLaunch):
            self.gather(index, op)
        elif isinstance(op, WaitOnce):
            if (op.unit, op.slot) in self.ready:
                self.wait(self.ready[op.unit, op.slot], op.stream, index)
            self.held[op.unit] = op.slot
        elif isinstance(op, Gemm):
            reads = tuple((unit, self.slot_of(unit)) for unit in op.units)
            self.append(Compute(op.begin, op.end, reads, op.stream, index))
        elif isinstance(op, RecordGate):
            self.gates[op.slot] = self.record(op.stream, index)
            if self.held.get(op.unit) == op.slot:
                del self.held[op.unit]
        elif isinstance(op, ActGather | ReduceScatter):
            for act in act_ops(op, index, is_collective=self.num_copies == 1):
                self.append(act)
        else:
            assert isinstance(op, RecordOutputs), op
            self.outputs_event = self.record(op.stream, index)

    def gather(self, index: int, op: AgLaunch) -> None:
        if op.slot in self.gates:
            self.wait(self.gates[op.slot], op.stream, index)
        # a gather that the host issues has a stream for itself: no fan-out
        branches = self.branches if op.stream == "copy" else ((op.stream, 0, self.num_copies),)
        others = [stream for stream, _, _ in branches if stream != op.stream]
        if others:
            fork = self.record(op.stream, index)
            for stream in others:
                self.wait(fork, stream, index)
        for stream, begin, end in branches:
            self.append(CopyRun(op.unit, op.slot, begin, end, stream, index))
        for stream in others:
            self.wait(self.record(stream, index), op.stream, index)
        self.ready[op.unit, op.slot] = self.record(op.stream, index)
        self.launched[op.unit] = op.slot

    def slot_of(self, unit: int) -> int:
        """Where a read of `unit` looks: the slot waited for or held at entry, else that of the latest gather."""
        return self.held.get(unit, self.launched.get(unit, NO_SLOT))

    def record(self, stream: str, op: int) -> int:
        event = self.num_events
        self.num_events += 1
        self.append(Record(event, stream, op))
        self.seen_by_event.append(dict(self.seen[stream]))
        return event

    def wait(self, event: int, stream: str, op: int) -> None:
        self.append(Wait(event, stream, op))
        seen = self.seen[stream]
        for other, count in self.seen_by_event[event].items():
            seen[other] = max(seen[other], count)

    def append(self, op: LoweredOp) -> None:
        self.ops.append(op)
        self.seen[op.stream][op.stream] += 1

    def lowered(self, outputs_event: int) -> Lowered:
        return Lowered(tuple(self.ops), self.streams, self.num_events, outputs_event)


def act_ops(op: ActGather | ReduceScatter, index: int, *, is_collective: bool) -> tuple[ActOp, ...]:
    """What op `index` of a program becomes: flags and copies, or one collective where a gather is one, too."""
    at = (op.block, op.stream, index)
    if isinstance(op, ActGather):
        if is_collective:
            return (ActCollective("all_gather", *at),)
        return FlagWrite("entry", *at), FlagWait("entry", *at), ActCopies("tokens", *at)
    if is_collective:
        return (ActCollective("reduce_scatter", *at),)
    return FlagWrite("exit", *at), FlagWait("exit", *at), ActCopies("partial", *at), ActSum(*at)


def _branches(num_copies: int, num_copy_streams: int, own_branch: bool) -> tuple[tuple[str, int, int], ...]:
    """(stream, begin, end) of each run of copies of a gather on `copy`, nearly equal runs, `copy` first."""
    num_shared = num_copies - 1 if own_branch and num_copies > 1 else num_copies
    num_runs = min(num_copy_streams, num_shared)
    borders = [num_shared * run // num_runs for run in range(num_runs + 1)]
    runs = [(f"copy{run}" if run else "copy", borders[run], borders[run + 1]) for run in range(num_runs)]
    if num_shared < num_copies:
        runs.append(("copy_own", num_shared, num_copies))
    return tuple(runs)


def _streams(ops: Sequence[Op], origin: str, branches: Sequence[tuple[str, int, int]]) -> tuple[str, ...]:
    """The streams that lowering `ops` uses, in one fixed order, `origin` first."""
    used: set[str] = {op.stream for op in ops}
    if any(isinstance(op, AgLaunch) and op.stream == "copy" for op in ops):
        used |= {stream for stream, _, _ in branches}
    order = ["compute", "copy", *(stream for stream, _, _ in branches[1:]), "prefetch"]
    return (origin, *(stream for stream in order if stream in used and stream != origin))
