"""One stable text for every noun, and its sha256: equal values give equal text in any process, and only they do.

    ModelSpec name=llama
      weights: 2
        WeightSpec name=embed shape=[8,4] dtype=float32 strides=none
        ...

A dataclass prints its plain fields on one line; its tuples of dataclasses, and single ones, follow, indented; those
that lie deeper in tuples print in place, as `Name(field=value)`. A field with the metadata
`OMIT_EMPTY` prints only if it is not empty: values without it keep the digests from before there was such a field.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields, is_dataclass
from typing import Final

_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/\-]*")
OMIT_EMPTY: Final = "omit_empty"
"""Key of a field's metadata, see above."""
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
_RESERVED = frozenset({"none", "true", "false"})


def name_text(name: str) -> str:
    """`name` itself if it is a plain word, else quoted as JSON: names with blanks stay one field."""
    return name if _PLAIN_NAME.fullmatch(name) and name not in _RESERVED else json.dumps(name)


def parse_name(text: str) -> str:
    """The name that `name_text` printed as `text`."""
    return str(json.loads(text)) if text.startswith('"') else text


def parse_fields(text: str, names: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, str]:
    """The `name=value` pairs of `text`: each of `names` once, in any order, and nothing else.

    Raises:
        ValueError: what was expected, in words.
    """
    pairs = _FIELD.findall(text)
    if _FIELD.sub("", text).strip():
        raise ValueError("expected name=value pairs")
    found = dict(pairs)
    if len(found) != len(pairs) or set(found) - set(optional) != set(names):
        raise ValueError(f"expected each of {', '.join(names)} once" if names else "expected no fields")
    return found


def text_of(value: object) -> str:
    """The text of a frozen dataclass of ints, names, and tuples of them; ends with a newline."""
    lines: list[str] = []
    _append(lines, "", value, 0)
    return "\n".join(lines) + "\n"


def digest_of(text: str) -> str:
    """The sha256 of `text`, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _append(lines: list[str], prefix: str, value: object, depth: int) -> None:
    """Append the lines of a dataclass at indentation `depth`, the first one starting with `prefix`."""
    assert is_dataclass(value), f"{value!r} is not a dataclass"
    head = [prefix + type(value).__name__]
    nested: list[tuple[str, tuple[object, ...]]] = []
    for field in fields(value):
        content = getattr(value, field.name)
        if not content and field.metadata.get(OMIT_EMPTY):
            continue
        if isinstance(content, tuple) and content and is_dataclass(content[0]):
            nested.append((field.name, content))
        elif is_dataclass(content):
            nested.append((field.name, (content,)))
        else:
            head.append(f"{field.name}={_field_text(content)}")
    lines.append("  " * depth + " ".join(head))
    for name, items in nested:
        lines.append("  " * (depth + 1) + f"{name}: {len(items)}")
        for item in items:
            _append(lines, "", item, depth + 2)


def _field_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return name_text(value)
    if is_dataclass(value):
        inside = ",".join(f"{field.name}={_field_text(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inside})"
    assert isinstance(value, tuple), f"{value!r} has no stable text"
    return "[" + ",".join(_field_text(item) for item in value) + "]"
