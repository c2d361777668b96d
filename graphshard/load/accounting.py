"""Names accounted for both ways: what the model needs and a store lacks, and what a store holds that nobody asked for.

All that is wrong is one LoadError, so that a checkpoint is put right in one go.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

from graphshard.core.counts import some_of
from graphshard.core.errors import LoadError
from graphshard.core.patterns import matches
from graphshard.core.specs import WeightSpec
from graphshard.load.store import TensorEntry

_MOST_LINES = 40  # of one kind of fault
_MOST_NEAR = 8  # missing names for which near ones are looked up: that takes time where there are many names
_MOST_CANDIDATES = 2000
_RIGHT_CHECKPOINT = "Give the checkpoint of this model's configuration, or recipes that make its weights of its tensors"


class Accounting:
    """What was found wrong between a model and the tensors of `where`, by kind."""

    def __init__(self, where: str, way_out: str = _RIGHT_CHECKPOINT, ignore: str = "ignore=") -> None:
        """Nothing is wrong yet.

        Args:
            where: what the error calls the place of the tensors.
            way_out: what it says to do where something but names that nobody asked for is wrong.
            ignore: how names that nobody asks for are let in.
        """
        self._where, self._way_out, self._ignore = where, way_out, ignore
        self._found: dict[str, list[str]] = {}

    def names(self, held: Collection[str], needed: Collection[str], ignore: Sequence[str] = ()) -> None:
        """Note names that are `needed` and not `held`, and those `held` and not needed.

        `ignore` are patterns (as file names': `*`, `?`, `[a-z]`) of names that may be held and are left out.
        """
        needed_names, held_names = set(needed), set(held)
        extra = [name for name in held if name not in needed_names]
        missing = sorted(needed_names - held_names)
        for i, name in enumerate(missing):
            near = _near(name, extra or list(held)) if i < _MOST_NEAR else []
            hint = f"near it are {', '.join(near)}" if near else f"none of {len(held)} names is near"
            self.note("missing", f"{name}: {hint}" if i < _MOST_NEAR else name)
        for name in extra:
            if not matches(name, ignore):
                self.note("not asked for", name)

    def weight(self, spec: WeightSpec, found: TensorEntry | WeightSpec) -> None:
        """Note a weight whose tensor (or what was made of several) has another dtype, shape or strides."""
        asked, has = (_kind(each.dtype, each.shape, each.strides) for each in (spec, found))
        if asked != has:
            what = "another dtype" if spec.dtype != found.dtype else "another shape"
            self.note(what, f"{spec.name} is {has}, the model asks for {asked}")

    def recipes(self, given: Iterable[str], weights: Collection[str]) -> None:
        """Note recipes that are `given` for none of `weights`."""
        for name in given:
            if name not in weights:
                self.note("recipe", f"{name}: the model has no weight of this name{_near_hint(name, weights)}")

    def twice(self, name: str) -> None:
        """Note a tensor that was given twice."""
        self.note("given twice", name)

    def note(self, kind: str, line: str) -> None:
        """Note one fault."""
        self._found.setdefault(kind, []).append(line)

    def raise_if_any(self) -> None:
        """LoadError with all that was noted."""
        if not self._found:
            return
        count = sum(map(len, self._found.values()))
        width = max(map(len, self._found))
        lines = [f"{count} tensor{'s' if count > 1 else ''} of {self._where} do{'' if count > 1 else 'es'} not fit:"]
        for kind, found in self._found.items():
            lines += [f"  {kind.ljust(width)}  {line}" for line in found[:_MOST_LINES]]
            if len(found) > _MOST_LINES:
                lines.append(f"  {kind.ljust(width)}  and {len(found) - _MOST_LINES} more")
        raise LoadError("\n".join(lines + self._ways_out()))

    def _ways_out(self) -> list[str]:
        lines = [self._way_out] if set(self._found) - {"not asked for"} else []
        if "not asked for" in self._found:
            # a name that nobody asked for may be the one that is missing, misspelt: no example then
            first = "..." if "missing" in self._found else self._found["not asked for"][0]
            lines.append(
                f'What may be left out is named: {self._ignore}("{first}",) takes names and patterns; '
                "a tied head that is stored as well and rotary inv_freq are such"
            )
        return lines


def check_unknown(what: str, given: Iterable[str], known: Mapping[str, object]) -> None:
    """LoadError if one of `given`, which `what` names, is not among `known`."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise LoadError(f"{what}: the model has no weight {some_of(unknown)}{_near_hint(unknown[0], known)}")


def _near_hint(name: str, known: Iterable[str]) -> str:
    near = _near(name, list(known))
    return f"; near {name} are {', '.join(near)}" if near else ""


def _kind(dtype: str, shape: Sequence[int], strides: Sequence[int] | None) -> str:
    """`bfloat16[4, 8]`, and strides if it has some."""
    text = f"{dtype}[{', '.join(map(str, shape))}]"
    return text if strides is None else f"{text} with strides {tuple(strides)}"


def _near(name: str, candidates: Sequence[str]) -> list[str]:
    if len(candidates) > _MOST_CANDIDATES:
        last = name.rpartition(".")[2]
        candidates = [one for one in candidates if one.rpartition(".")[2] == last][:_MOST_CANDIDATES]
    return difflib.get_close_matches(name, candidates, n=3)
