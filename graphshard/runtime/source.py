"""Where weights come from before they are sharded: a checkpoint on disk, or tensors in hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.checkpoint import Checkpoint


class WeightSource(Protocol):
    """Bytes by weight."""

    def read(self, spec: WeightSpec) -> memoryview:
        """The `spec.num_bytes` bytes of a weight; LoadError if the source's weight is missing or differs."""

    def identity(self) -> str | None:
        """Equal on two ranks of one machine only if they read the very same bytes; None if that is not known."""

    def release(self, names: Sequence[str]) -> None:
        """These weights have been copied and will not be read again: the source may give up its own copies."""


class TensorSource:
    """Weights from tensors that somebody else owns."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def read(self, spec: WeightSpec) -> memoryview:
        """See WeightSource. A strided tensor's bytes are read as they are stored."""
        tensor = self._tensors.get(spec.name)
        if tensor is None:
            raise LoadError(f"weight {spec.name} is not among the {len(self._tensors)} tensors given")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != spec.shape or dtype != spec.dtype:
            raise LoadError(
                f"weight {spec.name}: the tensor given is {dtype}{tuple(tensor.shape)}, "
                f"the model asks for {spec.dtype}{spec.shape}"
            )
        tensor = tensor.detach()
        if spec.strides is None:
            tensor = tensor.contiguous()
        elif tuple(tensor.stride()) != spec.strides:
            raise LoadError(f"weight {spec.name}: strides {tuple(tensor.stride())}, the model asks for {spec.strides}")
        begin = tensor.storage_offset() * tensor.element_size()
        raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), begin, (spec.num_bytes,), (1,))
        return raw.numpy().data

    def identity(self) -> None:
        """See WeightSource. Nothing but their bytes says whether two tensors are equal."""

    def release(self, names: Sequence[str]) -> None:
        """See WeightSource. The tensors are somebody else's."""


class CheckpointSource:
    """Weights from a folder or file of safetensors."""

    def __init__(self, path: Path) -> None:
        self._checkpoint = Checkpoint(path)

    def read(self, spec: WeightSpec) -> memoryview:
        """See WeightSource."""
        return self._checkpoint.read(spec)

    def identity(self) -> str:
        """See WeightSource. Device, inode, size and time of change of each file."""
        return self._checkpoint.identity()

    def release(self, names: Sequence[str]) -> None:
        """See WeightSource. Nothing is kept of a file that was read."""


def open_source(checkpoint: str | Path | Mapping[str, Tensor]) -> WeightSource:
    """The source behind `compile(checkpoint=...)`: a path, or a mapping from names to tensors."""
    if isinstance(checkpoint, Mapping):
        return TensorSource(checkpoint)
    return CheckpointSource(Path(checkpoint))
