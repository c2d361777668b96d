"""Captures may not meet, in one process, on whatever streams: one at a time.

The driver calls it error 902 where it notices; torch does not notice at all. Ranks that are threads wait for each
other's captures, and what a capture records is made under the same lock. A capture inside a capture is refused before
it comes here (`compute.refuse_inside_segment`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from graphshard.core.errors import DeviceError

_lock = threading.Lock()


@contextmanager
def capture_lock(what: str, timeout_s: float) -> Iterator[None]:
    """Hold the process's one capture while the block runs; `what` is captured, as errors say.

    Raises:
        DeviceError: another capture did not end within `timeout_s`.
    """
    if not _lock.acquire(timeout=timeout_s):
        raise DeviceError(
            f"{what} cannot be captured: another thread's capture did not end within {timeout_s:.1f} s; "
            "captures of one process may not overlap"
        )
    try:
        yield
    finally:
        _lock.release()
