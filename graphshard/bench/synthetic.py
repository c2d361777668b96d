"""A checkpoint of any size made up here, the model that is loaded from it, and what each of its bytes must be.

A layer has the four matrices of a llama's and a norm. In the checkpoint q, k, v, gate and up are tensors of their own;
in the model they are fused, so that loading is by recipes whose result is a byte mapping. Segments compute nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from graphshard.core.errors import SpecError
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.load.checkpoint import INDEX_NAME
from graphshard.load.recipe import Concat, Read, Recipe
from graphshard.load.writer import write_safetensors
from graphshard.runtime.model import Segment, StepState

DTYPE = "bfloat16"
LARGEST_WIDTH = 2048
"""A layer of it has 44 MiB, its largest weight 16 MiB."""
SMALLEST_WIDTH = 64
MIN_LAYERS = 8
_BLOCK_BYTES = 16 * 2**20 + 4096  # no tensor is as long, so none repeats itself
_SEED = 20


@dataclass(frozen=True)
class SyntheticModel:
    """`num_layers` layers of `width`; a `SegmentedModel`."""

    width: int
    num_layers: int

    @staticmethod
    def of_size(num_bytes: int) -> SyntheticModel:
        """The model next to `num_bytes` with at least 8 layers; SpecError if there is none so small."""
        width = LARGEST_WIDTH
        while width > SMALLEST_WIDTH and SyntheticModel(width, MIN_LAYERS).num_bytes > num_bytes:
            width //= 2
        smallest = SyntheticModel(width, MIN_LAYERS).num_bytes
        if smallest > num_bytes:
            raise SpecError(f"a checkpoint of {num_bytes} bytes is too small to time: use {smallest} or more")
        return SyntheticModel(width, round(num_bytes / SyntheticModel(width, 1).num_bytes))

    @property
    def num_bytes(self) -> int:
        """Of all weights, and of all tensors."""
        return self.num_layers * sum(spec.num_bytes for spec in self._layer(0))

    @property
    def segments(self) -> Sequence[Segment]:
        """See `SegmentedModel`."""
        return tuple(Segment(spec, _compute_nothing) for spec in self.spec().segments)

    def spec(self) -> ModelSpec:
        """See `SegmentedModel`."""
        weights, segments = [], []
        for layer in range(self.num_layers):
            norm, *matrices = self._layer(layer)
            weights += [norm, *matrices]
            reads = [(norm.name, matrices[0].name), *((one.name,) for one in matrices[1:])]
            segments += [SegmentSpec(names[-1].rpartition(".")[2], layer, names) for names in reads]
        return ModelSpec(f"synthetic-{self.width}", tuple(weights), tuple(segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """See `SegmentedModel`."""
        return (BufferSpec("tokens", (shape.batch_size,), "int64", "input"),)

    def recipes(self) -> dict[str, Recipe]:
        """How each weight is made of the checkpoint's tensors."""
        found: dict[str, Recipe] = {}
        for weight in self.spec().weights:
            parts = tuple(Read(tensor.name) for tensor in self.parts(weight.name))
            found[weight.name] = parts[0] if len(parts) == 1 else Concat(parts)
        return found

    def parts(self, weight: str) -> tuple[WeightSpec, ...]:
        """The tensors that `weight` is made of: their bytes, one after the other."""
        layer, _, kind = weight.removeprefix("layers.").partition(".")
        rows = {
            "norm": {"input_layernorm": 0},
            "qkv": {"self_attn.q_proj": 4, "self_attn.k_proj": 1, "self_attn.v_proj": 1},
            "o": {"self_attn.o_proj": 4},
            "gate_up": {"mlp.gate_proj": 4, "mlp.up_proj": 4},
            "down": {"mlp.down_proj": 4},
        }[kind]
        return tuple(
            WeightSpec(f"model.layers.{layer}.{name}.weight", self._shape(quarters), DTYPE)
            for name, quarters in rows.items()
        )

    def tensors(self) -> list[WeightSpec]:
        """The checkpoint's tensors, in the order in which they are written."""
        return [tensor for weight in self.spec().weights for tensor in self.parts(weight.name)]

    def _layer(self, layer: int) -> list[WeightSpec]:
        quarters = {"norm": 0, "qkv": 6, "o": 4, "gate_up": 8, "down": 4}
        return [WeightSpec(f"layers.{layer}.{kind}", self._shape(n), DTYPE) for kind, n in quarters.items()]

    def _shape(self, quarters: int) -> tuple[int, ...]:
        return (quarters * self.width // 4, self.width) if quarters else (self.width,)


class Content:
    """The bytes of every tensor, by its name: a stretch of one random block, which begins elsewhere for each."""

    def __init__(self) -> None:
        block = np.random.default_rng(_SEED).integers(0, 256, _BLOCK_BYTES, dtype=np.uint8)
        self._twice = np.concatenate([block, block])

    def of_tensor(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of the tensor `name`."""
        at = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") % _BLOCK_BYTES
        return self._twice[at + begin : at + end].data

    def of_weight(self, model: SyntheticModel, weight: str, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes [begin, end) of a weight of `model`, in the pieces that lie in one tensor each."""
        at = 0
        for tensor in model.parts(weight):
            low, high = max(begin, at), min(end, at + tensor.num_bytes)
            if low < high:
                yield self.of_tensor(tensor.name, low - at, high - at)
            at += tensor.num_bytes


def write_checkpoint(folder: Path, model: SyntheticModel, num_files: int) -> list[Path]:
    """Write `model`'s tensors into `num_files` files and their index; they are on the disk and in the page cache."""
    content = Content()
    names = [f"model-{i + 1:05}-of-{num_files:05}.safetensors" for i in range(num_files)]
    dealt: dict[str, list[WeightSpec]] = {name: [] for name in names}
    written = 0
    for tensor in model.tensors():
        dealt[names[min(num_files - 1, written * num_files // model.num_bytes)]].append(tensor)
        written += tensor.num_bytes

    def write(name: str) -> Path:
        data = (content.of_tensor(tensor.name, 0, tensor.num_bytes) for tensor in dealt[name])
        path = folder / name
        write_safetensors(path, dealt[name], data)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what writes back later would take time from what is measured
        return path

    with ThreadPoolExecutor(num_files) as pool:
        paths = list(pool.map(write, names))
    index = {tensor.name: name for name, tensors in dealt.items() for tensor in tensors}
    (folder / INDEX_NAME).write_text(
        json.dumps({"metadata": {"total_size": model.num_bytes}, "weight_map": index}), encoding="utf-8"
    )
    return paths


def _compute_nothing(state: StepState) -> None:
    del state
