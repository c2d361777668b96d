"""How far a load is, for everybody who waits for it: the caller, the other ranks, and who gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from graphshard.comm.group import Group
from graphshard.comm.pulses import PATIENCE
from graphshard.core.errors import CommError, LoadError

OnLoad = Callable[[int, int], None]
"""Told of the bytes that this rank has loaded so far, and of all that it is to load."""


class LoadWatch:
    """Counts the bytes that threads load, and is looked at a few times a second by the one that waits for them."""

    def __init__(self, group: Group, total_bytes: int, on_load: OnLoad | None) -> None:
        self._group, self._on_load = group, on_load
        self.total_bytes, self.num_bytes = total_bytes, 0
        self._lock = threading.Lock()
        self._last, self._grown = 0, time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Another `num_bytes` have come. Any thread."""
        with self._lock:
            self.num_bytes += num_bytes

    def look(self, progress: int) -> None:
        """Tell the caller; `progress` grows while anything happens.

        Raises:
            LoadError: nothing has happened for too long.
            CommError: another rank is gone or gave up, so that this load is for nothing.
        """
        now = time.monotonic()
        if progress != self._last:
            self._last, self._grown = progress, now
        limit_s = PATIENCE * self._group.timeout_s
        if now - self._grown > limit_s:
            raise LoadError(
                f"no byte came for {limit_s:.0f} s, after {self.num_bytes} of {self.total_bytes}: "
                "see whether the checkpoint's disk or server answers"
            )
        hopeless = self._group.why_hopeless("load")
        if hopeless is not None:
            raise CommError(hopeless)
        self.tell()

    def tell(self) -> None:
        """Tell the caller how far it is."""
        if self._on_load is not None:
            self._on_load(self.num_bytes, self.total_bytes)
