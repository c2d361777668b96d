"""A step before it is run: the lowered op list walked in time, on model streams with events.

The list is the runtime's own (`core.lowering.lower`), so what is predicted is what is issued. A walk has two kinds of
work: compute ops and runs of copies. Records and waits take no time. Two ways to run the list:

- `threaded` (and every GPU): each stream goes on by itself. While a gather and compute overlap, both are slower, by the
  segments' `shared_us` and by `overlap_copy`; copies on several streams share the link.
- `cooperative`: one worker does everything, in the list's order. Nothing overlaps; a segment may find its weights in
  the cache that their gather has just filled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from graphshard.core.errors import ProgramError
from graphshard.core.layout import Layout
from graphshard.core.lowering import ORIGIN, ActOp, Compute, CopyRun, Lowered, LoweredOp, Record, Wait, lower
from graphshard.core.ops import AgLaunch, Gemm, RecordGate, WaitOnce
from graphshard.core.plan import Executor, Transport
from graphshard.core.program import Program
from graphshard.core.timeline import Span, Timeline
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.kernels import gather_us
from graphshard.cost.segments import StepTimes
from graphshard.cost.slot_peak import peak_slot_bytes

NOTHING = -1
"""No work came before: the beginning of the step."""
_DONE_US = 1e-9
"""Work that is left by rounding alone."""


@dataclass(frozen=True)
class Prediction:
    """One step as the model sees it."""

    timeline: Timeline
    exposed_us: tuple[tuple[int, float], ...]
    """(unit, us) that compute stands still for each unit, where it does at all; with one worker: that it copies."""
    join_us: float
    """That compute waits at the end of the list for other streams (a tail's prefetch)."""
    critical_path: tuple[Span, ...]
    """Work that each began when the one before it ended, from the step's end back to its beginning; first to last."""
    replicated_us: float
    """The same segments with every weight resident."""
    reserved_bytes: int
    """Chunks, slots and resident weights: a step allocates nothing."""
    peak_slot_bytes: int
    """Units in slots at once, from a gather's first byte to its slot's gate."""
    num_nodes: int
    """Copies and segments: graph nodes at least, a segment being one or more."""
    launch_us: float
    """Of the graph, on the host; part of a step only where the host is not ahead of the device."""

    @property
    def duration_us(self) -> float:
        """The step, on the device."""
        return self.timeline.duration_us

    @property
    def total_exposed_us(self) -> float:
        """Of all units, and the join."""
        return sum(us for _, us in self.exposed_us) + self.join_us

    @property
    def added_us(self) -> float:
        """What sharding costs: exposed time, and compute that is slower beside gathers."""
        return self.duration_us - self.replicated_us


def predict(
    program: Program,
    layout: Layout,
    times: StepTimes,
    hardware: HardwareSpec,
    *,
    transport: Transport = "pull",
    executor: Executor = "threaded",
    num_copy_streams: int = 1,
    own_branch: bool = False,
    other_traffic: float = 0.0,
) -> Prediction:
    """Walk one step of `program`, its slots as at its entry.

    Args:
        program: what `schedule.emit.emit` made; its `outside` gathers are not part of the step.
        layout: bytes of units and slots.
        times: segments of the same model at one step shape (`segments.step_times`).
        hardware: gathers, and how much work slows down beside other work.
        transport: whose figures gathers have.
        executor: of the captured graph; a GPU has one way, `threaded`.
        num_copy_streams: over which each gather is fanned out.
        own_branch: as in `core.lowering.lower`.
        other_traffic: share of the link that others use.

    Raises:
        SpecError: the hardware has no figures for the transport.
        ProgramError: the list does not end, since a stream waits for an event that is never recorded.
    """
    world_size = layout.world_size
    num_copies = 1 if transport == "nccl" else world_size
    lowered = lower(program, num_copies, num_copy_streams, own_branch)
    gathers = gathers_us(layout, transport, hardware, other_traffic)
    work = Work(program, layout, times, gathers, num_copies, hardware)
    one_worker = executor == "cooperative" and hardware.kind == "host"
    found = _walk_one_worker(lowered, work) if one_worker else Walk(lowered, work).run()
    copies = [op for op in lowered.ops if isinstance(op, CopyRun)]
    num_nodes = len(times.segments) + sum((op.end - op.begin) * layout.units[op.unit].num_slices for op in copies)
    return Prediction(
        timeline=Timeline(0, tuple(found.spans)),
        exposed_us=tuple(sorted((unit, us) for unit, us in found.exposed.items() if us > 0)),
        join_us=found.join_us,
        critical_path=found.critical_path(),
        replicated_us=times.total_us,
        reserved_bytes=layout.shard_bytes + layout.slot_bytes + layout.resident_bytes,
        peak_slot_bytes=peak_slot_bytes(found.gathers, found.gates, program, layout),
        num_nodes=num_nodes,
        launch_us=hardware.launch_us + hardware.launch_us_per_node * num_nodes,
    )


def gathers_us(layout: Layout, transport: str, hardware: HardwareSpec, other_traffic: float = 0.0) -> list[float]:
    """The time of each unit's gather, alone."""
    return [
        gather_us(unit.num_bytes, layout.world_size, transport, hardware, other_traffic, num_slices=unit.num_slices)
        for unit in layout.units
    ]


class Walked(Protocol):
    """What a walk asks of the work that a list stands for."""

    hardware: HardwareSpec

    def copy_us(self, op: CopyRun) -> float:
        """A run of copies, alone."""

    def compute_us(self, op: Compute) -> tuple[float, float]:
        """(alone, beside a gather)."""

    def exchange_us(self, op: ActOp) -> float:
        """What a part of an exchange between ranks takes."""

    def gate_slot(self, op: Record) -> int | None:
        """The slot whose gate `op` records, if it does."""

    def unit_of(self, op: LoweredOp) -> int | None:
        """The unit that `op` gathers or waits for."""

    def span(self, op: LoweredOp, begin_us: float, end_us: float) -> Span:
        """What `op` did from when to when."""


class Work:
    """How long each op of one program takes, and what its span says."""

    def __init__(
        self,
        program: Program,
        layout: Layout,
        times: StepTimes,
        gathers: Sequence[float],
        num_copies: int,
        hardware: HardwareSpec,
    ) -> None:
        self.program, self.times, self.gathers, self.num_copies = program, times, gathers, num_copies
        self.hardware = hardware
        self.unit_bytes = [unit.num_bytes for unit in layout.units]

    def copy_us(self, op: CopyRun) -> float:
        """A run's part of its gather, alone."""
        return self.gathers[op.unit] * (op.end - op.begin) / self.num_copies

    def compute_us(self, op: Compute) -> tuple[float, float]:
        """(alone, beside a gather)."""
        if op.begin >= self.program.num_segments:
            us = self.times.of_parts(self.program, range(op.begin, op.end))
            return us, us * self.hardware.overlap_compute
        segments = self.times.segments[op.begin : op.end]
        return sum(one.alone_us for one in segments), sum(one.shared_us for one in segments)

    def exchange_us(self, op: ActOp) -> float:
        """Its copies or its collective; ranks are taken to come to it together."""
        return self.times.of_exchange(op)

    def cached_us(self, op: Compute) -> float:
        """With its weights in a cache."""
        if op.begin >= self.program.num_segments:
            return self.compute_us(op)[0]
        return sum(one.cached_us for one in self.times.segments[op.begin : op.end])

    def gate_slot(self, op: Record) -> int | None:
        """The slot whose gate `op` records, if it does."""
        source = self.program.ops[op.op] if op.op >= 0 else None
        return source.slot if isinstance(source, RecordGate) else None

    def unit_of(self, op: LoweredOp) -> int | None:
        """The unit that `op` gathers or waits for."""
        source = self.program.ops[op.op] if op.op >= 0 else None
        return source.unit if isinstance(source, AgLaunch | WaitOnce) else None

    def span(self, op: LoweredOp, begin_us: float, end_us: float) -> Span:
        """As a measured step's spans read (`bench.trace`)."""
        source = self.program.ops[op.op] if op.op >= 0 else None
        if isinstance(source, Gemm):
            unit = source.units[0] if source.units else None
            return Span(op.stream, "compute", source.segment, begin_us, end_us, unit, source.layer, source.segment)
        unit = self.unit_of(op)
        if isinstance(op, CopyRun):
            return Span(op.stream, "copy", f"unit={op.unit}", begin_us, end_us, op.unit)
        if isinstance(op, ActOp):
            return Span(op.stream, "copy", " ".join(str(source).split()[:2]), begin_us, end_us)
        name = "fork or join" if source is None else f"wait unit={unit}"
        return Span(op.stream, "wait", name, begin_us, end_us, unit)


class Found:
    """What a walk writes down."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.exposed: dict[int, float] = {}
        self.join_us = 0.0
        self.before: dict[int, int] = {}  # span index of work -> the work whose end let it begin
        self.last = NOTHING  # the work that ended last
        self.gathers: list[tuple[int, float, int]] = []  # (slot, begin, unit), in issue order of each slot
        self.gates: dict[int, list[float]] = {}  # slot -> when its gates were passed

    def work(self, span: Span, cause: int) -> int:
        """Write down a piece of work that `cause` let begin; its index."""
        self.spans.append(span)
        index = len(self.spans) - 1
        self.before[index] = cause
        if self.last == NOTHING or span.end_us >= self.spans[self.last].end_us:
            self.last = index
        return index

    def critical_path(self) -> tuple[Span, ...]:
        """Back from the work that ended last, by what let each begin."""
        path = []
        at = self.last
        while at != NOTHING:
            path.append(self.spans[at])
            at = self.before[at]
        return tuple(reversed(path))


def _walk_one_worker(lowered: Lowered, work: Work) -> Found:
    """Everything in the list's order, one after the other."""
    found = Found()
    now = 0.0
    cause = NOTHING
    copied = 0
    copied_before: dict[int, int] = {}  # unit -> bytes copied before its gather began
    for op in lowered.ops:
        if isinstance(op, Wait):
            continue
        if isinstance(op, Record):
            _note_gate(found, work, op, now)
            continue
        if isinstance(op, CopyRun):
            us = work.copy_us(op)
            found.exposed[op.unit] = found.exposed.get(op.unit, 0.0) + us
            if op.begin == 0:
                found.gathers.append((op.slot, now, op.unit))
                copied_before[op.unit] = copied
                copied += work.unit_bytes[op.unit]
        elif isinstance(op, ActOp):
            us = work.exchange_us(op)
            if not us:
                continue
        else:
            since = [copied - copied_before[unit] for unit, _ in op.reads if unit in copied_before]
            in_cache = len(since) == len(op.reads) > 0 and max(since) <= work.hardware.cache_bytes
            us = work.cached_us(op) if in_cache else work.compute_us(op)[0]
        cause = found.work(work.span(op, now, now + us), cause)
        now += us
    return found


def _note_gate(found: Found, work: Walked, op: Record, now: float) -> None:
    slot = work.gate_slot(op)
    if slot is not None:
        found.gates.setdefault(slot, []).append(now)


class _Active:
    """A piece of work in progress."""

    __slots__ = ("begin_us", "cause", "left_us", "op", "slowdown")

    def __init__(
        self, op: Compute | CopyRun | ActOp, left_us: float, slowdown: float, begin_us: float, cause: int
    ) -> None:
        self.op, self.left_us, self.slowdown = op, left_us, slowdown
        self.begin_us, self.cause = begin_us, cause


class Walk:
    """Streams that go on by themselves; a step of the loop is the time until the next piece of work ends."""

    def __init__(self, lowered: Lowered, work: Walked) -> None:
        self.work = work
        self.found = Found()
        self.now = 0.0
        self.queues: dict[str, deque[LoweredOp]] = {stream: deque() for stream in lowered.streams}
        for op in lowered.ops:
            self.queues[op.stream].append(op)
        self.cause = dict.fromkeys(lowered.streams, NOTHING)  # stream -> the work that let it come this far
        self.arrived: dict[str, float] = {}  # stream -> when it began to wait
        self.recorded: dict[int, int] = {}  # event -> the work before it
        self.waiting: dict[int, list[str]] = {}  # event -> streams
        self.active: dict[str, _Active] = {}
        self.runnable = list(lowered.streams)

    def run(self) -> Found:
        """To the end of every stream."""
        while self.runnable or self.active:
            while self.runnable:
                self.go_on(self.runnable.pop())
            if self.active:
                self.pass_time()
        stuck = [f"stream {stream} at op {queue[0].op}" for stream, queue in self.queues.items() if queue]
        if stuck:
            raise ProgramError(f"the list does not end: {', '.join(stuck)} waits for an event that nothing records")
        return self.found

    def go_on(self, stream: str) -> None:
        """Issue `stream`'s ops until one takes time or has to wait."""
        queue = self.queues[stream]
        while queue:
            op = queue[0]
            if isinstance(op, Record):
                self.recorded[op.event] = self.cause[stream]
                self.runnable += self.waiting.pop(op.event, ())
                _note_gate(self.found, self.work, op, self.now)
            elif isinstance(op, Wait):
                if op.event not in self.recorded:
                    self.arrived[stream] = self.now
                    self.waiting.setdefault(op.event, []).append(stream)
                    return
                self.waited(op)
            elif not isinstance(op, ActOp) or self.work.exchange_us(op):  # flags take no time here
                queue.popleft()
                self.begin(op)
                return
            queue.popleft()

    def waited(self, op: Wait) -> None:
        """A stream goes on; note how long it stood still."""
        began = self.arrived.pop(op.stream, self.now)
        if began >= self.now:
            return
        self.cause[op.stream] = self.recorded[op.event]
        self.found.spans.append(self.work.span(op, began, self.now))
        if op.stream == ORIGIN:
            unit = self.work.unit_of(op)
            if unit is None:
                self.found.join_us += self.now - began
            else:
                self.found.exposed[unit] = self.found.exposed.get(unit, 0.0) + self.now - began

    def begin(self, op: Compute | CopyRun | ActOp) -> None:
        """A stream's next piece of work."""
        if isinstance(op, CopyRun):
            if op.begin == 0:
                self.found.gathers.append((op.slot, self.now, op.unit))
            us, slowdown = self.work.copy_us(op), self.work.hardware.overlap_copy
        elif isinstance(op, ActOp):
            us, slowdown = self.work.exchange_us(op), 1.0
        else:
            us, shared_us = self.work.compute_us(op)
            slowdown = shared_us / us if us > 0 else 1.0
        self.active[op.stream] = _Active(op, us, slowdown, self.now, self.cause[op.stream])

    def pass_time(self) -> None:
        """Until the next end: a gather slows compute and is slowed by it; copies share the link."""
        copies = sum(isinstance(one.op, CopyRun) for one in self.active.values())
        rates = {}
        for stream, one in self.active.items():
            is_copy = isinstance(one.op, CopyRun)
            beside = copies < len(self.active) if is_copy else copies > 0
            rates[stream] = 1.0 / ((one.slowdown if beside else 1.0) * (copies if is_copy else 1))
        elapsed = min(one.left_us / rates[stream] for stream, one in self.active.items())
        self.now += elapsed
        for stream, one in list(self.active.items()):
            one.left_us -= elapsed * rates[stream]
            if one.left_us <= _DONE_US:
                del self.active[stream]
                span = self.work.span(one.op, one.begin_us, self.now)
                self.cause[stream] = self.found.work(span, one.cause)
                self.runnable.append(stream)
