"""A module's own tensors as the source of shards: compared over the group first, given up as they are copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from graphshard.runtime.replicated import bytes_hash
from graphshard.runtime.source import TensorSource


class ModuleSource(TensorSource):
    """Parameters that lose their storage once their bytes are in the runtime's memory."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self._parameters = parameters
        self.num_released = 0

    def release(self, names: Sequence[str]) -> None:
        """Give the storage of `names` back; the parameters stay the same objects."""
        for name in names:
            parameter = self._parameters[name]
            parameter.data = torch.empty(0, dtype=parameter.dtype)
            self.num_released += 1


def weight_hash(weight: Tensor) -> str:
    """A 128-bit hash of a weight's elements; gaps between strided ones do not count."""
    flat = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes_hash(flat.numpy().data)
