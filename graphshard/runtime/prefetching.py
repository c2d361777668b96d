"""Gathers between steps: what the next step expects in its slots, gathered beside whatever comes next, or given up."""

from __future__ import annotations

from graphshard.comm.alignment import Awaited
from graphshard.core.specs import StepShape
from graphshard.runtime.compute import refuse_inside_segment
from graphshard.runtime.update.updating import Updating


class Prefetching(Updating):
    """The base of `Runtime` that gathers between steps."""

    def prefetch(self, batch_size: int, tokens_per_sequence: int = 1) -> None:
        """Gather what the next step of this shape expects in its slots, now, on a stream of its own.

        Under a collective transport all ranks call it alike, as they do steps: which gathers are due follows from the
        calls made before, so equal calls make equal gathers.

        Order:   after the last step, and on `cuda` after what the caller's current stream has, such as another
                 runtime's step; beside whatever comes next on other streams. The next step waits for it.
        Blocks:  no; under a collective transport while captured gathers of this runtime still run, bounded (one
                 communicator serves both kinds).
        Capture: no: it is the part of a step that lies outside its graph.
        """
        refuse_inside_segment("prefetch")
        shape = self._known(StepShape(batch_size, tokens_per_sequence))
        with self.turn.lock:
            self._check_ready()
            self.turn.wait_until_free()
            self._check_generations(shape)
            self._alignment.check("a prefetch")
            with self._handing_over(), self._telling_peers("a prefetch"):
                self._slots.prefetch(self.programs[shape], self.follow_caller)
            if self._embedding is not None:
                self._embedding.hand_over_prefetch()

    def has_prefetched(self, batch_size: int, tokens_per_sequence: int = 1) -> bool:
        """Whether slots hold, or are being filled with, all that a step of this shape expects when it begins.

        Then its next run gathers nothing from outside. True also of a step that expects nothing (head `inside`).
        """
        shape = self._known(StepShape(batch_size, tokens_per_sequence))
        with self.turn.lock:
            self.check_open()
            is_anybodys = self._embedding is not None and self._embedding.has_news
            return not is_anybodys and self._slots.hold(self.programs[shape])

    def discard_prefetch(self) -> None:
        """Wait for gathers that are on their way between steps, and rely on nothing that slots hold.

        The next step, or prefetch, gathers what it expects anew. Under a collective transport all ranks call it alike.

        Order:   after the last prefetch; other streams go on.
        Blocks:  the host, bounded by the runtime's timeout.
        Capture: no.

        Raises:
            CommError: the gathers did not end in time, or a peer that they need gave up or died.
            ProgramError: a step of this thread is open, or the runtime is closed.
        """
        refuse_inside_segment("discard_prefetch")
        with self.turn.lock:
            self._check_ready()
            self.turn.wait_until_free()
            self._alignment.check("discarding a prefetch")
            try:
                with self._handing_over():
                    self._wait_for_prefetch()
            finally:
                self._slots.discard()

    def _wait_for_prefetch(self) -> None:
        if not self._slots.is_in_flight:
            return
        awaited = Awaited(f"a prefetch after step {self._num_steps}, to discard it", self._num_steps, str)
        if not self._alignment.wait(self._streams["prefetch"].synchronize, awaited):
            raise self.late_error(awaited.what, "")
