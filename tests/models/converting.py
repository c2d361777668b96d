"""What a process of the lock test runs; imports no torch, so it starts at once."""

from __future__ import annotations

import os
from pathlib import Path

from graphshard.models import smollm2


def prepare_and_mark(source: Path, cache: Path, marks: Path) -> None:
    """Prepare the model from `source`; leave a file in `marks` for each conversion this process did itself."""
    convert = smollm2._convert

    def marked(source: Path, folder: Path, progress: bool) -> None:
        (marks / str(os.getpid())).touch()
        convert(source, folder, progress)

    smollm2._find_gguf = lambda: source
    smollm2._convert = marked
    smollm2.prepare_smollm2(cache, progress=False)
