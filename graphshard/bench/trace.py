"""A measured timeline: the step is captured once more with an event after every bound op, and replayed.

The traced graph has more nodes than the real one, so it is never the one that is timed.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard._core import Event
from graphshard.core.errors import CommError
from graphshard.core.lowering import Compute, CopyRun, Record
from graphshard.core.ops import Gemm
from graphshard.core.program import Program
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import BoundProgram
from graphshard.runtime.runtime import Runtime

KINDS = {"call": "compute", "copy": "copy", "wait": "wait"}


@dataclass(frozen=True, slots=True)
class Span:
    """An op's time on its stream: from when the op before it there was done until it was done itself."""

    lane: str
    kind: str
    label: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class BoundRow:
    """A bound op as text: no addresses, so equal on every rank and in every run."""

    kind: str
    """As `_core.OpList` names it: record, wait, copy, call, write_value."""
    stream: str
    source: int
    """The program's op it comes from; -1: fork or join."""
    text: str


def bound_of(runtime: Runtime, shape: StepShape) -> BoundProgram:
    """The bound program of `shape`: what a step issues."""
    return runtime._bound[shape]


def bound_rows(bound: BoundProgram, world_size: int, rank: int) -> list[BoundRow]:
    """What `bound` issues on `rank`, in order; for lists without hooks and the flat layout (one copy a rank)."""
    rows = []
    for op in bound.lowered.ops:
        if isinstance(op, CopyRun):
            for i in range(op.begin, op.end):
                source = (rank + 1 + i) % world_size
                rows.append(BoundRow("copy", op.stream, op.op, f"unit={op.unit} slot={op.slot} from=rank{source}"))
        elif isinstance(op, Compute):
            units = ",".join(str(unit) for unit, _ in op.reads) or "-"
            rows.append(BoundRow("call", op.stream, op.op, f"segments={op.begin}:{op.end} units={units}"))
        else:
            kind = "record" if isinstance(op, Record) else "wait"
            rows.append(BoundRow(kind, op.stream, op.op, f"event={op.event}"))
            if kind == "record" and op.event == bound.lowered.outputs_event:
                rows.append(BoundRow("write_value", op.stream, op.op, "outputs are ready"))
    assert len(rows) == len(bound.op_list), f"{len(rows)} rows for {len(bound.op_list)} bound ops"
    return rows


def trace_step(runtime: Runtime, shape: StepShape, num_warmups: int = 3) -> list[Span]:
    """Replay a traced capture of `shape` and return the spans of its last replay, in issue order.

    Runs `num_warmups + 1` steps on what the inputs hold now. Collective only in that all ranks' copies then happen at
    once, as in a real step.

    Raises:
        CommError: a step did not end in time.
    """
    bound = bound_of(runtime, shape)
    calls = runtime._compute.captured(shape, bound.computes)
    rows = bound_rows(bound, runtime.group.world_size, runtime.rank)
    origin = bound.lowered.streams[0]
    # not after records on other streams: the origin joins there, and a node behind it would be left unjoined
    timed = [i for i, row in enumerate(rows) if row.stream == origin or row.kind != "record"]
    events = {i: Event(runtime.driver, timing=True) for i in timed}
    graph = bound.op_list.capture(calls, list(events.items()))
    launcher = graph.instantiate(runtime.plan.executor)
    for _ in range(num_warmups + 1):
        runtime.step(shape, bound, lambda: launcher.launch(bound.streams[0]), calls)
    for stream in bound.streams:
        if not stream.synchronize(runtime.timeout_s):
            raise CommError(f"rank {runtime.rank} waited {runtime.timeout_s:.1f} s for the end of a traced step")
    times = [(rows[i], event.elapsed_us(events[0])) for i, event in events.items()]
    return _spans(times, bound.program)


def _spans(times: list[tuple[BoundRow, float]], program: Program) -> list[Span]:
    spans = []
    last: dict[str, float] = {}
    for row, end in times:
        begin = last.get(row.stream, end)
        last[row.stream] = end
        if row.kind in KINDS and end > begin:
            op = program.ops[row.source] if row.source >= 0 else None
            label = op.segment if isinstance(op, Gemm) else row.text.split()[0]
            spans.append(Span(row.stream, KINDS[row.kind], label, begin, end))
    return spans
