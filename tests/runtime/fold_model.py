"""Byte models with a fold over a cache, and drafts of them that borrow: what runs between steps shows in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from byte_model import ByteModel, _show
from torch import Tensor

from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.model import Segment, StepState

LAYERS = ((3000, 5), (4000,), (5000,))
WIDTH = 16
MAX_BATCH = 4


class FoldModel(ByteModel):
    """`commit_fold` adds `accepted[row] * f_b` to each row of the cache `state`. A layer reads `f_b` too."""

    def __init__(self, layers: Sequence[Sequence[int]] = LAYERS, *, name: str = "folds") -> None:
        super().__init__(layers, name=name)
        self.f_b = WeightSpec(f"{name}.0.f_b", (WIDTH,), "uint8")
        self.weights.append(self.f_b)
        first = self.segments[0].spec
        reader = replace(first, reads=(*first.reads, self.f_b.name))
        self.segments = (Segment(reader, _show(reader, False)), *self.segments[1:])
        self.folds = (Segment(SegmentSpec("commit_fold", None, (self.f_b.name,)), self._fold),)

    def spec(self) -> ModelSpec:
        return replace(super().spec(), folds=tuple(fold.spec for fold in self.folds))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        accepted = BufferSpec("accepted", (shape.batch_size,), "int64", "input")
        state = BufferSpec("state", (MAX_BATCH, WIDTH), "int64", "cache")
        return (*super().buffers(shape), accepted, state)

    def folded(self, accepted: Sequence[int], version: int = 0) -> Tensor:
        """What one fold adds to the first rows of `state`."""
        return torch.tensor(accepted)[:, None] * self.tensors(version)[self.f_b.name].to(torch.int64)

    def _fold(self, state: StepState) -> None:
        added = state.buffer("accepted")[:, None] * state.weight(self.f_b.name).to(torch.int64)
        state.buffer("state").add_(added)


class LendingModel(ByteModel):
    """A byte model whose `embed` lies outside the layers; as `Draft` borrows it."""

    def __init__(self, layers: Sequence[Sequence[int]] = LAYERS, *, name: str = "target", num_bytes: int = 700) -> None:
        super().__init__(layers, name=name)
        embed = WeightSpec("embed", (num_bytes,), "uint8")
        reader = SegmentSpec("embed", None, ("embed",))
        self.weights.insert(0, embed)
        self.segments = (Segment(reader, _show(reader, False)), *self.segments)


class DraftModel(LendingModel):
    """Of another name, hence other bytes, but for `embed`, which is the target's."""

    def __init__(self, target: ByteModel, *, layers: Sequence[Sequence[int]] = ((900,), (33,)), **more: Any) -> None:
        super().__init__(layers, name="draft", **more)
        self._target = target

    def spec(self) -> ModelSpec:
        return replace(super().spec(), borrowed=("embed",))

    def tensors(self, version: int = 0, lent_version: int = 0) -> dict[str, Tensor]:
        return super().tensors(version) | {"embed": self._target.tensors(lent_version)["embed"]}

    def owned(self, version: int = 0) -> dict[str, Tensor]:
        """What the draft's own update brings."""
        return {name: tensor for name, tensor in self.tensors(version).items() if name != "embed"}
