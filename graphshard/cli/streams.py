"""Standard streams that take any text: what the terminal's encoding lacks is shown as `?`."""

from __future__ import annotations

import io
import sys


def forgive_encoding() -> None:
    """From now on printing a letter that the locale lacks is no error in this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
