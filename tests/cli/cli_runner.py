"""Run the command line in this process (fast) or in one of its own (descriptors, exit codes, tracebacks)."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import fork_server
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


def apart(*arguments: object, timeout_s: float = 120.0, fork: bool = True) -> Answer:
    """In a process of its own. With `fork` False it and its ranks share nothing with other processes."""
    command = [sys.executable, "-m", "graphshard", *map(str, arguments)]
    process = (fork_server.start if fork else fork_server.start_by_exec)(command)
    try:
        out, err = process.communicate(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Answer(process.returncode, out.decode(), err.decode())
