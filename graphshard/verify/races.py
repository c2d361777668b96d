"""Races on slots: the copies and reads of two consecutive lists, judged with the happens-before of these lists alone.

# Note [why neighbours suffice]
Issue order is one possible execution, and every happens-before edge goes forward in it. So two steps are free of wrong
bytes exactly if (1) in issue order each read finds its unit whole, (2) each read is ordered against every copy into
its slot, and (3) a copy whose bytes are read is ordered after every earlier copy that it conflicts with (another unit,
or the same chunks). Contents of a slot are a chain: when every access of one content is ordered before the copies of
the next that is read, the order is transitive, and comparing neighbours proves it for all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphshard.core.lowering import Compute, CopyRun, Lowered
from graphshard.verify.order import Order

RaceKind = Literal["absent", "partial", "early", "overwrite", "clobber"]
ENTRY_OP = -2
"""The op index of bytes that a slot holds before its list begins: entry, priming, outside gathers."""


@dataclass(frozen=True, slots=True)
class Access:
    """A copy into a slot or a read of it, by op `op` of step `step`; `chunks` is a bit mask."""

    node: int
    step: int
    op: int
    is_write: bool
    unit: int
    chunks: int


@dataclass(slots=True)
class Content:
    """What one gather (or the entry) put into a slot, and the reads that find it there."""

    unit: int
    step: int
    op: int
    sources: dict[int, Access] = field(default_factory=dict)
    """The copy behind each whole chunk. Chunks of an earlier gather of the same unit stay until overwritten."""
    chunks: int = 0
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)

    def write(self, access: Access) -> None:
        """Add a copy."""
        self.chunks |= access.chunks
        self.writes.append(access)
        for chunk in range(access.chunks.bit_length()):
            if access.chunks >> chunk & 1:
                self.sources[chunk] = access


@dataclass(frozen=True, slots=True)
class Race:
    """A read or copy that can go wrong.

    absent     `read` finds another unit; `lost` is the last content it wanted, `write` begins what replaced that
    partial    `read` finds its unit with copies missing
    early      `write`, which `read` needs, may end after `read` begins
    overwrite  `write` may begin before `read` of an earlier content ends
    clobber    `write` may run before or beside `read`, here a copy of an earlier content
    """

    kind: RaceKind
    slot: int
    read: Access
    write: Access | None = None
    lost: Content | None = None
    held: Content | None = None


def find_races(
    lists: Sequence[Lowered], order: Order, entry: Sequence[int | None], refill: Mapping[int, int], num_copies: int
) -> list[Race]:
    """All races of `lists` run in turn: `entry` lies in the slots at first, `refill` is put there before the second."""
    whole = (1 << num_copies) - 1
    accesses: dict[int, list[Access]] = {}
    for slot, unit in enumerate(entry):
        if unit is not None:
            accesses.setdefault(slot, []).append(Access(order.begin(0), 0, ENTRY_OP, True, unit, whole))
    for step, listed in enumerate(lists):
        if step == 1:
            for slot, unit in refill.items():
                accesses.setdefault(slot, []).append(Access(order.begin(1), 1, ENTRY_OP, True, unit, whole))
        for index, op in enumerate(listed.ops):
            if isinstance(op, CopyRun):
                chunks = (1 << op.end) - (1 << op.begin)
                access = Access(order.node(step, index), step, op.op, True, op.unit, chunks)
                accesses.setdefault(op.slot, []).append(access)
            elif isinstance(op, Compute):
                for unit, slot in op.reads:
                    access = Access(order.node(step, index), step, op.op, False, unit, whole)
                    accesses.setdefault(slot, []).append(access)
    races: list[Race] = []
    for slot in sorted(accesses):
        contents: list[Content] = []
        races += _fill(slot, accesses[slot], contents, num_copies)
        races += _disorder(slot, contents, order)
    return races


def _fill(slot: int, accesses: Sequence[Access], contents: list[Content], num_copies: int) -> Iterator[Race]:
    """Group `accesses` into `contents`, in issue order; a read that does not find its unit whole is a race."""
    for access in accesses:
        held = contents[-1] if contents else None
        if access.is_write:
            key = (access.unit, access.step, access.op)
            if held is None or (held.unit, held.step, held.op) != key or held.chunks & access.chunks or held.reads:
                kept = dict(held.sources) if held is not None and held.unit == access.unit else {}
                held = Content(*key, kept)
                contents.append(held)
            held.write(access)
        elif held is None or held.unit != access.unit:
            places = [place for place, content in enumerate(contents) if content.unit == access.unit]
            if places:
                lost, after = contents[places[-1]], contents[places[-1] + 1]
                yield Race("absent", slot, access, after.writes[0], lost, held)
            else:
                yield Race("absent", slot, access, held=held)
        elif len(held.sources) != num_copies:
            yield Race("partial", slot, access, held=held)
        else:
            held.reads.append(access)


def _disorder(slot: int, contents: Sequence[Content], order: Order) -> Iterator[Race]:
    """Pairs of accesses that events do not order; see Note [why neighbours suffice]."""
    before: Content | None = None  # the last content that is read
    unread: list[Content] = []
    for content in contents:
        for write in content.writes:
            for read in reversed(before.reads if before is not None else []):
                if not order.before(read.node, write.node):
                    yield Race("overwrite", slot, read, write, before, content)
        if not content.reads:
            unread.append(content)
            continue
        sources = {access.node: access for access in content.sources.values()}
        for source in sources.values():
            for lost in unread:
                for copy in lost.writes:
                    if _conflict(copy, source) and not order.before(copy.node, source.node):
                        yield Race("clobber", slot, copy, source, lost, content)
            for read in content.reads:
                if not order.before(source.node, read.node):
                    yield Race("early", slot, read, source, held=content)
        before, unread = content, []


def _conflict(copy: Access, later: Access) -> bool:
    """Whether `copy`, issued before `later`, writes bytes that `later` writes too."""
    return copy.node < later.node and (copy.unit != later.unit or bool(copy.chunks & later.chunks))
