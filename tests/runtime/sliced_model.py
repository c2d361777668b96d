"""The byte model with blocks: every layer has a few weights of equal rows that may lie in slices, between others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from byte_model import ByteModel
from torch import Tensor

from graphshard.core.plan import Unit
from graphshard.core.specs import BlockSpec, ModelSpec, SegmentSpec
from graphshard.runtime.model import Segment, StepState
from graphshard.schedule.units import UnitRules, choose_units

BEFORE, AFTER = 3001, 300
"""Bytes of the weights around a block, which lie flat."""


class SlicedModel(ByteModel):
    """`layers[i]` are the rows of layer i's block and the widths of its weights, in bytes."""

    def __init__(self, layers: Sequence[tuple[int, Sequence[int]]], **more: Any) -> None:
        super().__init__([[BEFORE, *(rows * width for width in widths), AFTER] for rows, widths in layers], **more)
        self.blocks_specs = []
        begin = 0
        for layer, (rows, widths) in enumerate(layers):
            first = begin + 1
            for index, width in enumerate(widths, first):
                self.weights[index] = replace(self.weights[index], shape=(rows, width))
            names = tuple(weight.name for weight in self.weights[first : first + len(widths)])
            parts = (
                SegmentSpec("prepare", layer, ()),
                SegmentSpec("compute", layer, names),
                SegmentSpec("finish", layer, ()),
            )
            end = first + len(widths)
            self.blocks_specs.append(
                BlockSpec(f"{layer}.mlp", layer, first, end, names[:-1], names[-1:], 1, 1, "float32", *parts)
            )
            begin = end + 1
        self.segments = tuple(Segment(segment.spec, _flat(segment)) for segment in self.segments)

    def spec(self) -> ModelSpec:
        return replace(super().spec(), blocks=tuple(self.blocks_specs))

    def tensors(self, version: int = 0) -> dict[str, Tensor]:
        shapes = {weight.name: weight.shape for weight in self.weights}
        return {name: tensor.view(shapes[name]) for name, tensor in super().tensors(version).items()}

    def wrong(self, outputs: Any, version: int = 0) -> list[str]:
        flat = {key: outputs[key] for key in outputs}
        truth = {name: tensor.flatten() for name, tensor in self.tensors(version).items()}
        found = []
        for key, seen in flat.items():
            name = key.split(":")[1]
            differing = (seen != truth[name]).nonzero()
            if differing.numel():
                at = int(differing[0])
                found.append(f"{key}: byte {at} of {seen.numel()} is {seen[at]:#x}, not {truth[name][at]:#x}")
        return found


def _flat(segment: Segment):  # type: ignore[no-untyped-def]
    spec = segment.spec

    def run(state: StepState) -> None:
        for name in spec.reads:
            state.buffer(f"{spec.path}:{name}").copy_(state.weight(name).reshape(-1))

    return run


def sliced_units(model: ModelSpec, world_size: int, policy: str = "layer") -> tuple[Unit, ...]:
    """The units of a plan with blocks: sliced where they can be."""
    rules = UnitRules(policy, slice_blocks=True, world_size=world_size, min_shard_bytes=0)
    return choose_units(model, rules)[1]
