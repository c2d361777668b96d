"""A few layers of a model as a model of their own: enough to see what a block takes in its place.

Kept are whole layers, since what runs before a block is what its gather hides under, and what lies before all layers,
since it makes a step's first activations. What comes after them is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphshard.core.errors import SpecError
from graphshard.core.specs import BlockSpec, BufferSpec, ModelSpec, StepShape
from graphshard.runtime.model import Block, Segment, SegmentedModel, blocks_of


class CutModel:
    """A SegmentedModel: the layers of `blocks` in `model`, and of its blocks those alone."""

    def __init__(self, model: SegmentedModel, blocks: Sequence[BlockSpec]) -> None:
        """Cut.

        Raises:
            SpecError: no block is left, or another runtime owns weights that are.
        """
        if not blocks:
            raise SpecError(f"{model.spec().name}: no block to keep")
        whole, names = model.spec(), {block.name for block in blocks}
        layers = {block.layer for block in blocks} - {None}
        first = next((i for i, one in enumerate(whole.segments) if one.layer is not None), 0)
        kept = [
            i
            for i, one in enumerate(whole.segments)
            if i < first or one.layer in layers or any(block.begin <= i < block.end for block in blocks)
        ]
        self._model = model
        self._segments = tuple(model.segments[i] for i in kept)
        self._blocks = tuple(_moved(block, kept) for block in blocks_of(model) if block.spec.name in names)
        self._spec = _cut(whole, self._segments, self._blocks)
        if self._spec.borrowed:
            raise SpecError(
                f"{whole.name} borrows {', '.join(self._spec.borrowed)}: a model that is measured by itself owns its "
                "weights"
            )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Those that are kept, in order."""
        return self._segments

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those that were asked for, in order."""
        return self._blocks

    def spec(self) -> ModelSpec:
        """The weights that are still read, in their order."""
        return self._spec

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Those of the whole model: which of them a segment uses is its own matter."""
        return self._model.buffers(shape)


def _moved(block: Block, kept: Sequence[int]) -> Block:
    begin = kept.index(block.spec.begin)
    spec = replace(block.spec, begin=begin, end=begin + block.spec.end - block.spec.begin)
    return Block(spec, block.prepare, block.compute, block.finish)


def _cut(whole: ModelSpec, segments: Sequence[Segment], blocks: Sequence[Block]) -> ModelSpec:
    sliced = [one for block in blocks for one in block.spec.sliced_segments]
    read = {name for one in (*(segment.spec for segment in segments), *sliced) for name in one.reads}
    return ModelSpec(
        f"{whole.name}, {len(blocks)} blocks",
        tuple(weight for weight in whole.weights if weight.name in read),
        tuple(segment.spec for segment in segments),
        kept=tuple(one for one in whole.kept if one.weight in read),
        borrowed=tuple(name for name in whole.borrowed if name in read),
        blocks=tuple(block.spec for block in blocks),
    )
