"""Taking in a rank that came back: its window takes the place of the dead one's, between two steps.

Who dies holds nobody up, as a dead rank's window stays mapped; what a newcomer brings is the way to get rid of that
memory, and somebody who can be asked again how far he is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphshard._core import DriverError
from graphshard.comm.control import ControlTable
from graphshard.comm.doorkeeper import Doorkeeper
from graphshard.comm.transport import Remappable
from graphshard.core.errors import GraphshardError
from graphshard.runtime.slots import SlotTable


@dataclass(frozen=True)
class Admission:
    """What a runtime needs to take newcomers in. Used with the runtime's lock held, its streams drained."""

    doorkeeper: Doorkeeper | None
    """None: ranks are threads of one process, or there is one rank."""
    control: ControlTable
    windows: Remappable | None
    """None if the transport takes nobody in: then there is no doorkeeper either."""
    slots: SlotTable

    @property
    def has_news(self) -> bool:
        """Whether a rank came back. Asked at every step."""
        return self.doorkeeper is not None and self.doorkeeper.has_news

    def take_in(self, check: Callable[[int], None]) -> tuple[tuple[int, ...], list[Exception]]:
        """Map the windows of those who came back: who was taken in, and why others were not. Bind again after it.

        `check` gathers one rank's chunks and compares them with what it told.
        """
        assert self.doorkeeper is not None
        admitted: list[int] = []
        failures: list[Exception] = []
        for rank, record in self.doorkeeper.take().items():
            try:
                if record.window_fd is not None:
                    self._map(rank, record.window_fd, check)
                self.control.replace(rank, record.page, record.process)
                admitted.append(rank)
            except (GraphshardError, DriverError) as error:
                failures.append(error)
            finally:
                self.doorkeeper.settle(rank, is_accepted=rank in admitted)
        return tuple(admitted), failures

    def drop_retired(self) -> None:
        """All is bound to the windows as they are mapped now: give up the older mappings."""
        if self.windows is not None:
            self.windows.drop_retired()

    def renew(self, checksums: Sequence[Sequence[int]]) -> None:
        """The weights were updated: who comes back must have loaded chunks of these `checksums`, by rank and unit."""
        if self.doorkeeper is not None:
            self.doorkeeper.renew(checksums)

    def close(self) -> None:
        """Take nobody in any more."""
        if self.doorkeeper is not None:
            self.doorkeeper.close()

    def _map(self, rank: int, fd: int, check: Callable[[int], None]) -> None:
        assert self.windows is not None
        self.windows.remap(rank, fd)
        self.slots.rebind()
        try:
            check(rank)
        except BaseException:
            self.windows.undo_remap(rank)
            self.slots.rebind()
            raise
