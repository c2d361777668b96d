"""Shell patterns over names (`*`, `?`, `[a-z]`): how callers name weights and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from graphshard.core.errors import SpecError


def patterns_of(what: str, given: str | Iterable[str]) -> tuple[str, ...]:
    """`given` as a tuple; a text is one pattern, not its letters.

    Raises:
        SpecError: it is neither a text nor a sequence of texts; `what` names the argument.
    """
    if isinstance(given, str):
        return (given,)
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(one, str) for one in found):
        raise SpecError(f"{what} is {given!r}; it is a sequence of patterns, as in ['*.mlp.*']")
    return found


def first_match(name: str, patterns: Sequence[str]) -> str:
    """The first of `patterns` that matches `name`, or an empty text."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of `patterns` matches `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
