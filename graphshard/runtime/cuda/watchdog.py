"""A thread that looks after steps which the host does not wait for, where they need peers (CUDA under nccl).

A rank that launched a captured step may sit in `torch.cuda.synchronize()` while a peer is stuck, dead or elsewhere:
then nobody looks at the control pages. The watchdog does, whenever no call of the runtime holds its lock (a call that
waits looks itself). What it finds ends the group as it would in a wait: the failure is posted, the communicator is
aborted in the background, the next call raises it. It is logged too, since there may be no next call.

# Note [no driver calls]: it reads words in pinned memory, control pages and what the library says of the communicator.
Asking for a stream or an event would end another thread's capture, if that one is of the global mode.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref

from graphshard.comm.alignment import Awaited, Watched
from graphshard.core.errors import CommError
from graphshard.runtime.cuda.in_flight import InFlight

_JOIN_S = 5.0
"""The longest that closing waits for a look to end."""
_log = logging.getLogger("graphshard")


class Watchdog:
    """Runs until it is closed, dropped, or the interpreter exits."""

    def __init__(
        self, lock: threading.RLock, in_flight: InFlight, alignment: Watched, timeout_s: float, look_s: float
    ) -> None:
        """`lock` guards the other two. A step may run for `timeout_s` once it is the eldest. Looks every `look_s`."""
        self._watch = _Watch(lock, in_flight, alignment, timeout_s, look_s)
        thread = threading.Thread(target=self._watch.run, name="graphshard-watchdog", daemon=True)
        self._finalizer = weakref.finalize(self, _end, self._watch, thread)
        thread.start()

    @property
    def num_looks(self) -> int:
        """How often it has looked."""
        return self._watch.num_looks

    def close(self) -> None:
        """End the thread. Idempotent; the runtime's lock may be held: a look never waits for it."""
        self._finalizer()


class _Watch:
    """What the thread has: it must not keep the watchdog alive."""

    def __init__(
        self, lock: threading.RLock, in_flight: InFlight, alignment: Watched, timeout_s: float, look_s: float
    ) -> None:
        self._lock, self._in_flight, self._alignment = lock, in_flight, alignment
        self._timeout_s, self._look_s = timeout_s, look_s
        self.ended = threading.Event()
        self.num_looks = 0
        self._step = 0
        self._waited_s = 0.0
        self._looked_s = time.monotonic()

    def run(self) -> None:
        """Look until `ended`, or until something is found."""
        while not self.ended.wait(self._look_s):
            if not self._lock.acquire(blocking=False):
                continue
            try:
                self._look()
            except CommError as error:
                self._alignment.keep(error)
                _log.error("%s", error)
                return
            finally:
                self._lock.release()

    def _look(self) -> None:
        """CommError with what is wrong with the steps in flight."""
        now = time.monotonic()
        # a process that was stopped, or a lock that was held, is no time that a peer was waited for
        passed_s, self._looked_s = min(now - self._looked_s, 2 * self._look_s), now
        self.num_looks += 1
        self._in_flight.retire(self._alignment.wait)
        eldest = self._in_flight.eldest
        if eldest is not None:
            self._count(eldest, passed_s)
            self._alignment.look(eldest, is_late=self._waited_s > self._timeout_s)

    def _count(self, eldest: Awaited, passed_s: float) -> None:
        if eldest.step != self._step:
            self._step, self._waited_s = eldest.step, 0.0
        else:
            self._waited_s += passed_s


def _end(watch: _Watch, thread: threading.Thread) -> None:
    watch.ended.set()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
