"""The certificate: what every rank must have alike before a graph is captured, compared once, at bind.

Digests travel first; where two models or programs differ their texts follow, so that the error names the first weight,
segment or op that differs.
All ranks raise the same error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.text import digest_of

_OP_LINE = re.compile(r"\s*(\d+)\s+(.*)")
_MAX_VALUE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Certificate:
    """Digests and settings of one rank. `programs` are texts by step shape, in the order of capture."""

    model: str
    plan: str
    layout: str
    programs: Mapping[str, str]
    settings: Mapping[str, str]
    """Transport, executor, device kind, library versions: whatever must be alike, by name."""
    windows: Sequence[tuple[str, int]] = ()
    """(name, bytes) in the order of registration."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Device numbers that chose an op (see `agree_min`)."""
    model_text: str = ""
    """`ModelSpec.text()`: sent where models differ. Empty: their digests are all there is to say."""

    def rows(self, world_size: int) -> list[tuple[str, str]]:
        """(field, value) in the order in which differences are looked for: causes before what follows from them."""
        rows = [("world_size", str(world_size)), ("step shapes", " ".join(self.programs)), ("model digest", self.model)]
        rows += [(f"setting {name}", value) for name, value in sorted(self.settings.items())]
        rows += [(f"number {name}", str(value)) for name, value in sorted(self.numbers.items())]
        rows += [(f"program {shape}", digest_of(text)) for shape, text in self.programs.items()]
        rows += [("plan digest", self.plan), ("layout digest", self.layout)]
        return rows + [(f"window {i}", f"{name} ({size} B)") for i, (name, size) in enumerate(self.windows)]

    def told(self, world_size: int) -> dict[str, Any]:
        """What `compare` needs of it, as JSON."""
        return {"rows": self.rows(world_size), "programs": dict(self.programs), "model": self.told_model()}

    def told_model(self) -> str:
        """What to say of the model where models differ."""
        return self.model_text or f"ModelSpec digest={self.model}"

    def digest(self, world_size: int) -> str:
        """Equal on two ranks if `compare` finds no difference."""
        return digest_of("".join(f"{name}={value}\n" for name, value in self.rows(world_size)))


def exchange(group: Group, certificate: Certificate) -> None:
    """Compare `certificate` with every rank's (collective).

    Raises:
        CommError: on every rank, naming the first difference, with all values by rank: the field, the model's weight or
            segment, or the program's op.
    """
    gathered: list[Any] = [rows for rows, _ in group.all_gather(certificate.rows(group.world_size), name="certificate")]
    unlike = _unlike_text(gathered)
    if unlike is not None:
        told = group.all_gather(_text_of(unlike, certificate.told_model(), certificate.programs), name=unlike)
        _raise_text_difference(unlike, [str(text) for text, _ in told])


def compare(certificate: Certificate, others: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Compare the certificate of `rank` with the one that all other ranks have, as `Certificate.told` gave it.

    Raises:
        CommError: naming the first difference, as `exchange` does.
    """
    rows = [others["rows"]] * world_size
    rows[rank] = certificate.rows(world_size)
    unlike = _unlike_text(rows)
    if unlike is not None:
        texts = [_text_of(unlike, others["model"], others["programs"])] * world_size
        texts[rank] = _text_of(unlike, certificate.told_model(), certificate.programs)
        _raise_text_difference(unlike, texts)


def agree_min(group: Group, name: str, value: int) -> int:
    """The least of all ranks' `value` (collective): no rank's own number may choose an op."""
    gathered = [number for number, _ in group.all_gather(value, name=f"agreed {name}")]
    wrong = [str(rank) for rank, number in enumerate(gathered) if not isinstance(number, int)]
    if wrong:
        raise CommError(f"agreed {name}: ranks {' '.join(wrong)} gave no whole number: {gathered}")
    return min(number for number in gathered if isinstance(number, int))


_NEXT_STEP = "start all ranks with the same model, plan, versions and settings"


def _unlike_text(gathered: Sequence[Any]) -> str | None:
    """`model` or `program SHAPE` if that is what first differs between ranks' rows; CommError if it is another row."""
    for rows in zip_longest(*gathered):
        names = [row[0] if row else "nothing" for row in rows]
        if len(set(names)) > 1:
            raise CommError(f"certificates differ: the next entry is {_by_value(names)}; {_NEXT_STEP}")
        values = [row[1] for row in rows]
        if len(set(values)) == 1:
            continue
        if names[0] == "model digest":
            return "model"
        if names[0].startswith("program "):
            return str(names[0])
        raise CommError(f"certificates differ: {names[0]} is {_by_value(values)}; {_NEXT_STEP}")
    return None


def _text_of(name: str, model_text: str, programs: Mapping[str, str]) -> str:
    """What stands behind the row `name`, see `_unlike_text`."""
    return model_text if name == "model" else programs[name.removeprefix("program ")]


def _raise_text_difference(name: str, texts: Sequence[str]) -> None:
    if name == "model":
        _raise_model_difference(texts)
    _raise_program_difference(name, texts)


def _raise_model_difference(texts: Sequence[str]) -> None:
    for kind in ("WeightSpec", "SegmentSpec", "ModelSpec"):  # the model's own name last: the least of differences
        found = [[line.strip() for line in text.splitlines() if line.strip().startswith(kind)] for text in texts]
        for index, lines in enumerate(zip_longest(*found, fillvalue="nothing")):
            if len(set(lines)) > 1:
                where = kind.removesuffix("Spec").lower() + ("" if kind == "ModelSpec" else f" {index}")
                values = _by_value([line.removeprefix(f"{kind} ") for line in lines])
                raise CommError(f"certificates differ: {where} is {values}; {_NEXT_STEP}")
    raise AssertionError("model: digests differ, texts do not")


def _raise_program_difference(name: str, texts: Sequence[str]) -> None:
    split = [_split_program(text) for text in texts]
    for part in (1, 0):  # ops first: entry, exit and counts follow from them
        for index, lines in enumerate(zip_longest(*(parts[part] for parts in split), fillvalue="nothing")):
            if len(set(lines)) > 1:
                where = f"op {index}" if part else f"line {index}"
                raise CommError(f"certificates differ: {name}, {where} is {_by_value(lines)}; {_NEXT_STEP}")
    raise AssertionError(f"{name}: digests differ, texts do not")


def _split_program(text: str) -> tuple[list[str], list[str]]:
    """(other lines, op texts) of `Program.text()`."""
    found = [(line, _OP_LINE.fullmatch(line)) for line in text.splitlines()]
    return [line for line, op in found if not op], [op.group(2) for _, op in found if op]


def _by_value(values: Sequence[str]) -> str:
    """`"a" on ranks 0 1 3, "b" on rank 2`."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return ", ".join(
        f'"{value[:_MAX_VALUE_CHARACTERS]}" on rank{"s" if len(which) > 1 else ""} {" ".join(which)}'
        for value, which in ranks.items()
    )
