"""A model whose weights name themselves: every byte follows from its weight and offset, and shows whose it is.

Each segment hands the complement of its weight to an output, by a kernel: a plain copy could be one of the copy
engines' own, and would say nothing about what kernels see.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.model import Segment, StepState

LAYERS = ((300, 5000), (4096,), (1, 77, 800), (65_536, 3))
"""Bytes of each layer's weights; odd ones cross the borders of chunks."""


def naming_bytes(weight: str, num_bytes: int) -> Tensor:
    """`num_bytes` bytes that say whose they are."""
    key = int.from_bytes(hashlib.sha256(weight.encode()).digest()[:7], "little")
    mixed = torch.arange(num_bytes, dtype=torch.int64).mul_(0x1E3779B97F4A7C15).add_(key)
    mixed ^= mixed >> 29
    mixed *= 0x3F58476D1CE4E5B9
    return ((mixed >> 40) & 0xFF).to(torch.uint8)


class NamingModel:
    """`layers[i]` lists the bytes of layer i's weights, one segment each."""

    def __init__(self, layers: Sequence[Sequence[int]] = LAYERS) -> None:
        self._sizes = {f"layers.{i}.w{j}": size for i, sizes in enumerate(layers) for j, size in enumerate(sizes)}
        specs = [
            SegmentSpec(f"s{j}", i, (f"layers.{i}.w{j}",)) for i, sizes in enumerate(layers) for j in range(len(sizes))
        ]
        self.segments = tuple(Segment(spec, _show(spec.reads[0])) for spec in specs)

    def spec(self) -> ModelSpec:
        """Weights of bytes."""
        weights = tuple(WeightSpec(name, (size,), "uint8") for name, size in self._sizes.items())
        return ModelSpec("naming", weights, tuple(segment.spec for segment in self.segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """An output for each weight; the input is read by nobody."""
        seen = [BufferSpec(f"seen:{name}", (size,), "uint8", "output") for name, size in self._sizes.items()]
        return (BufferSpec("step", (shape.batch_size,), "int64", "input"), *seen)

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint."""
        return {name: naming_bytes(name, size) for name, size in self._sizes.items()}

    def truth(self, device: torch.device) -> dict[str, Tensor]:
        """What the outputs must hold."""
        return {f"seen:{name}": tensor.bitwise_not().to(device) for name, tensor in self.tensors().items()}


def wrong(outputs: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
    """A line for each output that differs, with its first wrong byte."""
    found = []
    for name, expected in truth.items():
        if not torch.equal(outputs[name], expected):
            seen = outputs[name].cpu()
            at = int((seen != expected.cpu()).nonzero()[0])
            found.append(f"{name}: byte {at} of {seen.numel()} is {int(seen[at]):#04x}, not {int(expected[at]):#04x}")
    return found


def _show(weight: str) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        torch.bitwise_not(state.weight(weight), out=state.buffer(f"seen:{weight}"))

    return run
