"""Signs of life during a step that may take long, so that ranks which wait for it go on waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from graphshard.comm.mesh import Call, Mesh

PATIENCE = 10
"""For how many limits a step may make no progress before its rank falls silent, and one more later is given up."""

_LONGEST_PAUSE_S = 5.0


class Pulses:
    """While entered, a thread tells the peers of a call that this rank works on it, as long as `progress` grows."""

    def __init__(self, mesh: Mesh, call: Call, progress: Callable[[], int], timeout_s: float) -> None:
        """`timeout_s`: for how long the peers wait for a sign."""
        self._mesh, self._call, self._progress, self._timeout_s = mesh, call, progress, timeout_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"graphshard {call.name}", daemon=True)

    def _run(self) -> None:
        last, grown = self._progress(), time.monotonic()
        while not self._ended.wait(min(self._timeout_s / 4, _LONGEST_PAUSE_S)):
            now = self._progress()
            if now != last:
                last, grown = now, time.monotonic()
            is_stuck = time.monotonic() - grown > PATIENCE * self._timeout_s
            if is_stuck or not self._mesh.say_busy(self._call):
                return

    def __enter__(self) -> Pulses:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
