"""Weights that are loaded whole on every rank, as a server always did: accounted for, with parts if they are merged."""

from __future__ import annotations

import threading

from torch import Tensor, nn

from graphshard.core.errors import LoadError
from graphshard.runtime.attach.spec import dtype_name
from graphshard.runtime.engine.cut import ShardId
from graphshard.runtime.engine.materialise import standing_at, unwritten_rows
from graphshard.runtime.engine.parts import WHOLE, Parts


class WholeWeight:
    """A parameter or buffer outside the layers, or one that is too small, excluded or shared. Threads may load it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        blocks: dict[ShardId, tuple[int, int]],
        *,
        is_unwritten: bool,
    ) -> None:
        """`is_unwritten`: its memory is new, and filled with what `materialise` fills it with."""
        self._module = module
        self._is_unwritten = is_unwritten
        self.name = name
        tensor = self.tensor
        assert tensor is not None, name
        self.parts = Parts(name, tuple(tensor.shape), dtype_name(tensor), blocks)
        self._lock = threading.Lock()

    @property
    def tensor(self) -> Tensor | None:
        """What stands in the module now; None if it was taken away, which is its owner's business."""
        return standing_at(self._module, self.name)

    def load(self, tensor: Tensor, shard_id: ShardId | None = WHOLE) -> None:
        """Copy `tensor`, the part `shard_id` of the weight (None: all of it), to where it stands.

        Raises:
            LoadError: as `Parts.check`; or the weight is no longer in its module.
        """
        with self._lock:
            begin, end = self.parts.check(tensor, shard_id)
            target = self.tensor
            if target is None:
                raise LoadError(f"weight {self.name} is no longer in its module: load it before it is taken away")
            target = target.detach()
            (target[begin:end] if target.dim() else target).copy_(tensor.detach())
            self.parts.done(shard_id)

    def why_incomplete(self) -> str:
        """What is wrong with it at `finalize`; empty if nothing is known to be."""
        tensor = self.tensor
        if tensor is None:
            return ""
        if self.parts.is_begun and self.parts.missing:
            return f"weight {self.name} {self.parts.why_missing()}"
        if not self._is_unwritten or self.parts.is_begun:
            return ""
        unwritten = unwritten_rows(tensor)
        if not unwritten:
            return ""
        rows = tensor.shape[0] if tensor.dim() else 1
        part = "was never loaded" if unwritten == rows else f"was not loaded in {unwritten} of its {rows} rows"
        return f"weight {self.name} {part}"
