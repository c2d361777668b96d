"""Captures may not meet, in one process, on whatever streams: one at a time.

The driver calls it error 902 where it notices; torch does not notice at all. What a host capture records is made under
the same lock as the captures themselves. Ranks that are threads wait for each other's. A capture inside a capture is
refused before it comes here (`compute.refuse_inside_segment`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from graphshard._core import CaptureLock, DriverError
from graphshard.core.errors import DeviceError


@contextmanager
def capture_lock(what: str, timeout_s: float) -> Iterator[None]:
    """Hold the process's one capture while the block runs; `what` is captured, as errors say.

    `OpList.capture` takes the lock itself: not inside this.

    Raises:
        DeviceError: another capture did not end within `timeout_s`.
    """
    lock = CaptureLock(timeout_s)
    try:
        lock.__enter__()
    except DriverError as error:
        raise DeviceError(f"{what} cannot be captured: {error}") from error
    try:
        yield
    finally:
        lock.__exit__(None, None, None)
