"""A thread that looks at something again and again while a block runs."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

Self = TypeVar("Self", bound="Sampler")


class Sampler(ABC):
    """A context manager: `take` is called at both ends, and between them at the multiples of `interval_s`.

    Multiples are of the machine's monotonic clock, so processes that sample at once do it at the same times.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="graphshard-samples", daemon=True)

    @abstractmethod
    def take(self) -> None:
        """Look once. Never called by two threads at a time."""

    def __enter__(self: Self) -> Self:
        self.take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.take()

    def _sample(self) -> None:
        while not self._ended.wait(self._interval_s - time.monotonic() % self._interval_s):
            self.take()
