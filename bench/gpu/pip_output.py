"""What pip says while it builds: which lines show progress, and which say what was wrong."""

from __future__ import annotations

import re
from collections.abc import Sequence

PROGRESS = re.compile(r"\s*(\[\d+/\d+\]|\*\*\* |Building wheel|Installing collected)")
"""Lines of pip that say how far the build is."""
COMPILER_ERROR = re.compile(r"(?<!\w)error:|CMake Error", re.IGNORECASE)


def error_of(lines: Sequence[str]) -> str:
    """What is wrong, of all that pip and the build have said: the last line that pip marks, and what the compiler says.

    All lines are in the log.
    """
    marked = [line.strip() for line in lines if line.lstrip().startswith("ERROR")]
    compiler = [line.strip() for line in lines if COMPILER_ERROR.search(line)]
    return "; ".join([*marked[-1:], *compiler[:1]]) or " ".join(lines[-3:]) or "it said nothing"
