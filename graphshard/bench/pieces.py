"""Times of single segments and gathers inside captured steps: each segment a node, an event after every node.

All ranks replay at once, from a barrier on, since they share the machine's memory. The runs take turns, so they see the
same machine. Of each op the median over the replays counts, and less than the median where other programs had the cores
for a part of the time; of equal ops (a segment in every layer, units of one size) the mean, since a step is their sum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphshard.bench.stats import quantile
from graphshard.bench.trace import bound_of, bound_rows, spans_of
from graphshard.comm.group import Group
from graphshard.core.ops import Gemm, Op
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.core.timeline import Span
from graphshard.device import open_device
from graphshard.load.checkpoint import Checkpoint
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import agree_on_device, build_runtime
from graphshard.runtime.compiled import Compiled, compile_plan
from graphshard.runtime.evidence.traced import TracedStep
from graphshard.runtime.model import SegmentedModel
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.schedule.auto import make_plan

NUM_WARMUPS = 2
LEAST_QUANTILE = 0.1
"""Of an op's durations on a machine that is busy with other things."""


def split_segments(model: ModelSpec, program: Program) -> Program:
    """The same program with an op for every segment."""
    ops: list[Op] = []
    for op in program.ops:
        ops += _pieces(model, op) if isinstance(op, Gemm) else [op]
    return replace(program, ops=tuple(ops))


def _pieces(model: ModelSpec, op: Gemm) -> list[Op]:
    """A gemm for each segment; all name the op's units, so that none is read after its gate."""
    segments = model.segments[op.begin : op.end]
    return [Gemm(op.begin + i, op.begin + i + 1, one.layer, one.name, op.units) for i, one in enumerate(segments)]


def build_split(
    model: SegmentedModel, group: Group, checkpoint: Path, sizes: Sequence[int], timeout_s: float, **options: Any
) -> Runtime:
    """A runtime whose captured steps have a node for every segment. Collective."""
    device = open_device("host", num_ranks=group.world_size)
    with agree_on_device(group, device) as agreed:
        spec = model.spec()
        shapes = [StepShape(size) for size in sizes]
        compiled = compile_plan(spec, make_plan(spec, group.world_size, agreed.spec, step_shapes=shapes, **options))
        programs = {shape: split_segments(spec, one) for shape, one in compiled.programs.items()}
        split = Compiled(spec, compiled.plan, compiled.layout, programs)
        with closing(Checkpoint(checkpoint)) as store:
            filler = SourceFiller(RecipeSource(store))
            return build_runtime(split, model, filler, group, device, agreed=agreed, timeout_s=timeout_s, hooks=Hooks())


@dataclass(frozen=True)
class Pieces:
    """What one run's step is made of, in us."""

    segments: Mapping[str, float]
    """By name, the mean over layers."""
    gathers: Mapping[int, float]
    """By bytes of the unit."""
    step_us: float
    """The median replay, whole: more than the sum where other programs ran."""
    core_share: float


class PieceTimer:
    """Traced steps of one runtime at one step shape."""

    def __init__(self, runtime: Runtime, shape: StepShape) -> None:
        bound = bound_of(runtime, shape)
        self._rows = bound_rows(bound, runtime.group.world_size, runtime.rank)
        origin = bound.lowered.streams[0]
        timed = [i for i, row in enumerate(self._rows) if row.stream == origin or row.kind != "record"]
        self._step = TracedStep(runtime, shape, timed)
        self._runtime, self._program = runtime, bound.program
        self._layout_bytes = [unit.num_bytes for unit in runtime.layout.units]
        self._replays: list[list[Span]] = []
        self._wall_s = self._cpu_s = 0.0

    def replay(self, is_counted: bool) -> None:
        """Once; all ranks at once."""
        self._runtime.group.barrier("before a traced step")
        begin, begin_cpu = time.perf_counter(), time.process_time()
        ends = self._step.replay()
        if is_counted:
            self._wall_s += time.perf_counter() - begin
            self._cpu_s += time.process_time() - begin_cpu
            one_worker = self._runtime.plan.executor == "cooperative"
            self._replays.append(list(spans_of(self._rows, ends, self._program, one_worker)))

    def pieces(self) -> Pieces:
        """Of the counted replays."""
        segments: dict[str, list[float]] = {}
        gathers: dict[int, dict[int, float]] = {}
        for span, us in self._typical():
            if span.kind == "compute" and span.segment is not None:
                segments.setdefault(span.segment, []).append(us)
            elif span.kind == "copy" and span.unit is not None:
                units = gathers.setdefault(self._layout_bytes[span.unit], {})
                units[span.unit] = units.get(span.unit, 0.0) + us
        steps = sorted(max(span.end_us for span in spans) for spans in self._replays)
        return Pieces(
            segments={name: sum(each) / len(each) for name, each in segments.items()},
            gathers={size: sum(units.values()) / len(units) for size, units in gathers.items()},
            step_us=quantile(steps, 0.5),
            core_share=self.core_share,
        )

    @property
    def core_share(self) -> float:
        """The share of the counted replays in which this process had a core; meant for one busy worker."""
        return min(1.0, self._cpu_s / self._wall_s) if self._wall_s else 1.0

    def _typical(self) -> list[tuple[Span, float]]:
        """Each span with its duration: the median, or the lower quantile by as much as a core was lacking."""
        quantile_of = max(LEAST_QUANTILE, 0.5 - (1.0 - self.core_share))
        found: dict[tuple[Any, ...], list[tuple[Span, float]]] = {}
        for spans in self._replays:
            seen: dict[tuple[Any, ...], int] = {}
            for span in spans:
                what = (span.lane, span.kind, span.name, span.layer, span.unit)
                seen[what] = seen.get(what, 0) + 1  # a unit's copies have one name each
                found.setdefault((*what, seen[what]), []).append((span, span.duration_us))
        return [(each[0][0], quantile(sorted(us for _, us in each), quantile_of)) for each in found.values()]


def time_pieces(timers: Mapping[Any, PieceTimer], num_replays: int, on_replay: Callable[[], None]) -> dict[Any, Pieces]:
    """Replay all in turn, `num_replays` counted times each; `on_replay` is called after each."""
    order = list(timers.values())
    for turn in range(NUM_WARMUPS + num_replays):
        first = turn % len(order)
        for timer in order[first:] + order[:first]:
            timer.replay(is_counted=turn >= NUM_WARMUPS)
            on_replay()
    return {key: timer.pieces() for key, timer in timers.items()}
