"""A list of counts on the command line."""

from __future__ import annotations

from typing import Any

import click


class Counts(click.ParamType[list[int]]):
    """A list of counts: `1,16`."""

    name = "count,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        """The counts, each at least 1 and once; anything else is a usage error."""
        texts = value.split(",") if isinstance(value, str) else [str(one) for one in value]
        if not all(text.isdecimal() and int(text) >= 1 for text in texts):
            self.fail(f"{value!r} is not a list of whole numbers from 1 on, such as 1,16", param, ctx)
        return list(dict.fromkeys(int(text) for text in texts))
