"""Steps that the host launched and did not wait for: on CUDA a step returns when it is enqueued.

How far they are stands in a word in pinned memory, which the compute stream writes behind each step. Looking at it is
no driver call, so a watchdog may look while somebody captures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from graphshard._core import Driver, Memory, Stream, Word
from graphshard.comm.alignment import Awaited

MAX_STEPS = 2
"""A server prepares one step while another runs. More would only be found late if one does not end."""

Wait = Callable[[Callable[[float], bool], Awaited], bool]


class InFlight:
    """At most `MAX_STEPS` steps; before another one begins the host waits for the eldest, bounded."""

    def __init__(self, driver: Driver) -> None:
        self._ended = Word(Memory.allocate_host(driver, 4))
        """The number of the last step that has ended, modulo 2^32."""
        self._steps: deque[Awaited] = deque()

    def launched(self, compute: Stream, awaited: Awaited) -> None:
        """A step was enqueued on `compute`; `awaited` says which. They are numbered in the order of launches."""
        compute.write_value(self._ended.address, _modulo(awaited.step))
        self._steps.append(awaited)

    @property
    def eldest(self) -> Awaited | None:
        """The first step that nobody has waited for yet; it may have ended."""
        return self._steps[0] if self._steps else None

    def has_ended(self, awaited: Awaited) -> bool:
        """Whether that step has ended."""
        return self._ended.wait(_modulo(awaited.step), 0.0)

    def make_room(self, wait: Wait) -> Awaited | None:
        """Wait by `wait` until another step may be launched; the step that did not end in time, or None."""
        return self._wait_until_left(MAX_STEPS - 1, wait)

    def synchronize(self, wait: Wait) -> Awaited | None:
        """Wait by `wait` for all steps; the one that did not end in time, or None."""
        return self._wait_until_left(0, wait)

    def retire(self, wait: Wait) -> None:
        """Be done with the steps that have ended: `wait` returns at once for them."""
        while self._steps and self.has_ended(self._steps[0]):
            self._wait_until_left(len(self._steps) - 1, wait)

    def _wait_until_left(self, num_steps: int, wait: Wait) -> Awaited | None:
        while len(self._steps) > num_steps:
            eldest = self._steps[0]
            if not wait(partial(self._ended.wait, _modulo(eldest.step)), eldest):
                return eldest
            self._steps.popleft()
        return None


def _modulo(step: int) -> int:
    return step & 0xFFFFFFFF
