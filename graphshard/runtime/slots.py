"""What the slots hold between steps, and the gathers that the host issues from outside.

A program states what its slots must hold when it begins. Before each run and replay the table is compared with that
statement, and what differs is gathered from outside: the first step, another step shape, a step after an error. Under a
collective transport all ranks gather alike from outside too, since they make the same calls: what a slot holds follows
from the calls alone, also where compute failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphshard._core import Calls, Event, OpList, Stream
from graphshard.core.ops import AgLaunch
from graphshard.core.program import Program
from graphshard.runtime.bind import Ground, bind_gathers


class SlotTable:
    """Which unit each slot holds, as far as is known on the host, in the order in which work was enqueued."""

    def __init__(self, num_slots: int, ground: Ground, before_gathers: Callable[[Sequence[int]], None]) -> None:
        """`before_gathers(units)` is called before gathers of `units` are issued from here."""
        self._before_gathers = before_gathers
        self._held: list[int | None] = [None] * num_slots
        self._ground = ground
        self._compute, self._prefetch = ground.streams["compute"], ground.streams["prefetch"]
        self._last_use, self._arrived = Event(ground.driver), Event(ground.driver)
        self._gathers: dict[AgLaunch, OpList] = {}
        self._no_calls = Calls([])
        self._used = False
        self._in_flight = False
        self.num_primes = 0
        """Gathers issued from outside so far (the head policy `outside` counts one a step)."""

    @property
    def held(self) -> tuple[int | None, ...]:
        """Slot by slot, the unit it holds; None where nothing can be relied on."""
        return tuple(self._held)

    def forget(self) -> None:
        """After an error, or while a step runs: nothing can be relied on."""
        self._held = [None] * len(self._held)

    def discard(self) -> None:
        """Gathers on their way have ended, or will never be relied on: nothing can be, and nobody waits for them."""
        self.forget()
        self._in_flight = False

    @property
    def is_in_flight(self) -> bool:
        """Whether gathers were issued from outside that no program waits for yet."""
        return self._in_flight

    def hold(self, program: Program) -> bool:
        """Whether the slots hold, or are being filled with, all that `program` expects."""
        return all(unit is None or self._held[slot] == unit for slot, unit in enumerate(program.entry))

    def rebind(self) -> None:
        """A window was remapped: the addresses of gathers, and what they brought, are worth nothing."""
        self._gathers.clear()
        self.forget()

    def enter(self, program: Program) -> None:
        """Make the slots hold what `program` expects: `compute` waits for gathers in flight and for those still due."""
        self.prefetch(program)
        if self._in_flight:
            self._compute.wait(self._arrived)
            self._in_flight = False

    def prefetch(self, program: Program, follow: Callable[[Stream], None] | None = None) -> None:
        """Begin to gather what `program` expects and the slots do not hold; see `gather`."""
        due = [
            AgLaunch(unit, slot, "prefetch")
            for slot, unit in enumerate(program.entry)
            if unit is not None and self._held[slot] != unit
        ]
        self.gather(due, follow)

    def leave(self, program: Program) -> None:
        """`program` was enqueued on `compute`: when it ends, the slots hold what it says."""
        self._held = list(program.exit)
        self._compute.record(self._last_use)
        self._used = True

    def gather(self, launches: list[AgLaunch], follow: Callable[[Stream], None] | None = None) -> None:
        """Gather on the prefetch stream; the next `enter` makes `compute` wait for it.

        Order:   after the last program enqueued, beside whatever else `compute` does; and after what `follow` makes
                 the stream wait for.
        Blocks:  the prefetch stream only.
        """
        if not launches:
            return
        self._before_gathers([launch.unit for launch in launches])
        if self._used:
            self._prefetch.wait(self._last_use)
        if follow is not None:
            follow(self._prefetch)
        for launch in launches:
            if launch not in self._gathers:
                self._gathers[launch] = bind_gathers([launch], self._ground)
            self._gathers[launch].issue(self._no_calls)
            self._held[launch.slot] = launch.unit
            self.num_primes += 1
        self._prefetch.record(self._arrived)
        self._in_flight = True
