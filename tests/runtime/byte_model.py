"""A model whose weights name themselves, and whose segments show which bytes they saw.

Every byte of every weight is a hash of (model, weight, byte offset, version), so that a wrong slot, rank, offset or
version shows, and can be named. A segment copies each weight it reads into an output buffer of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.model import Segment, StepState


def self_naming(model: str, weight: str, num_bytes: int, version: int = 0) -> Tensor:
    """`num_bytes` bytes that say whose they are."""
    key = hashlib.sha256(f"{model}/{weight}/{version}".encode()).digest()
    seed = np.frombuffer(key, dtype=np.uint64)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8))


class ByteModel:
    """`layers[i]` lists the bytes of layer i's weights, one segment each.

    `tied` adds a segment that reads the first weight again; with `temporaries` segments compute by way of some.
    """

    def __init__(
        self, layers: Sequence[Sequence[int]], *, name: str = "bytes", tied: bool = False, temporaries: bool = False
    ) -> None:
        self.name = name
        self.weights: list[WeightSpec] = []
        specs: list[SegmentSpec] = []
        for layer, sizes in enumerate(layers):
            for i, size in enumerate(sizes):
                weight = WeightSpec(f"{name}.{layer}.w{i}", (size,), "uint8")
                self.weights.append(weight)
                specs.append(SegmentSpec(f"s{i}", layer, (weight.name,)))
        if tied:  # the first weight is read again at the far end
            specs.append(SegmentSpec("tied", None, (self.weights[0].name,)))
        self.segments = tuple(Segment(spec, _show(spec, temporaries)) for spec in specs)

    def spec(self) -> ModelSpec:
        return ModelSpec(self.name, tuple(self.weights), tuple(segment.spec for segment in self.segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        sizes = {weight.name: weight.num_bytes for weight in self.weights}
        seen = [
            BufferSpec(f"{segment.spec.path}:{name}", (sizes[name],), "uint8", "output")
            for segment in self.segments
            for name in segment.spec.reads
        ]
        return (BufferSpec("step", (shape.batch_size,), "int64", "input"), *seen)

    def tensors(self, version: int = 0) -> dict[str, Tensor]:
        """The checkpoint."""
        return {w.name: self_naming(self.name, w.name, w.num_bytes, version) for w in self.weights}

    def wrong(self, outputs: Mapping[str, Tensor], version: int = 0) -> list[str]:
        """What the segments saw that was not theirs: one line for each weight, naming the first wrong byte."""
        found = []
        truth = self.tensors(version)
        for key, seen in outputs.items():
            path, name = key.split(":")
            differing = (seen != truth[name]).nonzero()
            if differing.numel():
                at = int(differing[0])
                found.append(
                    f"{path} read {name}: byte {at} of {seen.numel()} is {seen[at]:#x}, not {truth[name][at]:#x}"
                )
        return found


def _show(spec: SegmentSpec, temporaries: bool):  # type: ignore[no-untyped-def]
    def run(state: StepState) -> None:
        for name in spec.reads:
            weight = state.weight(name)
            if temporaries:
                mask = torch.full_like(weight, 0x5A)
                weight = (weight ^ mask) ^ 0x5A
            state.buffer(f"{spec.path}:{name}").copy_(weight)

    return run
