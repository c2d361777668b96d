"""What of one weight was loaded: its parts by shard id, each checked, and each once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphshard.core.errors import LoadError
from graphshard.runtime.attach.spec import dtype_name
from graphshard.runtime.engine.cut import ShardId

WHOLE = None
"""The shard id of a weight that is loaded in one piece."""


class Parts:
    """The account of weight `name`, `shape` whole, whose parts are rows `[begin, end)` of it."""

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: str, blocks: Mapping[ShardId, tuple[int, int]]
    ) -> None:
        self.name = name
        self._shape, self._dtype, self._blocks = shape, dtype, blocks
        self._loaded: set[ShardId | None] = set()

    @property
    def missing(self) -> tuple[ShardId | None, ...]:
        """The parts that were not loaded; `(None,)` if there is but one, the whole."""
        if WHOLE in self._loaded:
            return ()
        return tuple(part for part in (self._blocks or (WHOLE,)) if part not in self._loaded)

    @property
    def is_merged(self) -> bool:
        """Whether it has parts."""
        return bool(self._blocks)

    @property
    def is_begun(self) -> bool:
        """Whether any part was loaded."""
        return bool(self._loaded)

    def check(self, tensor: Tensor, shard_id: ShardId | None) -> tuple[int, int]:
        """The rows of the weight that `tensor` is. One without dimensions (a scalar scale) may be one number of a row.

        Raises:
            LoadError: an unknown part, one that was loaded, another shape or dtype than it has, or no bytes.
        """
        begin, end = self.rows_of(shard_id)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            found = f"a tensor with layout {tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise LoadError(f"{self._called(shard_id)} was given {found}: give a plain tensor")
        shape = (end - begin, *self._shape[1:]) if self._shape else ()
        has_shape = tuple(tensor.shape) == shape or (not tensor.dim() and shape == (1,))
        if not has_shape or dtype_name(tensor) != self._dtype or tensor.device.type == "meta":
            raise LoadError(
                f"{self._called(shard_id)} is {self._dtype}{list(shape)}, the tensor given is "
                f"{dtype_name(tensor)}{list(tensor.shape)} on {tensor.device}: loaders take whole parts and "
                "cast nothing"
            )
        if shard_id in self._loaded or WHOLE in self._loaded or (shard_id is WHOLE and self._loaded):
            raise LoadError(
                f"{self._called(shard_id)} is loaded twice (loaded: {self._loaded_text()}); give each part once"
            )
        return begin, end

    def done(self, shard_id: ShardId | None) -> None:
        """The part is in its place."""
        self._loaded.add(shard_id)

    def why_missing(self) -> str:
        """`lacks part 'v'; loaded: 'q', 'k'`, or `was never loaded`."""
        if not self._loaded:
            return "was never loaded"
        return f"lacks part {', '.join(map(repr, self.missing))}; loaded: {self._loaded_text()}"

    def rows_of(self, shard_id: ShardId | None) -> tuple[int, int]:
        """The rows of the weight that part `shard_id` is; LoadError if it has none of that name."""
        if shard_id is WHOLE:
            return 0, self._shape[0] if self._shape else 1
        found = self._blocks.get(shard_id) if isinstance(shard_id, (str, int)) else None
        if found is None:
            known = ", ".join(map(repr, self._blocks)) or "none, it is loaded whole (blocks= declares parts)"
            raise LoadError(f"weight {self.name} has no part {shard_id!r}; known: {known}")
        return found

    def _called(self, shard_id: ShardId | None) -> str:
        return f"weight {self.name}" + ("" if shard_id is WHOLE else f", part {shard_id!r},")

    def _loaded_text(self) -> str:
        return ", ".join("the whole" if part is WHOLE else repr(part) for part in sorted(self._loaded, key=str))
