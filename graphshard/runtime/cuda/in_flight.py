"""Steps that the host launched and did not wait for: on CUDA a step returns when it is enqueued."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from graphshard._core import Driver, Event, Stream
from graphshard.comm.alignment import Awaited

MAX_STEPS = 2
"""A server prepares one step while another runs. More would only be found late if one does not end."""

Wait = Callable[[Callable[[float], bool], Awaited], bool]


class InFlight:
    """At most `MAX_STEPS` steps; before another one begins the host waits for the eldest, bounded."""

    def __init__(self, driver: Driver) -> None:
        self._events = deque(Event(driver) for _ in range(MAX_STEPS))
        self._steps: deque[tuple[Event, Awaited]] = deque()

    def launched(self, compute: Stream, awaited: Awaited) -> None:
        """A step was enqueued on `compute`; `awaited` says which."""
        event = self._events.popleft()
        compute.record(event)
        self._steps.append((event, awaited))

    def make_room(self, wait: Wait) -> Awaited | None:
        """Wait by `wait` until another step may be launched; the step that did not end in time, or None."""
        while len(self._steps) == MAX_STEPS:
            event, awaited = self._steps[0]
            if not wait(event.synchronize, awaited):
                return awaited
            self._events.append(self._steps.popleft()[0])
        return None
