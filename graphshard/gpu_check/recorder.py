"""Results that outlive their program: whatever a check has found is in its step's file before it goes on."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PASSED, FAILED, SKIPPED, RUNNING = "passed", "failed", "skipped", "running"
"""Of a row. One that still says `running` when its program has ended was cut short."""


class Skipped(Exception):
    """A check cannot be made here; says why."""


class Row:
    """What one check finds. A check that goes on after `require` keeps its later numbers too."""

    def __init__(self, recorder: Recorder, check: str) -> None:
        self._recorder = recorder
        self._began = time.perf_counter()
        self._failures: list[str] = []
        self.values: dict[str, Any] = {"check": check, "status": RUNNING}

    def add(self, **facts: Any) -> None:
        """Keep facts, JSON values; others of the same name are replaced."""
        self.values |= facts
        self._recorder.write()

    def append(self, name: str, fact: Any) -> None:
        """Keep one more of a list."""
        self.values.setdefault(name, []).append(fact)
        self._recorder.write()

    def require(self, holds: bool, what: str) -> None:
        """The check has failed unless `holds`; it goes on."""
        if not holds:
            self._failures.append(what)
            self.add(failures=self._failures)

    def skip(self, reason: str) -> NoReturn:
        """Leave the check."""
        raise Skipped(reason)

    def end(self, error: BaseException | None = None) -> None:
        """Say how the check ended."""
        seconds = round(time.perf_counter() - self._began, 3)
        if isinstance(error, Skipped):
            self.add(status=SKIPPED, reason=str(error), seconds=seconds)
        elif error is not None:
            text = "".join(traceback.format_exception(error))
            self.add(status=FAILED, reason=f"{type(error).__name__}: {error}", traceback=text, seconds=seconds)
        elif self._failures:
            self.add(status=FAILED, reason="; ".join(self._failures), seconds=seconds)
        else:
            self.add(status=PASSED, seconds=seconds)


class Recorder:
    """The file of one step: `{"step": ..., "rows": [...]}`, replaced as a whole at each change."""

    def __init__(self, path: Path, step: str) -> None:
        self._path = path
        self._step = step
        self._rows: list[Row] = []
        self.write()

    def run(self, check: str, function: Callable[[Row], None]) -> None:
        """Make one check. Whatever it raises ends it alone."""
        row = Row(self, check)
        self._rows.append(row)
        self.write()
        print(f"{self._step} {check} ...", flush=True)
        try:
            function(row)
        except Exception as error:
            row.end(error)
        else:
            row.end()
        values = row.values
        print(f"{self._step} {check}: {values['status']} {values.get('reason', '')}".rstrip(), flush=True)

    @property
    def has_failed(self) -> bool:
        """Whether a check has."""
        return any(row.values["status"] == FAILED for row in self._rows)

    def write(self) -> None:
        """Bring the file up to date."""
        text = json.dumps({"step": self._step, "rows": [row.values for row in self._rows]}, indent=1, default=str)
        beside = self._path.with_suffix(".new")
        beside.write_text(text + "\n")
        os.replace(beside, self._path)
