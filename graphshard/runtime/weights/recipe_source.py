"""Weights made of a store's tensors: read straight into place where only bytes move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load.accounting import Accounting
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.store import TensorStore
from graphshard.runtime.weights.replicated import check_source
from graphshard.runtime.weights.tensor_store import TensorsInHand


class RecipeSource:
    """A weight source over any tensor store: a weight is the tensor of its own name."""

    def __init__(self, store: TensorStore, *, ignore: Sequence[str] = ()) -> None:
        """`ignore`: patterns of tensors that may be there and are not read."""
        self._store = store
        self._ignore = tuple(ignore)

    def prepare(self, model: ModelSpec, group: Group) -> None:
        """See WeightSource."""
        group.agree("checkpoint", lambda: self._account(model))
        check_source(group, model, self)

    def read_into(self, spec: WeightSpec, begin: int, out: memoryview) -> None:
        """See WeightSource."""
        self._store.read_into(spec.name, begin, out)

    def way(self, name: str) -> str:
        """See WeightSource."""
        return "bytes"

    def identity(self) -> str | None:
        """See WeightSource."""
        return self._store.identity()

    def release(self, names: Sequence[str]) -> None:
        """See WeightSource."""
        self._store.release(names)

    @property
    def num_bytes_read(self) -> int:
        """See WeightSource."""
        return self._store.num_bytes_read

    def _account(self, model: ModelSpec) -> None:
        entries = self._store.entries
        accounting = Accounting(self._store.where)
        accounting.names(entries, [weight.name for weight in model.weights], self._ignore)
        for weight in model.weights:
            if weight.name in entries:
                accounting.weight(weight, entries[weight.name])
        accounting.raise_if_any()


def open_store(checkpoint: str | Path | Mapping[str, Tensor], model: ModelSpec) -> Checkpoint | TensorsInHand:
    """The store behind `compile(checkpoint=...)`: a path, or a mapping from names to tensors. The caller closes it."""
    if isinstance(checkpoint, Mapping):
        return TensorsInHand(checkpoint, [weight.name for weight in model.weights if weight.strides is not None])
    return Checkpoint(Path(checkpoint))
