"""One rank's load by itself: a layout's memory, filled from a checkpoint or from tensors in hand, and the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from byte_model import self_naming
from torch import Tensor

from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.core.layout import Layout
from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.device import open_device
from graphshard.load.checkpoint import SINGLE_NAME
from graphshard.load.store import TensorStore
from graphshard.load.writer import write_safetensors
from graphshard.runtime.compiled import Compiled, compile_plan
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.fill import OnLoad, SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.schedule.auto import make_plan

ANY = DeviceSpec("host", "any", 1 << 40)


def model_of(weights: Sequence[WeightSpec], outside: Sequence[WeightSpec] = (), name: str = "load") -> ModelSpec:
    """A layer for each of `weights`, which `compiled_of` shards; `outside` are read outside all layers: resident."""
    segments = [SegmentSpec("proj", i, (weight.name,)) for i, weight in enumerate(weights)]
    segments += [SegmentSpec(weight.name, None, (weight.name,)) for weight in outside]
    return ModelSpec(name, (*weights, *outside), tuple(segments))


def compiled_of(model: ModelSpec, world_size: int, **choices: Any) -> Compiled:
    asked: dict[str, Any] = {"units": "layer", "prefetch_depth": 0, "min_shard_bytes": 0} | choices
    return compile_plan(model, make_plan(model, world_size, ANY, **asked))


def tensors_of(model: ModelSpec, version: int = 0) -> dict[str, Tensor]:
    """Tensors whose bytes say whose they are."""
    made = {}
    for weight in model.weights:
        raw = self_naming(model.name, weight.name, weight.num_bytes, version)
        made[weight.name] = torch.empty(weight.shape, dtype=getattr(torch, weight.dtype))
        if weight.num_bytes:
            made[weight.name] = raw.view(made[weight.name].dtype).view(weight.shape)
    return made


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_checkpoint(folder: Path, model: ModelSpec, tensors: Mapping[str, Tensor] | None = None) -> Path:
    """`folder`, with the model's tensors in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = tensors_of(model) if tensors is None else tensors
    specs = [WeightSpec(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()]
    write_safetensors(folder / SINGLE_NAME, specs, (bytes_of(tensor) for tensor in tensors.values()))
    return folder


@dataclass
class Loaded:
    """What a rank has when its load is over."""

    compiled: Compiled
    rank: int
    memory: RuntimeMemory
    filler: SourceFiller
    checksums: list[int]

    def wrong(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Chunks and resident weights that do not hold the bytes of `tensors`, padding included."""
        layout, found = self.compiled.layout, []
        for unit in layout.units:
            whole = unit_bytes(layout, unit.unit, tensors)
            expected = whole[self.rank * unit.chunk_bytes : (self.rank + 1) * unit.chunk_bytes]
            with self.memory.writing_shard(unit.chunk_offset, unit.chunk_bytes) as chunk:
                if bytes(chunk) != expected:
                    found.append(f"chunk of unit {unit.unit}")
            if self.checksums[unit.unit] != checksum_of(expected):
                found.append(f"checksum of unit {unit.unit}")
        for view in layout.resident:
            if bytes_of(self.memory.resident(view)) != bytes_of(tensors[view.weight]):
                found.append(f"resident {view.weight}")
        return found


def unit_bytes(layout: Layout, unit: int, tensors: Mapping[str, Tensor]) -> bytes:
    """A unit, whole."""
    whole = np.zeros(layout.units[unit].num_bytes, dtype=np.uint8)
    for view in layout.units[unit].views:
        whole[view.offset : view.offset + view.num_bytes] = np.frombuffer(bytes_of(tensors[view.weight]), np.uint8)
    return whole.tobytes()


def load(
    group: Group,
    compiled: Compiled,
    store: TensorStore,
    *,
    before_fill: Callable[[], object] = lambda: None,
    on_load: OnLoad | None = None,
    ignore: Iterable[str] = (),
) -> Loaded:
    """Prepare and fill, as a runtime is built (collective). `before_fill` runs when everything has been accounted."""
    filler = SourceFiller(RecipeSource(store, ignore=tuple(ignore)), on_load)
    filler.prepare(compiled, group)
    before_fill()
    device = open_device("host", num_ranks=group.world_size)
    memory = RuntimeMemory(device, compiled.layout, {})
    return Loaded(compiled, group.rank, memory, filler, filler.fill(compiled, group, memory))
