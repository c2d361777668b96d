"""Which slot each residency stays in.

Residencies are numbered in the order of their gathers. Number i's gather is issued at position i - depth (right before
residency i - depth is waited for), and its slot is free again at the first position after its last reader's gate. Slots
are a colouring of these intervals; with a tail they are arcs of a cycle, since the next step's gathers follow.

# Note [colouring a cycle]
Arcs of L = depth + 1 positions on a cycle of M = q L + r need L + ceil(r / q) colours: cut the cycle into q blocks of
at least L and number each block from 0. `i mod k` is wrong wherever k does not divide M: at the wrap a gather would
overwrite a unit that is still read. Residencies that overlap (a segment reads two units) lengthen L by the overlap.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import ne

from graphshard.core.errors import SpecError
from graphshard.core.plan import HeadPolicy

_MAX_ROTATIONS = 64


@dataclass(frozen=True, slots=True)
class IssueOrder:
    """How gathers are issued: `depth` positions ahead, cyclically if `tail`; `num_held` are held at entry.

    `reach[i]` is the last position at which residency i is still unread or being read.
    """

    depth: int
    tail: bool
    num_held: int
    reach: tuple[int, ...]

    @property
    def arc_length(self) -> int:
        """Positions that the longest residency takes, from its gather to its gate: depth + 1 without overlaps."""
        return self.depth + 1 + max((last - index for index, last in enumerate(self.reach)), default=0)

    @property
    def overlaps(self) -> bool:
        """Whether a residency is still read when the next one is waited for."""
        return any(map(ne, self.reach, range(len(self.reach))))


def issue_order(spans: Sequence[tuple[int, int]], prefetch_depth: int, head: HeadPolicy) -> IssueOrder:
    """The order for residencies over segments `[begin, end)`, sorted by begin.

    A tail cannot run further ahead than the gate of the residency that it replaces: its depth is cut to that, and at
    depth 0 it is the same as `inside`.
    """
    begins = [begin for begin, _ in spans]
    reach = tuple(bisect_left(begins, end) - 1 for _, end in spans)
    if head == "outside":
        return IssueOrder(prefetch_depth, False, min(max(prefetch_depth, 1), len(spans)), reach)
    if head == "inside":
        return IssueOrder(prefetch_depth, False, 0, reach)
    overlap = max((last - index for index, last in enumerate(reach)), default=0)
    depth = max(min(prefetch_depth, len(spans) - 1 - overlap), 0)
    return IssueOrder(depth, depth > 0, depth, reach)


def smallest_num_slots(order: IssueOrder) -> int:
    """The fewest slots that this order can do with."""
    if order.tail:
        blocks, rest = divmod(len(order.reach), order.arc_length)
        return order.arc_length + -(-rest // blocks)
    if not order.overlaps:
        return min(order.depth + 1, len(order.reach))
    taken: list[int] = []  # a heap of the positions up to which slots are taken
    peak = 0
    for index, reach in enumerate(order.reach):
        while taken and taken[0] < index - order.depth:
            heapq.heappop(taken)
        heapq.heappush(taken, reach)
        peak = max(peak, len(taken))
    return peak


def assign_slots(order: IssueOrder, sizes: Sequence[int], num_slots: int | None = None) -> tuple[int, ...]:
    """The slot of each residency, `sizes` being its unit's bytes. None: the fewest slots.

    With the fewest, slots are shared so that their bytes are few: units are put where they fit, and the extra slots of
    a cycle take the smallest units. With more, a gather takes the slot that was free first, so that it waits least.

    Raises:
        SpecError: too few slots; names the smallest number that works.
    """
    smallest = smallest_num_slots(order)
    if num_slots is None:
        num_slots = smallest
    if num_slots < smallest:
        head = ", head tail" if order.tail else ""
        raise SpecError(
            f"num_slots {num_slots} is too few for prefetch_depth {order.depth}{head} and {len(sizes)} residencies; "
            f"the smallest that works is {smallest}"
        )
    if order.tail:
        return _cycle_slots(order, sizes, num_slots)
    return _interval_slots(order, sizes, num_slots, fit=num_slots == smallest)


def _interval_slots(order: IssueOrder, sizes: Sequence[int], num_slots: int, fit: bool) -> tuple[int, ...]:
    """Colour intervals in the order of their gathers. Any free slot will do: take the best fit or the first freed."""
    if fit and not order.overlaps:
        return tuple(index % num_slots for index in range(len(sizes)))  # no more than one slot is free
    last = [-1] * num_slots  # the last position that each slot is taken for
    held = [0] * num_slots  # bytes of each slot so far
    slots = []
    for index, size in enumerate(sizes):
        position = max(index - order.depth, 0)
        free = [slot for slot in range(num_slots) if last[slot] < position]
        if len(free) == 1:
            slot = free[0]
        elif fit:
            slot = min(free, key=lambda s: (max(size - held[s], 0), held[s], s))
        else:
            slot = min(free, key=lambda s: (last[s], s))
        last[slot] = order.reach[index]
        held[slot] = max(held[slot], size)
        slots.append(slot)
    return tuple(slots)


def _cycle_slots(order: IssueOrder, sizes: Sequence[int], num_slots: int) -> tuple[int, ...]:
    """Colour a cycle with `num_slots` colours, at least the fewest: see Note [colouring a cycle]."""
    num, length = len(sizes), order.arc_length
    rest = num % length
    if num_slots == length:
        return tuple(index % length for index in range(num))
    extras = _extras(sizes, length, rest) if rest and num_slots == length + 1 else None
    if extras is not None:
        return _with_extras(num, length, extras)
    blocks = -(-num // num_slots)
    borders = [num * block // blocks for block in range(blocks + 1)]
    colours = [index for block in range(blocks) for index in range(borders[block + 1] - borders[block])]
    rotations = [tuple(colours[turn:] + colours[:turn]) for turn in range(min(num, _MAX_ROTATIONS))]
    return min(rotations, key=lambda rotation: slot_bytes(rotation, sizes))


def _extras(sizes: Sequence[int], length: int, rest: int) -> list[int] | None:
    """The `rest` smallest residencies that lie at least `length` apart on the cycle; None if they are not found."""
    taken: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], i)):
        if len(taken) == rest:
            break
        gaps = [abs(index - other) for other in taken]
        if all(length <= gap <= len(sizes) - length for gap in gaps):
            taken.append(index)
    return taken if len(taken) == rest else None


def _with_extras(num: int, length: int, extras: Sequence[int]) -> tuple[int, ...]:
    """Extras share the slot `length`; all others take 0 .. length - 1 in turn."""
    slots = [length] * num
    taken = set(extras)
    others = (index for index in range(num) if index not in taken)
    for turn, index in enumerate(others):
        slots[index] = turn % length
    return tuple(slots)


def slot_bytes(slots: Sequence[int], sizes: Sequence[int]) -> int:
    """Bytes of all slots, each as large as its largest unit."""
    largest: dict[int, int] = {}
    for slot, size in zip(slots, sizes, strict=True):
        largest[slot] = max(largest.get(slot, 0), size)
    return sum(largest.values())
