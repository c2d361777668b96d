"""Reading config.json: its values, and errors that name the file, the key and what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphshard.core.errors import SpecError


@dataclass(frozen=True)
class ConfigFile:
    """The JSON object of a config.json; `where` is what errors call it."""

    where: str
    values: Mapping[str, Any]

    def error(self, key: str, found: str) -> SpecError:
        """An error about `key`."""
        return SpecError(f"{self.where}: {key} {found}")

    def inner(self, key: str) -> ConfigFile:
        """The object under `key`."""
        value = self.values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, f"is {value!r}, not an object: give the config.json that came with the checkpoint")
        return ConfigFile(f"{self.where}: {key}", value)

    def count(self, key: str) -> int:
        """The whole number above 0 under `key`."""
        value = self.values.get(key)
        if value is None:
            raise self.error(key, "is missing: add it as the checkpoint's config.json has it")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"is {value!r}: it is a whole number that starts at 1")
        return value

    def counts(self, key: str) -> tuple[int, ...]:
        """The list of whole numbers under `key`."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
            raise self.error(key, f"is {value!r}: it is a list of whole numbers")
        return tuple(value)

    def number(self, key: str, default: float) -> float:
        """The number under `key`; `default` where there is none."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"is {value!r}: it is a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """The text under `key`; `default` where there is none."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"is {value!r}: it is a text")
        return default if value is None else value


def read_config_file(path: Path) -> ConfigFile:
    """The config in `path`, a model's folder or its config.json.

    Raises:
        SpecError: it cannot be read, or is not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"no model config: {file} cannot be read ({error.strerror}); give a model's folder") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{file} is not JSON ({error}): give a model's folder or its config.json") from None
    if not isinstance(values, dict):
        raise SpecError(f"{file} holds a {type(values).__name__}, not an object of settings: give a model's folder")
    return ConfigFile(str(file), values)
