"""Hardware as a JSON file: written by `graphshard calibrate`, or by hand. Reading and writing are a round trip.

{"format": "graphshard-hardware-1", "name": "mine", "kind": "host", "memory_bytes": 8589934592, ...,
 "links": [{"transport": "pull", "bytes_per_s": 9.1e9, "t0_us": 3.0}], "derate": [[1048576, 0.8]],
 "peak_flops": {"float32": 9.5e10}, "measured": [{"what": "gemm", "key": [1, 576, 576, "float32"], "us": 41.0}],
 "sources": {"memory_bytes": "measured", ...}}
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_args

from graphshard.core.errors import SpecError
from graphshard.core.json_file import load_json_object
from graphshard.cost.hardware import HardwareKind, HardwareSpec, Link, Measured, MeasuredWhat
from graphshard.cost.published import PUBLISHED, hardware

FORMAT = "graphshard-hardware-1"


def hardware_json(spec: HardwareSpec) -> dict[str, Any]:
    """`spec` as plain data, in the order of its fields."""
    found: dict[str, Any] = {"format": FORMAT, **{one.name: getattr(spec, one.name) for one in fields(spec)}}
    found["links"] = [
        {"transport": link.transport, "bytes_per_s": link.bytes_per_s, "t0_us": link.t0_us} for link in spec.links
    ]
    found["derate"] = [list(entry) for entry in spec.derate]
    found["peak_flops"] = dict(spec.peak_flops)
    found["measured"] = [{"what": one.what, "key": list(one.key), "us": one.us} for one in spec.measured]
    found["sources"] = dict(spec.sources)
    return found


def save_hardware(spec: HardwareSpec, path: str | Path) -> None:
    """Write `spec` to `path`; `load_hardware` reads an equal one back."""
    Path(path).write_text(json.dumps(hardware_json(spec), indent=1) + "\n")


def named_hardware(name: str | Path) -> HardwareSpec:
    """A published machine, or the one that a file describes.

    Raises:
        SpecError: neither; lists the known names, the nearest first.
    """
    is_file = isinstance(name, Path) or Path(name).exists() or "/" in name or name.endswith(".json")
    if isinstance(name, str) and (name.lower() in PUBLISHED or not is_file):
        return hardware(name)
    return load_hardware(name)


def load_hardware(path: str | Path) -> HardwareSpec:
    """The machine that the file at `path` describes.

    Raises:
        SpecError: naming the file, the key, what was found there and what is expected.
    """
    return load_json_object(path, "hardware file", parse_hardware)


def parse_hardware(content: dict[str, Any]) -> HardwareSpec:
    """The machine of `content`, as `hardware_json` gives it; SpecError naming the key that is wrong."""
    known = {one.name: one for one in fields(HardwareSpec)}
    given = {name: value for name, value in content.items() if name != "format"}
    if content.get("format", FORMAT) != FORMAT:
        raise SpecError(f"format is {content['format']!r}; this version reads {FORMAT}")
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise SpecError(f"unknown keys {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [name for name, one in known.items() if one.default is MISSING and name not in given]
    if missing:
        raise SpecError(f"the keys {', '.join(missing)} are missing; `graphshard calibrate` writes all of them")
    values = {name: _PARSERS.get(name, _as_it_is)(name, value) for name, value in given.items()}
    return HardwareSpec(**values)


def _as_it_is(name: str, value: Any) -> Any:
    return value


def _kind(name: str, value: Any) -> Any:
    if value not in get_args(HardwareKind):
        raise SpecError(f"{name} is {value!r}; known are {', '.join(get_args(HardwareKind))}")
    return value


def _links(name: str, value: Any) -> tuple[Link, ...]:
    return tuple(
        Link(
            str(_field(name, one, "transport")),
            _number(f"{name}.bytes_per_s", _field(name, one, "bytes_per_s")),
            _number(f"{name}.t0_us", _field(name, one, "t0_us")),
        )
        for one in _list(name, value)
    )


def _derate(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    found = []
    for one in _list(name, value):
        if not isinstance(one, list | tuple) or len(one) != 2:
            raise SpecError(f"{name} has the entry {one!r}; each is [chunk bytes, share]")
        found.append((int(_number(name, one[0])), _number(name, one[1])))
    return tuple(found)


def _rates(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict):
        raise SpecError(f"{name} is {value!r}; it maps dtypes to operations per second")
    return tuple((str(dtype), _number(f"{name}.{dtype}", rate)) for dtype, rate in value.items())


def _measured(name: str, value: Any) -> tuple[Measured, ...]:
    found = []
    for one in _list(name, value):
        what = _field(name, one, "what")
        if what not in get_args(MeasuredWhat):
            raise SpecError(f"{name} has an entry of {what!r}; known are {', '.join(get_args(MeasuredWhat))}")
        key = _list(f"{name}.key", _field(name, one, "key"))
        found.append(Measured(what, tuple(key), _number(f"{name}.us", _field(name, one, "us"))))
    return tuple(found)


def _sources(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict):
        raise SpecError(f"{name} is {value!r}; it maps keys of this file to where their numbers come from")
    return tuple(sorted((str(key), str(text)) for key, text in value.items()))


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise SpecError(f"{name} is {value!r}; it is a list")
    return list(value)


def _field(name: str, value: Any, field: str) -> Any:
    if not isinstance(value, dict) or field not in value:
        raise SpecError(f"{name} has the entry {value!r}, which lacks {field!r}")
    return value[field]


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SpecError(f"{name} is {value!r}; it is a number")
    return value


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "kind": _kind,
    "links": _links,
    "derate": _derate,
    "peak_flops": _rates,
    "measured": _measured,
    "sources": _sources,
}
