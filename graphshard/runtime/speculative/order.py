"""The order of a step's calls: who is due, and where a step begins and ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from graphshard.core.errors import ProgramError

if TYPE_CHECKING:
    from graphshard.runtime.speculative.step import SpeculativeStep

COMMIT, VERIFY = "commit()", "verify()"


class CallOrder:
    """`propose(0)`, ..., `propose(n - 1)`, or none of them; then `verify()`; then `commit()`."""

    def __init__(self, num_draft_replays: int) -> None:
        self._num_draft_replays = num_draft_replays
        self._open: SpeculativeStep | None = None
        self._is_verified = False
        self._lock = threading.Lock()
        self._running: tuple[str, threading.Thread] | None = None
        """The call that is being made, and who makes it."""
        self.num_proposed = 0
        """Draft replays of the step that is open."""
        self.has_outputs = False
        """Whether the target of the open step has run: else there is nothing to fold."""

    @property
    def due(self) -> str:
        """The call that comes next; before the first `propose` it may be `verify()` as well."""
        if self._is_verified:
            return COMMIT
        return propose(self.num_proposed) if self.num_proposed < self._num_draft_replays else VERIFY

    def begin(self, call: str, step: SpeculativeStep) -> None:
        """`call` of `step` is made, until `end`; whatever happens in it, the next one is due.

        Raises:
            ProgramError: another is due; or one is being made, by another thread or around this one.
        """
        with self._lock:
            if self._running is not None:
                other, thread = self._running
                raise ProgramError(
                    f"{call} of {step} was called while {other} (thread {thread.name}) is being made: one thread makes "
                    "the calls of a speculation's steps, each after the one before it has returned"
                )
            self._advance(call, step)
            self._running = call, threading.current_thread()

    def end(self) -> None:
        """The call that was begun is over, returned or raised."""
        self._running = None

    def _advance(self, call: str, step: SpeculativeStep) -> None:
        is_skip = call == VERIFY and self.num_proposed == 0 and not self._is_verified
        if (self._open is not None and self._open is not step) or (call != self.due and not is_skip):
            raise ProgramError(
                f"{call} of {step} is out of order: due is {self.due} of {self._open or step}; a step is propose(0), "
                "propose(1), ... or none of them, then verify(), then commit()"
            )
        self._open = step
        if call == COMMIT:
            self._open, self._is_verified, self.num_proposed = None, False, 0
        elif call == VERIFY:
            self._is_verified, self.has_outputs = True, False
        else:
            self.num_proposed += 1

    def check_closed(self, call: str) -> None:
        """ProgramError, on behalf of `call`, if a step is open."""
        if self._open is not None:
            raise ProgramError(f"{call}: {self._open} is open, and {self.due} is due; finish it first")


def propose(replay: int) -> str:
    """The name of the call."""
    return f"propose({replay})"
