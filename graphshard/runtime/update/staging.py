"""Staging: tensors as they come become this rank's bytes of the new weights, in host memory, while steps go on.

Held at one time: what is staged, and the tensors of recipes that still wait for others. A derived weight is made of the
tensors that come, never of the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphshard.comm.checksums import checksum_of_pieces
from graphshard.comm.group import LocalGroup
from graphshard.core.errors import LoadError
from graphshard.core.patterns import matches, patterns_of
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load.accounting import Accounting
from graphshard.load.recipe import Read, Recipes, reads_of, recipe_for
from graphshard.load.recipe_types import result_of
from graphshard.load.store import TensorEntry
from graphshard.runtime.update.places import Place
from graphshard.runtime.update.selection import Selection
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand

_STRIPE_BYTES = 1 << 20
"""What is hashed at a time: it stays in the cache."""

_WAY_OUT = (
    "Give every tensor of all weights as a checkpoint has them, or name the weights that come: only=(...) takes names "
    "and patterns. Runtime.recipes make weights of other tensors"
)


class StagedPiece(NamedTuple):
    """`data` (uint8, on the host) is to be written to `place`."""

    place: Place
    data: Tensor


class Staging:
    """What one update has brought so far on one rank."""

    def __init__(
        self,
        specs: Mapping[str, WeightSpec],
        recipes: Recipes,
        ignore: str | Sequence[str],
        selection: Selection,
        places: Mapping[str, Sequence[Place]],
        on_tensor: Callable[[], None],
        is_fleeting: Callable[[Tensor], bool],
        borrowed: Sequence[str] = (),
    ) -> None:
        """`places`: by weight, where this rank keeps which of its bytes. `on_tensor` is called after each tensor.

        `is_fleeting`: whether a tensor lies where gathers write, so that its bytes are anybody's. `borrowed`: weights
        that another runtime owns.
        """
        self._specs, self._recipes, self._ignore, self._places = specs, recipes, patterns_of("ignore", ignore), places
        self._selection, self._on_tensor, self._is_fleeting = selection, on_tensor, is_fleeting
        self._due: dict[str, set[str]] = {
            weight: set(reads_of(recipe_for(recipes, weight))) for weight in selection.updated
        }
        """By weight that is not staged yet: the tensors that it reads."""
        self._readers: dict[str, list[str]] = {}
        for weight, reads in self._due.items():
            for name in reads:
                self._readers.setdefault(name, []).append(weight)
        self._lent = {read for name in borrowed for read in reads_of(recipe_for(recipes, name))} - set(selection.reads)
        self._entries: dict[str, TensorEntry] = {}
        self._waiting: dict[str, Tensor] = {}
        self._accounting = Accounting("the tensors given", _WAY_OUT, "Runtime.ignore = ")
        self._alone = LocalGroup(1)[0]
        self.pieces: list[StagedPiece] = []
        self.checksums: dict[str, int] = {}
        """Of each tensor that was used, by name."""
        self.staged_bytes = self.peak_bytes = 0

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Stage all of `tensors`.

        Raises:
            LoadError: all that is missing, unknown, given twice, or of another dtype or shape, in one message.
        """
        given: list[str] = []
        for name, tensor in map(_pair, tensors if isinstance(tensors, Iterable) else (tensors,)):
            if name in self.checksums:
                self._accounting.twice(name)
                continue
            if name in self._lent and not matches(name, self._ignore):
                self._accounting.note("borrowed", f"{name}: leave it out, it comes with the update of who lends it")
            else:
                given.append(name)
            if name in self._readers:
                self._take_one(name, tensor)
            self._on_tensor()
        self._accounting.names(given, self._selection.reads, self._ignore)
        self._accounting.raise_if_any()
        assert not self._due and not self._waiting, (self._due, list(self._waiting))

    def _take_one(self, name: str, tensor: Tensor) -> None:
        store = TensorsInHand({name: tensor})
        if self._is_fleeting(tensor):
            raise LoadError(
                f"{name} is a view of a slot, which holds other weights' bytes too: give what state_dict() of a "
                f"module, or whole_weight({name!r}), gives"
            )
        self._entries[name] = store.entries[name]
        self.checksums[name] = checksum_of_pieces(_stripes(store, name))
        self._waiting[name] = tensor
        ready = [weight for weight in self._readers[name] if self._due[weight] <= self._waiting.keys()]
        for weight in ready:
            self._stage(weight, {read: self._waiting[read] for read in self._due.pop(weight)})
        for read in [one for one in self._waiting if not any(weight in self._due for weight in self._readers[one])]:
            del self._waiting[read]
        if name in self._waiting:  # the sender may use its tensor's memory again
            self._waiting[name] = tensor.detach().to("cpu", copy=True)
        held = sum(one.nbytes for one in self._waiting.values())
        self.peak_bytes = max(self.peak_bytes, self.staged_bytes + held)

    def _stage(self, weight: str, tensors: Mapping[str, Tensor]) -> None:
        """All that `weight` is made of is here."""
        spec, recipe = self._specs[weight], recipe_for(self._recipes, weight)
        as_stored = tuple(tensors) if spec.strides is not None and isinstance(recipe, Read) else ()
        store = TensorsInHand(tensors, as_stored)
        if not self._fits(spec, store.entries):
            return
        source = RecipeSource(store, {weight: recipe} if weight in self._recipes else None)
        source.prepare(ModelSpec(weight, (spec,), ()), self._alone)
        for place in self._places.get(weight, ()):
            data = torch.empty(place.num_bytes, dtype=torch.uint8, device="cpu")
            source.read_into(spec, place.weight_begin, data.numpy().data)
            self.pieces.append(StagedPiece(place, data))
            self.staged_bytes += place.num_bytes

    def _fits(self, spec: WeightSpec, entries: Mapping[str, TensorEntry]) -> bool:
        recipe = recipe_for(self._recipes, spec.name)
        found: TensorEntry | WeightSpec
        if isinstance(recipe, Read):
            found = entries[recipe.name]
        else:
            try:
                shape, dtype = result_of(recipe, entries)
            except LoadError as error:
                self._accounting.note("recipe", f"{spec.name}: {error}")
                return False
            found = WeightSpec(spec.name, shape, dtype)
        self._accounting.weight(spec, found)
        return (spec.dtype, spec.shape, spec.strides) == (found.dtype, found.shape, found.strides)


def _pair(given: object) -> tuple[str, Tensor]:
    match given:
        case (str() as name, Tensor() as tensor):
            return name, tensor
        case (str() as name, other):
            what = f"{name!r}: {type(other).__name__}"
        case _:
            what = type(given).__name__
    raise LoadError(f"{what} was given; give pairs of a name and a tensor")


def _stripes(store: TensorsInHand, name: str) -> Iterable[memoryview]:
    buffer = memoryview(bytearray(min(_STRIPE_BYTES, store.entries[name].num_bytes)))
    total = store.entries[name].num_bytes
    for begin in range(0, total, _STRIPE_BYTES):
        stripe = buffer[: min(_STRIPE_BYTES, total - begin)]
        store.read_into(name, begin, stripe)
        yield stripe
