"""What a model is to the runtime: segments that read weights and write declared buffers, nothing else.

A segment runs eagerly, or is recorded once and replayed, always over the same tensors at the same addresses. It reads
weights through its state, writes its results into buffers that the model declared, and lets its temporaries die.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graphshard.core.errors import ProgramError
from graphshard.core.specs import BlockSpec, BufferSpec, ModelSpec, SegmentSpec, StepShape


class StepState:
    """The tensors of one step shape: weights where this step finds them, and its views of the buffers.

    A sharded weight is a view into a slot: it shows the weight's bytes only while a segment that declared it runs.
    """

    def __init__(
        self,
        shape: StepShape,
        weights: Mapping[str, Mapping[str, Tensor]],
        buffers: Mapping[str, Tensor],
        own_buffers: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """`weights[segment path][weight name]`: one weight may lie in different slots for different segments.

        `own_buffers[segment path][name]` are buffers that this segment sees beside those of all.
        """
        self.shape = shape
        self._weights = weights
        self._buffers = buffers
        self._own_buffers = own_buffers or {}
        self._running: SegmentSpec | None = None

    def weight(self, name: str) -> Tensor:
        """The weight `name`, which the running segment must have declared.

        Raises:
            ProgramError: no segment is running, or this one did not declare `name`.
        """
        running = self._running
        if running is None:
            raise ProgramError(
                f"weight {name} was asked for while no segment runs: its slot may hold other bytes; "
                "segments are run by the runtime, in the order of the program (run, replay or begin_step)"
            )
        try:
            return self._weights[running.path][name]
        except KeyError:
            raise ProgramError(
                f"segment {running.path} reads weight {name}, which it did not declare; it declared "
                f"{', '.join(running.reads) or 'none'}: add it to the segment's reads"
            ) from None

    def buffer(self, name: str) -> Tensor:
        """The buffer `name` at this step shape (a cache: its first `batch_size` rows)."""
        own = self._own_buffers.get(self._running.path) if self._running is not None else None
        if own is not None and name in own:
            return own[name]
        try:
            return self._buffers[name]
        except KeyError:
            raise ProgramError(f"no buffer {name!r} was declared; known: {', '.join(self._buffers)}") from None

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """All that segments of this step shape see: (name, `weight` or `buffer`, tensor)."""
        for path, weights in self._weights.items():
            for name, tensor in weights.items():
                yield f"{path}:{name}", "weight", tensor
        for name, tensor in self._buffers.items():
            yield f"{self.shape}:{name}", "buffer", tensor
        for path, buffers in self._own_buffers.items():
            for name, tensor in buffers.items():
                yield f"{self.shape}:{path}:{name}", "buffer", tensor

    def run(self, segments: Sequence[Segment]) -> None:
        """Run `segments` in order, each allowed to see what it declared."""
        try:
            for segment in segments:
                self._running = segment.spec
                segment.run(self)
        finally:
            self._running = None


@dataclass(frozen=True)
class Segment:
    """A piece of compute between two waits. `run` reads and writes through the state it is given, and keeps nothing."""

    spec: SegmentSpec
    run: Callable[[StepState], None]


@dataclass(frozen=True)
class Block:
    """The segments that stand in the place of a block's own where ranks compute on slices; specs as `spec` has them."""

    spec: BlockSpec
    prepare: Segment
    compute: Segment
    finish: Segment


class SegmentedModel(Protocol):
    """A model cut into segments. All three answers depend on the model's configuration alone.

    A model with segments between steps (`ModelSpec.folds`) has them as a property `folds`, see `folds_of`; one with
    blocks (`ModelSpec.blocks`) has these as a property `blocks`, see `blocks_of`.
    """

    @property
    def segments(self) -> Sequence[Segment]:
        """In the order in which a step runs them; their specs equal `spec().segments`."""

    def spec(self) -> ModelSpec:
        """Weights in a canonical order, and the segments' specs."""

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """The buffers of a step of `shape`: equal names for all shapes; a cache's shape is the same for all."""


def folds_of(model: SegmentedModel) -> tuple[Segment, ...]:
    """The segments of `model` that run between steps, in order; their specs equal `spec().folds`."""
    return tuple(getattr(model, "folds", ()))


def blocks_of(model: SegmentedModel) -> tuple[Block, ...]:
    """The blocks of `model` that may run on slices, in order; their specs equal `spec().blocks`."""
    return tuple(getattr(model, "blocks", ()))
