"""What compute ops do: segments run by Python (eager), or the tapes recorded from them (captured).

Both run over the same state: the same weights, buffers and addresses. Grad and inference modes are thread-local in
torch and compute runs on a stream's thread, so each call sets them itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from graphshard._core import Calls
from graphshard.core.errors import ProgramError, SpecError
from graphshard.core.layout import Layout, WeightView
from graphshard.core.lowering import Compute
from graphshard.core.plan import Plan
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.runtime.arena import Arena
from graphshard.runtime.memory import BufferRow, RuntimeMemory
from graphshard.runtime.model import Segment, SegmentedModel, StepState, folds_of
from graphshard.runtime.record import Tape, record

_running = threading.local()
"""`segment`: the path of the segment that runs on this thread, if one does."""


def refuse_inside_segment(what: str) -> None:
    """ProgramError if a segment asks for `what`: it would wait for the step that it is a part of."""
    segment = getattr(_running, "segment", None)
    if segment is not None:
        raise ProgramError(
            f"segment {segment} calls {what} while it runs: a step cannot wait for itself; call it after"
        )


def segment_weights(
    model: ModelSpec, plan: Plan, layout: Layout, memory: RuntimeMemory
) -> dict[str, dict[str, Tensor]]:
    """For each segment path the weights it declared, as views at the addresses where they lie while it runs.

    Folds run between steps, and read no slot.
    """
    whole = {view.weight: memory.resident(view) for view in layout.resident} | dict(memory.borrowed)
    placed: dict[int, dict[str, tuple[WeightView, int]]] = {i: {} for i in range(len(model.segments))}
    for residency in plan.residencies:
        for view in layout.units[residency.unit].views:
            for i in range(residency.begin, residency.end):
                placed[i][view.weight] = (view, residency.slot)
    weights: dict[str, dict[str, Tensor]] = {}
    for i, segment in enumerate(model.segments):
        here: dict[str, Tensor] = {}
        for name in segment.reads:
            if name in whole:
                here[name] = whole[name]
            else:
                view, slot = placed[i][name]
                here[name] = memory.gathered(view, slot)
        weights[segment.path] = here
    return weights | {fold.path: {name: whole[name] for name in fold.reads} for fold in model.folds}


class ComputeTable:
    """The model's segments bound to one state per step shape."""

    def __init__(
        self,
        model: SegmentedModel,
        spec: ModelSpec,
        weights: Mapping[str, Mapping[str, Tensor]],
        memory: RuntimeMemory,
        step_shapes: Sequence[StepShape],
    ) -> None:
        self._segments = (*model.segments, *folds_of(model))
        if tuple(segment.spec for segment in self._segments) != (*spec.segments, *spec.folds):
            raise SpecError(f"model {spec.name}: its segments, or folds, differ from those of its spec")
        self._states = {shape: StepState(shape, weights, memory.buffers(shape)) for shape in step_shapes}
        self._memory = memory
        self._arena = Arena()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The model's, in order, and its folds after them."""
        return self._segments

    def state(self, shape: StepShape) -> StepState:
        """The state of steps of `shape`."""
        return self._states[shape]

    def rows(self) -> tuple[BufferRow, ...]:
        """What segments and recorded temporaries use, as they are now."""
        found = {
            name: BufferRow.of(name, role, tensor)
            for state in self._states.values()
            for name, role, tensor in state.tensors()
        }
        return (*found.values(), *self._arena.rows())

    def eager(self, shape: StepShape, computes: Sequence[Compute]) -> Calls:
        """Calls that run the segments themselves."""
        state = self._states[shape]
        return Calls([eager_call(state, self._segments[op.begin : op.end]) for op in computes])

    def captured(
        self,
        shape: StepShape,
        computes: Sequence[Compute],
        show: Callable[[int, int], None],
        lock: Callable[[], AbstractContextManager[None]],
    ) -> Calls:
        """Calls that replay what the segments do now. Buffers are as before when this returns, also on an error.

        Segments compute while they are recorded, so `show(unit, slot)` first puts there what they read. `lock()` is
        the process's capture lock, held for each recording and not for `show`: that may wait for another rank, which
        may be a thread that records.

        Raises:
            DeviceError: a segment does what no capture permits.
        """
        snapshot = self._memory.snapshot_buffers()
        try:
            return Calls([self._tape(shape, op, show, lock) for op in computes])
        finally:
            self._memory.restore_buffers(snapshot)

    def _tape(
        self,
        shape: StepShape,
        op: Compute,
        show: Callable[[int, int], None],
        lock: Callable[[], AbstractContextManager[None]],
    ) -> Tape:
        for unit, slot in op.reads:
            show(unit, slot)
        segments = self._segments[op.begin : op.end]
        with lock():
            return record(eager_call(self._states[shape], segments), self._arena, segments[0].spec.path)


def eager_call(state: StepState, segments: Sequence[Segment]) -> Callable[[], None]:
    """Runs `segments` on the calling thread, with the inference mode that compute has."""

    def call() -> None:
        _running.segment = segments[0].spec.path
        try:
            with torch.inference_mode():
                state.run(segments)
        finally:
            _running.segment = None

    return call
