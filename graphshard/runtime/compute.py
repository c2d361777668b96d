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
from graphshard.core.lowering import ActSum, Compute
from graphshard.core.plan import Plan
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.runtime.activations import ActivationMemory
from graphshard.runtime.arena import Arena
from graphshard.runtime.memory import BufferRow, RuntimeMemory
from graphshard.runtime.model import Segment, SegmentedModel, StepState, blocks_of, folds_of
from graphshard.runtime.record import Tape, record

ComputeOp = Compute | ActSum
"""What calls of a bound list do: segments of the model, or a sum of partial results, which is the runtime's own."""
OnError = Callable[[BaseException], None]
"""Told on the thread that computes what a call raised, before what follows it on the stream."""

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
    weights |= {fold.path: {name: whole[name] for name in fold.reads} for fold in model.folds}
    return weights | _block_weights(model, plan, layout, memory, whole, placed)


def _block_weights(
    model: ModelSpec,
    plan: Plan,
    layout: Layout,
    memory: RuntimeMemory,
    whole: Mapping[str, Tensor],
    placed: Mapping[int, Mapping[str, tuple[WeightView, int]]],
) -> dict[str, dict[str, Tensor]]:
    """What the segments of blocks that lie in slices read: this rank's slices, where they are kept, and whole weights.

    A block without slices has none here: no step runs it on slices.
    """
    sliced = {unit.weights: unit.index for unit in plan.units if unit.is_sliced}
    weights: dict[str, dict[str, Tensor]] = {}
    for block in model.blocks:
        if block.weights not in sliced:
            continue
        unit = layout.units[sliced[block.weights]]
        slices = {view.weight: memory.sliced(unit, view) for view in unit.slices}
        for segment in block.sliced_segments:
            found = dict(slices) if segment is block.compute else {}
            for name in segment.reads:
                if name in whole:
                    found[name] = whole[name]
                elif name not in found:
                    here_too = [placed[i][name] for i in range(block.begin, block.end) if name in placed[i]]
                    if here_too:
                        found[name] = memory.gathered(*here_too[0])
            weights[segment.path] = found
    return weights


class ComputeTable:
    """The model's segments bound to one state per step shape."""

    def __init__(
        self,
        model: SegmentedModel,
        spec: ModelSpec,
        weights: Mapping[str, Mapping[str, Tensor]],
        memory: RuntimeMemory,
        step_shapes: Sequence[StepShape],
        activations: ActivationMemory | None = None,
    ) -> None:
        """With `activations` some step shapes have tensor-parallel blocks."""
        self._segments = (*model.segments, *folds_of(model))
        if tuple(segment.spec for segment in self._segments) != (*spec.segments, *spec.folds):
            raise SpecError(f"model {spec.name}: its segments, or folds, differ from those of its spec")
        self._activations = activations
        if activations is not None:
            self._segments += _segments_of_blocks(model, spec)
        own = {shape: activations.buffers(shape) if activations is not None else {} for shape in step_shapes}
        self._states = {shape: StepState(shape, weights, memory.buffers(shape), own[shape]) for shape in step_shapes}
        self._memory = memory
        self._arena = Arena()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The model's, in order, its folds after them, and its blocks' (Note [segment numbers] of core.ops)."""
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

    def call(self, shape: StepShape, op: ComputeOp) -> Callable[[], None]:
        """What runs `op` on the calling thread."""
        if isinstance(op, ActSum):
            assert self._activations is not None
            return in_inference_mode(self._activations.summing(shape, op.block))
        return eager_call(self._states[shape], self._segments[op.begin : op.end])

    def path(self, op: ComputeOp) -> str:
        """What errors call `op`."""
        return f"sum of block {op.block}" if isinstance(op, ActSum) else self._segments[op.begin].spec.path

    def eager(self, shape: StepShape, computes: Sequence[ComputeOp], on_error: OnError | None = None) -> Calls:
        """Calls that run the segments themselves."""
        return Calls([_telling(self.call(shape, op), on_error) for op in computes])

    def captured(
        self,
        shape: StepShape,
        computes: Sequence[ComputeOp],
        show: Callable[[int, int], None],
        lock: Callable[[], AbstractContextManager[None]],
        on_error: OnError | None = None,
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
            return Calls([_telling(self._tape(shape, op, show, lock), on_error) for op in computes])
        finally:
            self._memory.restore_buffers(snapshot)

    def _tape(
        self,
        shape: StepShape,
        op: ComputeOp,
        show: Callable[[int, int], None],
        lock: Callable[[], AbstractContextManager[None]],
    ) -> Tape:
        for unit, slot in op.reads if isinstance(op, Compute) else ():
            show(unit, slot)
        with lock():
            return record(self.call(shape, op), self._arena, self.path(op))


def _segments_of_blocks(model: SegmentedModel, spec: ModelSpec) -> tuple[Segment, ...]:
    blocks = blocks_of(model)
    found = tuple(segment for block in blocks for segment in (block.prepare, block.compute, block.finish))
    declared = tuple(segment for block in spec.blocks for segment in block.sliced_segments)
    if tuple(block.spec for block in blocks) != spec.blocks or tuple(one.spec for one in found) != declared:
        raise SpecError(f"model {spec.name}: its blocks differ from those of its spec")
    return found


def _telling(call: Callable[[], None], on_error: OnError | None) -> Callable[[], None]:
    """`call`, whose error `on_error` is told as soon as it is raised."""
    if on_error is None:
        return call

    def told() -> None:
        try:
            call()
        except BaseException as error:
            on_error(error)
            raise

    return told


def in_inference_mode(call: Callable[[], None]) -> Callable[[], None]:
    """`call`, on whatever thread, in the mode that compute has."""

    def called() -> None:
        with torch.inference_mode():
            call()

    return called


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
