"""Measurements of `graphshard tune` as JSON text. Reading and writing are a round trip.

{"format": "graphshard-tune-1", "model": "SmolLM2-135M", "model_digest": "5f...", "world_size": 2, "transport": "pull",
 "device_kind": "host", "device": "...", "settings": {"prefetch_depth": 0, ...}, "kinds": ["mlp_compute 1536x576 ..."],
 "tokens": [1, 16], "rows": [{"kind": "mlp_compute 1536x576 ...", "tokens_per_rank": 1, "mode": "gather",
 "median_ms": 0.61, "p10_ms": 0.6, "p90_ms": 0.63, "n": 30}, ...], "notes": {...}}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from graphshard.core.errors import SpecError
from graphshard.core.json_file import load_json_object
from graphshard.core.plan import Transport
from graphshard.schedule.tuned import MODES, Tuned, TunedRow

FORMAT = "graphshard-tune-1"


def tune_content(tuned: Tuned) -> dict[str, Any]:
    """`tuned` as plain data, in the order of its fields."""
    content = {one.name: getattr(tuned, one.name) for one in fields(tuned)}
    content |= {"kinds": list(tuned.kinds), "tokens": list(tuned.tokens), "rows": [asdict(row) for row in tuned.rows]}
    return {"format": FORMAT, **content}


def tune_text(tuned: Tuned) -> str:
    """`tuned` as a file has it."""
    return json.dumps(tune_content(tuned), indent=1) + "\n"


def as_tuned(source: Tuned | str | Path) -> Tuned:
    """Measurements: as they are, or read from a file; errors as `load_tuned`."""
    if isinstance(source, Tuned):
        return source
    if not isinstance(source, str | Path):
        raise SpecError(f"tune is {source!r}: give the file that `graphshard tune` wrote")
    return load_tuned(source)


def load_tuned(path: str | Path) -> Tuned:
    """What the file at `path` holds.

    Raises:
        SpecError: naming the file, the key, what was found there and what is expected.
    """
    return load_json_object(path, "tune file", parse_tuned)


def parse_tuned(content: Mapping[str, Any]) -> Tuned:
    """The measurements of `content`, as `tune_content` has them; SpecError naming the key that is wrong."""
    if content.get("format") != FORMAT:
        raise SpecError(f"format is {content.get('format')!r}; this version reads {FORMAT}: measure anew")
    values = _parsed("", {key: value for key, value in content.items() if key != "format"}, _KEYS)
    return Tuned(**values)


def _parsed(where: str, content: object, keys: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
    """`content` with each of `keys` once and nothing else, each value by its parser."""
    if not isinstance(content, dict):
        raise SpecError(f"{where} is {content!r}; it is an object")
    unlike = sorted(set(content) ^ set(keys))
    if unlike:
        what = "is missing" if unlike[0] in keys else f"is unknown; known are {', '.join(keys)}"
        raise SpecError(f"the key {where}{'.' if where else ''}{unlike[0]} {what}")
    prefix = f"{where}." if where else ""
    return {key: parser(f"{prefix}{key}", content[key]) for key, parser in keys.items()}


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise SpecError(f"{where} is {value!r}; it is a text")
    return value


def _count(where: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{where} is {value!r}; it is a whole number that starts at 1")
    return value


def _time(where: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= sys.float_info.max:  # no infinity, no nan, no int beyond all floats
        raise SpecError(f"{where} is {value!r}; it is a time above 0")
    return float(value)


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpecError(f"{where} is {value!r}; it is an object")
    return value


def _one_of(*known: str) -> Callable[[str, Any], Any]:
    def parse(where: str, value: Any) -> Any:
        if value not in known:
            raise SpecError(f"{where} is {value!r}; known are {', '.join(known)}")
        return value

    return parse


def _each(parser: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    def parse(where: str, value: Any) -> Any:
        if not isinstance(value, list):
            raise SpecError(f"{where} is {value!r}; it is a list")
        return tuple(parser(f"{where}[{i}]", one) for i, one in enumerate(value))

    return parse


def _row(where: str, value: Any) -> TunedRow:
    return TunedRow(**_parsed(where, value, _ROW_KEYS))


_ROW_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "kind": _text,
    "tokens_per_rank": _count,
    "mode": _one_of(*MODES),
    "median_ms": _time,
    "p10_ms": _time,
    "p90_ms": _time,
    "n": _count,
}
_KEYS: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "model_digest": _text,
    "world_size": _count,
    "transport": _one_of(*get_args(Transport)),
    "device_kind": _one_of("host", "cuda"),
    "device": _text,
    "settings": _object,
    "kinds": _each(_text),
    "tokens": _each(_count),
    "rows": _each(_row),
    "notes": _object,
}
