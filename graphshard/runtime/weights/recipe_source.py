"""Weights made of a store's tensors by recipes: read straight into place where only bytes move, else by rows."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.errors import LoadError, SpecError
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load.accounting import Accounting
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.recipe import Read, Recipe, Recipes, reads_of, recipe_for
from graphshard.load.recipe_runs import Run, runs_of, way_of
from graphshard.load.recipe_types import Typed, typed
from graphshard.load.store import TensorStore
from graphshard.runtime.weights.evaluate import amax, evaluate, scale_from_amax, scaled_per_tensor, stripes
from graphshard.runtime.weights.replicated import check_source
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


@dataclass(frozen=True)
class _Made:
    """How one weight is made: `runs` of bytes, or (None) the rows of `result`."""

    result: Typed
    runs: tuple[Run, ...] | None
    way: str
    reads: tuple[str, ...]


class RecipeSource:
    """A weight source over any tensor store. A weight without a recipe is the tensor of its own name."""

    def __init__(self, store: TensorStore, recipes: Recipes | None = None, ignore: Sequence[str] = ()) -> None:
        """`ignore`: patterns of tensors that may be there and are not read."""
        self._store = store
        self._recipes: Recipes = recipes or {}
        self._ignore = tuple(ignore)
        self._made: dict[str, _Made] = {}
        self._scales: dict[Recipe, Tensor] = {}
        self._readers: Counter[str] = Counter()
        """Weights that are still to be made of each tensor."""
        self._temporary = _Temporary()

    def prepare(self, model: ModelSpec, group: Group) -> None:
        """See WeightSource. Scales of whole weights are found here, each rank looking at its share of the rows."""
        self._made = group.agree("checkpoint", lambda: self._account(model))
        self._readers.update(name for made in self._made.values() for name in made.reads)
        self._find_scales(group)
        if not isinstance(group, Newcomer):  # which is alone; its shards' checksums are compared
            check_source(group, model, self)

    def read_into(self, spec: WeightSpec, begin: int, out: memoryview) -> None:
        """See WeightSource."""
        made = self._made[spec.name]
        if made.runs is None:
            self._evaluate_into(made.result, begin, out)
        else:
            self._copy_into(made.runs, begin, out)

    def way(self, name: str) -> str:
        """See WeightSource."""
        return self._made[name].way

    def identity(self) -> str | None:
        """See WeightSource."""
        return self._store.identity()

    def release(self, names: Sequence[str]) -> None:
        """See WeightSource. A tensor goes with the last weight that is made of it."""
        reads = [tensor for name in names for tensor in self._made[name].reads]
        self._readers.subtract(reads)
        self._store.release([tensor for tensor in dict.fromkeys(reads) if not self._readers[tensor]])

    @property
    def num_bytes_read(self) -> int:
        """See WeightSource."""
        return self._store.num_bytes_read

    @property
    def checkpoint_bytes(self) -> int:
        """See WeightSource."""
        tensors = {name for made in self._made.values() for name in made.reads}
        return sum(self._store.entries[name].num_bytes for name in tensors)

    @property
    def temporary_bytes(self) -> int:
        """See WeightSource."""
        return self._temporary.most

    def _account(self, model: ModelSpec) -> dict[str, _Made]:
        """How each weight is made; LoadError with all that does not fit; SpecError for what is no recipe."""
        entries = self._store.entries
        accounting = Accounting(self._store.where)
        if not isinstance(self._recipes, Mapping):
            raise SpecError(f"recipes are a {type(self._recipes).__name__}: give a mapping, weight names to recipes")
        recipes = {weight.name: recipe_for(self._recipes, weight.name) for weight in model.weights}
        accounting.recipes(self._recipes, recipes)
        needed = [read for weight in model.owned for read in reads_of(recipes[weight.name])]
        lent = {read for name in model.borrowed for read in reads_of(recipes[name])} - set(needed)
        accounting.names([name for name in entries if name not in lent], needed, self._ignore)
        made = {}
        for weight in model.owned:
            recipe = recipes[weight.name]
            if all(read in entries for read in reads_of(recipe)):
                try:
                    one = self._make(weight, recipe, accounting)
                except LoadError as error:
                    accounting.note("recipe", f"{weight.name}: {error}")
                else:
                    made[weight.name] = one
        accounting.raise_if_any()
        return made

    def _make(self, weight: WeightSpec, recipe: Recipe, accounting: Accounting) -> _Made:
        result = typed(recipe, self._store.entries)
        if isinstance(recipe, Read):
            entry = self._store.entries[recipe.name]
            accounting.weight(weight, entry)
            runs = (Run(0, recipe.name, 0, entry.num_bytes),)  # also where it is strided: as it is stored
            return _Made(result, runs, "bytes", (recipe.name,))
        accounting.weight(weight, WeightSpec(weight.name, result.shape, result.dtype))
        return _Made(result, runs_of(result), way_of(result), reads_of(recipe))

    def _find_scales(self, group: Group) -> None:
        """The scales per tensor, from the largest magnitude over all ranks' shares of the rows (collective)."""
        nodes = {node.node: node for made in self._made.values() for node in scaled_per_tensor(made.result)}
        if not nodes:
            return
        is_alone = isinstance(group, Newcomer)
        share, num_shares = (0, 1) if is_alone else (group.rank, group.world_size)
        shown = group.agree(
            "largest magnitudes",
            lambda: [amax(node, share, num_shares, self._rows) for node in nodes.values()],
            progress=lambda: self.num_bytes_read,
        )
        told: list[Any] = [shown] if is_alone else [value for value, _ in group.all_gather(shown, name="scales")]
        for node, of_ranks in zip(nodes.values(), zip(*told, strict=True), strict=True):
            self._scales[node.node] = scale_from_amax(node, max(of_ranks))

    def _copy_into(self, runs: Sequence[Run], begin: int, out: memoryview) -> None:
        first = bisect_right(runs, begin, key=lambda run: run.begin) - 1
        done = 0
        for run in runs[max(0, first) :]:
            if done == len(out):
                break
            skipped = begin + done - run.begin
            num_bytes = min(run.num_bytes - skipped, len(out) - done)
            self._store.read_into(run.tensor, run.tensor_begin + skipped, out[done : done + num_bytes])
            done += num_bytes

    def _evaluate_into(self, result: Typed, begin: int, out: memoryview) -> None:
        """Bytes `[begin, begin + len(out))` of what `result` makes, a stripe of its rows at a time."""
        if not len(out):
            return
        row_bytes, end = result.row_bytes, begin + len(out)
        for first, last in stripes(result, begin // row_bytes, -(-end // row_bytes)):
            made = evaluate(result, first, last, self._rows, self._scales)
            with self._temporary.holding(made.nbytes):
                data = made.reshape(-1).view(torch.uint8).numpy().data
                at = first * row_bytes
                low, high = max(begin, at), min(end, last * row_bytes)
                out[low - begin : high - begin] = data[low - at : high - at]

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows `[begin, end)` of a tensor; see `evaluate.Rows`."""
        whole = typed(Read(name), self._store.entries)
        data = self._temporary.empty((end - begin) * whole.row_bytes)
        self._store.read_into(name, begin * whole.row_bytes, data.data)
        return torch.from_numpy(data).view(getattr(torch, whole.dtype))


class _Temporary:
    """Bytes that evaluation holds at one time, over all threads: what it read, as long as that lives, and its result.

    The nodes between the two are bounded by `evaluate.stripes`, and not counted.
    """

    def __init__(self) -> None:
        self.most = 0
        self._now = 0
        self._lock = threading.RLock()  # memory may be freed, by a collection, while it is held

    def empty(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory that counts until it is freed; a tensor over it keeps it."""
        data = np.empty(num_bytes, dtype=np.uint8)
        self._add(num_bytes)
        weakref.finalize(data, self._add, -num_bytes).atexit = False
        return data

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Another `num_bytes` count inside."""
        self._add(num_bytes)
        try:
            yield
        finally:
            self._add(-num_bytes)

    def _add(self, num_bytes: int) -> None:
        with self._lock:
            self._now += num_bytes
            self.most = max(self.most, self._now)


def open_store(checkpoint: str | Path | Mapping[str, Tensor], model: ModelSpec) -> Checkpoint | TensorsInHand:
    """The store behind `compile(checkpoint=...)`: a path, or a mapping from names to tensors. The caller closes it."""
    if isinstance(checkpoint, Mapping):
        return TensorsInHand(checkpoint, [weight.name for weight in model.weights if weight.strides is not None])
    return Checkpoint(Path(checkpoint))
