"""What an attached module has beside the runtime's memory: tensors of its own, and parameters that view that memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from graphshard.core.specs import WeightSpec
from graphshard.runtime.device_bytes import writing_bytes
from graphshard.runtime.memory import BufferRow
from graphshard.runtime.update.places import Place

PARAMETER = "parameter"
"""The role of its rows."""


@dataclass(frozen=True)
class Outside:
    """The module's side of an update."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Plain tensors that each rank keeps whole, by name: an update writes them in place."""
    views: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameters over the runtime's memory that have one address for all calls."""

    def specs(self) -> dict[str, WeightSpec]:
        """The tensors as weights."""
        return {name: _spec(name, tensor) for name, tensor in self.tensors.items()}

    def places(self) -> dict[str, list[Place]]:
        """Where an update writes them: whole, to themselves."""
        return {name: [Place(name, "outside", 0, 0, spec.num_bytes)] for name, spec in self.specs().items()}

    def writing(self, place: Place) -> AbstractContextManager[memoryview]:
        """The bytes of `place`, to be written in the block."""
        tensor = self.tensors[place.weight].detach()
        begin = tensor.storage_offset() * tensor.element_size() + place.begin
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return writing_bytes(flat.set_(tensor.untyped_storage(), begin, (place.num_bytes,), (1,)))

    def rows(self) -> tuple[BufferRow, ...]:
        """Where all of it lies now."""
        found = {**self.tensors, **self.views}
        return tuple(BufferRow.of(name, PARAMETER, tensor) for name, tensor in found.items())


def _spec(name: str, tensor: Tensor) -> WeightSpec:
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return WeightSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), strides)
