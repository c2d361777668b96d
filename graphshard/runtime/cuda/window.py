"""The window in which a capture is open: one at a time in a process, and no garbage collection inside it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from graphshard.runtime.capture_lock import capture_lock


@contextmanager
def capture_window(what: str, timeout_s: float) -> Iterator[None]:
    """Hold the process's capture lock, with gc off, while `what` is captured by others than `OpList.capture`.

    A collection could run a finaliser that destroys an old graph or frees memory in the middle of the capture, and
    spoil it. Afterwards gc is on or off as it was, whatever happened inside; the lock is given back last, so that no
    other window sees a state that is not the user's.

    Raises:
        DeviceError: another capture did not end within `timeout_s`.
    """
    with capture_lock(what, timeout_s):
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
