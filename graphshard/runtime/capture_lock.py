"""Captures may not meet, in one process, on whatever streams: one at a time, and never one inside another.

The driver calls it error 902 where it notices; torch does not notice at all. Ranks that are threads wait for
each other's captures; a capture inside a capture is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphshard.core.errors import DeviceError

_lock = threading.Lock()
_owner: int | None = None


@contextmanager
def capture_lock(what: str, timeout_s: float) -> Iterator[None]:
    """Hold the process's one capture while the block runs; `what` is captured, as errors say.

    Raises:
        DeviceError: this thread is capturing already, or another thread's capture did not end within `timeout_s`.
    """
    global _owner
    if _owner == threading.get_ident():
        raise DeviceError(f"{what} cannot be captured inside another capture: finish that one first")
    if not _lock.acquire(timeout=timeout_s):
        raise DeviceError(
            f"{what} cannot be captured: another thread's capture did not end within {timeout_s:.1f} s; "
            "captures of one process may not overlap"
        )
    try:
        _owner = threading.get_ident()
        yield
    finally:
        _owner = None
        _lock.release()
