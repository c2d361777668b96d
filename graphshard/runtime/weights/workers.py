"""A few threads that do a list of tasks, while the calling thread looks at how far they are."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")

_LOOK_S = 0.1
_GRACE_S = 5.0
"""How long the others have to end after one task failed; one that is stuck in a read is left behind."""


class Stopped(Exception):
    """Raised by a task that found that it shall stop: no failure of its own."""


class Workers(Generic[Value]):
    """Runs tasks on daemon threads: one that hangs in the kernel does not keep the process from ending."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._stop = threading.Event()
        self._open: queue.SimpleQueue[tuple[int, Callable[[], Value]]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[int, Value | None, BaseException | None]] = queue.SimpleQueue()

    def check(self) -> None:
        """For tasks, between two pieces of work: Stopped if another one failed."""
        if self._stop.is_set():
            raise Stopped

    def run(
        self,
        tasks: Sequence[Callable[[], Value]],
        on_done: Callable[[int], None],
        on_look: Callable[[], None],
    ) -> list[Value]:
        """The tasks' results, in order.

        `on_done(index)` and, a few times a second, `on_look()` are called in this thread. The first failure, theirs
        included, stops all tasks and is raised.
        """
        for indexed in enumerate(tasks):
            self._open.put(indexed)
        count = min(self._num_threads, len(tasks))
        threads = [threading.Thread(target=self._work, name=f"graphshard load {i}", daemon=True) for i in range(count)]
        results: dict[int, Value] = {}
        looked = time.monotonic()
        try:
            for thread in threads:
                thread.start()
            while len(results) < len(tasks):
                self._collect(results, on_done)
                if time.monotonic() - looked >= _LOOK_S:
                    on_look()
                    looked = time.monotonic()
        finally:
            self._stop.set()
            deadline = time.monotonic() + _GRACE_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - time.monotonic()))
        return [results[index] for index in range(len(tasks))]

    def _collect(self, results: dict[int, Value], on_done: Callable[[int], None]) -> None:
        """What is done now or within a moment; raises the first failure."""
        try:
            index, value, error = self._done.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        if error is not None:
            raise error
        results[index] = value  # type: ignore[assignment]  # Value may be None itself
        on_done(index)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                index, task = self._open.get_nowait()
            except queue.Empty:
                return
            try:
                self._done.put((index, task(), None))
            except Stopped:
                return
            except BaseException as error:
                self._done.put((index, None, error))
                return
