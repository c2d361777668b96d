"""A measured timeline: the step is captured once more with an event after every bound op, and replayed.

The traced graph has more nodes than the real one, so it is never the one that is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphshard.core.lowering import ActOp, Compute, CopyRun, Record
from graphshard.core.ops import AgLaunch, Gemm, WaitOnce
from graphshard.core.program import Program
from graphshard.core.specs import StepShape
from graphshard.core.timeline import Span, SpanKind, Timeline
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.evidence.traced import TracedStep
from graphshard.runtime.evidence.traced import bound_program as bound_of
from graphshard.runtime.runtime import Runtime

__all__ = ["BoundRow", "Span", "bound_of", "bound_rows", "trace_step", "trace_timeline"]

KINDS: dict[str, SpanKind] = {"call": "compute", "copy": "copy", "all_gather": "copy", "wait": "wait"}


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A bound op as text: no addresses, so equal on every rank and in every run."""

    kind: str
    """As `_core.OpList` names it: record, wait, copy, call, write_value; those of an exchange have its name."""
    stream: str
    source: int
    """The program's op it comes from; -1: fork or join."""
    text: str


def bound_rows(bound: BoundProgram, world_size: int, rank: int) -> list[BoundRow]:
    """What `bound` issues on `rank`, in order; for lists without hooks and the flat layout (one copy a rank)."""
    rows = []
    for op in bound.lowered.ops:
        if isinstance(op, CopyRun) and bound.is_collective:
            rows.append(BoundRow("all_gather", op.stream, op.op, f"unit={op.unit} slot={op.slot}"))
        elif isinstance(op, CopyRun):
            for i in range(op.begin, op.end):
                source = (rank + 1 + i) % world_size
                rows.append(BoundRow("copy", op.stream, op.op, f"unit={op.unit} slot={op.slot} from=rank{source}"))
        elif isinstance(op, Compute):
            units = ",".join(str(unit) for unit, _ in op.reads) or "-"
            rows.append(BoundRow("call", op.stream, op.op, f"segments={op.begin}:{op.end} units={units}"))
        elif isinstance(op, ActOp):  # what an exchange becomes is the transport's matter: shown as one
            verb, block, _ = str(bound.program.ops[op.op]).split()
            num_left = bound.sources.count(op.op) - sum(row.source == op.op for row in rows)
            rows += [BoundRow(verb, op.stream, op.op, block)] * num_left
        else:
            kind = "record" if isinstance(op, Record) else "wait"
            rows.append(BoundRow(kind, op.stream, op.op, f"event={op.event}"))
            if kind == "record" and op.event == bound.lowered.outputs_event:
                rows.append(BoundRow("write_value", op.stream, op.op, "outputs are ready"))
    assert len(rows) == len(bound.op_list), f"{len(rows)} rows for {len(bound.op_list)} bound ops"
    return rows


def trace_step(runtime: Runtime, shape: StepShape, num_warmups: int = 3) -> list[Span]:
    """The spans of `trace_timeline`."""
    return list(trace_timeline(runtime, shape, num_warmups).spans)


def trace_timeline(
    runtime: Runtime, shape: StepShape, num_warmups: int = 3, before_last: Callable[[], object] | None = None
) -> Timeline:
    """Replay a traced capture of `shape` and return the timeline of its last replay.

    Runs `num_warmups + 1` steps on what the inputs hold now. Not collective; but with a barrier as `before_last` all
    ranks' copies happen at once, as in a real step.

    A span ends when its op was done. It begins when the op before it was done: that on the same stream; or, under the
    cooperative executor, whose one worker does everything in turn, that on any stream.

    Raises:
        CommError: a step did not end in time.
    """
    bound = bound_of(runtime, shape)
    rows = bound_rows(bound, runtime.group.world_size, runtime.rank)
    origin = bound.lowered.streams[0]
    # not after records on other streams: the origin joins there, and a node behind it would be left unjoined
    timed = [i for i, row in enumerate(rows) if row.stream == origin or row.kind != "record"]
    step = TracedStep(runtime, shape, timed)
    for _ in range(num_warmups):
        step.replay()
    if before_last is not None:
        before_last()
    begin_us = time.monotonic_ns() / 1e3  # one clock for all processes of a machine
    ends = step.replay()
    has_one_worker = runtime.driver.is_host and runtime.plan.executor == "cooperative"
    return Timeline(runtime.rank, tuple(spans_of(rows, ends, bound.program, has_one_worker)), begin_us)


def spans_of(
    rows: Sequence[BoundRow], ends_us: Mapping[int, float], program: Program, has_one_worker: bool
) -> Iterator[Span]:
    begins_us: dict[int, float] = {}
    last: dict[str, float] = {}
    for i, end in sorted(ends_us.items(), key=lambda item: (item[1], item[0])):
        worker = "" if has_one_worker else rows[i].stream
        begins_us[i] = last.get(worker, end)
        last[worker] = end
    for i, end in sorted(ends_us.items()):
        if rows[i].kind in KINDS and end > begins_us[i]:
            yield _span(rows[i], begins_us[i], end, program)


def _span(row: BoundRow, begin_us: float, end_us: float, program: Program) -> Span:
    kind = KINDS[row.kind]
    op = program.ops[row.source] if row.source >= 0 else None
    if isinstance(op, Gemm):
        unit = op.units[0] if op.units else None
        return Span(row.stream, kind, op.segment, begin_us, end_us, unit, op.layer, op.segment)
    unit = op.unit if isinstance(op, AgLaunch | WaitOnce) else None
    name = row.text.split()[0] if kind == "copy" else "fork or join" if op is None else f"wait unit={unit}"
    return Span(row.stream, kind, name, begin_us, end_us, unit)
