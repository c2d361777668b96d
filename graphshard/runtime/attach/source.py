"""A module's own tensors as the source of shards: compared over the group first, given up as they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.runtime.weights.replicated import bytes_hash
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


class ModuleSource:
    """A weight source: parameters, as they are stored, that lose their storage once their bytes have been copied."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._store = TensorsInHand(parameters, as_stored=parameters)
        self.num_released = 0

    def prepare(self, model: ModelSpec, group: Group) -> None:
        """See WeightSource. The model's spec was read from these parameters, and what is sharded has been compared."""

    def read_into(self, spec: WeightSpec, begin: int, out: memoryview) -> None:
        """See WeightSource."""
        self._store.read_into(spec.name, begin, out)

    def way(self, name: str) -> str:
        """See WeightSource."""
        return "bytes"

    def identity(self) -> None:
        """See WeightSource."""

    @property
    def num_bytes_read(self) -> int:
        """See WeightSource."""
        return self._store.num_bytes_read

    @property
    def checkpoint_bytes(self) -> int:
        """See WeightSource."""
        return sum(entry.num_bytes for entry in self._store.entries.values())

    @property
    def temporary_bytes(self) -> int:
        """See WeightSource."""
        return 0

    def release(self, names: Sequence[str]) -> None:
        """Give the storage of `names` back; the parameters stay the same objects."""
        for name in names:
            parameter = self._parameters[name]
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            self.num_released += 1


def weight_hash(weight: Tensor) -> str:
    """The hash of a weight's elements; gaps between strided ones do not count."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes_hash(flat.numpy().data)
