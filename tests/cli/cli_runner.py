"""Run the command line in this process (fast) or in one of its own (descriptors, exit codes, tracebacks)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from graphshard.cli import cli


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


def here(*arguments: object) -> Answer:
    """In this process. Click's own runner: it must not swallow what we would not."""
    result = CliRunner(catch_exceptions=False).invoke(cli, [str(argument) for argument in arguments])
    return Answer(result.exit_code, result.stdout, result.stderr)


def apart(*arguments: object, timeout_s: float = 120.0) -> Answer:
    """In a process of its own."""
    command = [sys.executable, "-m", "graphshard", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    return Answer(done.returncode, done.stdout, done.stderr)
