"""Reading a JSON file of our own, with errors that name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from graphshard.core.errors import SpecError

Value = TypeVar("Value")


def load_json_object(path: str | Path, what: str, parse: Callable[[dict[str, Any]], Value]) -> Value:
    """What `parse` makes of the JSON object in the file at `path`, which errors call `what`.

    Raises:
        SpecError: naming the file: it cannot be read, is not JSON, holds no object, or what `parse` found wrong.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read the {what} {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"the {what} {path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise SpecError(f"the {what} {path} holds a {type(content).__name__}, not an object")
    try:
        return parse(content)
    except SpecError as error:
        raise SpecError(f"the {what} {path}: {error}") from None
