"""Which weights an update writes: `only` and `keep`, and weights that belong together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from graphshard.core.counts import some_of
from graphshard.core.errors import SpecError
from graphshard.core.patterns import matches, patterns_of
from graphshard.load.recipe import Recipes, reads_of, recipe_for

_SUFFIXES = ("_scale_inv", "_scale_2", "_scales", "_scale", "_blocks", "_packed", "_zero_point", "_zeros")
_OF_WEIGHT = {"qweight", "qzeros", "scales", "scale", "scale_inv", "zeros", "g_idx", "weight"}


@dataclass(frozen=True)
class Selection:
    """What is written, what keeps its bytes, and the tensors that must come."""

    updated: tuple[str, ...]
    kept: tuple[str, ...]
    reads: tuple[str, ...]
    """Names of the tensors that `updated` are made of, each once."""


def select(
    weights: Sequence[str],
    recipes: Recipes,
    only: str | Iterable[str] | None,
    keep: str | Iterable[str],
    borrowed: Sequence[str] = (),
) -> Selection:
    """The weights that match a pattern of `only` (None: all) and none of `keep`.

    Args:
        weights: all names.
        recipes: how they are made, see `load.recipe`.
        only: patterns, as file names' (`*`, `?`, `[a-z]`).
        keep: patterns of weights that are declared to keep the bytes they have.
        borrowed: weights that another runtime owns, and updates.

    Raises:
        SpecError: a pattern matches no weight, or borrowed ones alone, or `only` leaves out a weight that belongs to
            one it takes (its scale, or another weight made of the same tensor) and `keep` does not name.
    """
    wanted = ("*",) if only is None else patterns_of("only", only)
    declared = patterns_of("keep", keep)
    for what, patterns in (("only", () if only is None else wanted), ("keep", declared)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in weights):
                lent = next((name for name in borrowed if fnmatchcase(name, pattern)), None)
                if lent is not None:
                    raise SpecError(f"{what}={pattern!r} names {lent}, which is borrowed: update who lends it")
                raise SpecError(f"{what}={pattern!r} matches no weight; known: {some_of(list(weights))}")
    kept = {name for name in weights if matches(name, declared)}
    updated = [name for name in weights if matches(name, wanted) and name not in kept]
    if not updated and len(kept) < len(weights):
        raise SpecError(f"only={list(wanted)} and keep={list(declared)} leave nothing to update")
    _refuse_split(weights, recipes, set(updated), kept)
    reads = dict.fromkeys(name for weight in updated for name in reads_of(recipe_for(recipes, weight)))
    return Selection(tuple(updated), tuple(name for name in weights if name not in set(updated)), tuple(reads))


def companions(weights: Sequence[str], recipes: Recipes) -> list[tuple[str, ...]]:
    """Weights that are of use together alone: made of one tensor, or by name a weight and its scales."""
    root: dict[str, str] = {}

    def find(key: str) -> str:
        while root.setdefault(key, key) != key:
            key = root[key]
        return key

    for weight in weights:
        mine = find(f"weight {weight}")
        keys = [f"stem {stem_of(weight)}", *(f"tensor {name}" for name in reads_of(recipe_for(recipes, weight)))]
        for key in keys:
            root[find(key)] = mine
    together: dict[str, list[str]] = {}
    for weight in weights:
        together.setdefault(find(f"weight {weight}"), []).append(weight)
    return [tuple(names) for names in together.values() if len(names) > 1]


def stem_of(weight: str) -> str:
    """What a weight and its scales have in common: `a.weight` for `a.weight_scale_inv`, `a.qweight` and `a.scales`."""
    module, dot, name = weight.rpartition(".")
    if name in _OF_WEIGHT:
        return f"{module}{dot}weight"
    for suffix in _SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return f"{module}{dot}{name.removesuffix(suffix)}"
    return weight


def _refuse_split(weights: Sequence[str], recipes: Recipes, updated: set[str], kept: set[str]) -> None:
    for names in companions(weights, recipes):
        inside = [name for name in names if name in updated]
        outside = [name for name in names if name not in updated and name not in kept]
        if inside and outside:
            raise SpecError(
                f"only takes {inside[0]} and leaves out {some_of(outside)}, which belongs to it: update both, or "
                f"declare that it keeps its bytes, keep=({outside[0]!r},)"
            )
