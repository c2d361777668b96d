"""Shell patterns that name exactly a set of weights: what `make_plan` takes as `include`."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def exact_patterns(chosen: Iterable[str], names: Sequence[str]) -> tuple[str, ...]:
    """Patterns that match all of `chosen` and no other of `names`.

    Weights that are called alike but for their layer's number share a pattern, `model.layers.*.mlp.up_proj.weight`, if
    all of that name are chosen; the others are named one by one.
    """
    wanted = set(chosen)
    alike: dict[str, list[str]] = {}
    for name in names:
        if name in wanted:
            alike.setdefault(_family(name), []).append(name)
    found: list[str] = []
    for family, members in alike.items():
        matches = re.compile(translate(family)).match
        if len(members) > 1 and wanted.issuperset(name for name in names if matches(name)):
            found.append(family)
        else:
            found += [glob.escape(name) for name in members]
    return tuple(found)


def _family(name: str) -> str:
    """`name` as a pattern, with its first number (the layer's) open."""
    head, number, tail = _NUMBER.split(name, maxsplit=1)[0], _NUMBER.search(name), ""
    if number is None:
        return glob.escape(name)
    tail = name[number.end() :]
    return f"{glob.escape(head)}*{glob.escape(tail)}"
