"""What the rules look at: one program, its lowered list, and both read as two consecutive steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from graphshard.core.layout import Layout
from graphshard.core.lowering import Lowered, Record
from graphshard.core.ops import RecordGate
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec
from graphshard.verify.history import History, Stay, history_of
from graphshard.verify.order import Order
from graphshard.verify.races import ENTRY_OP, Content, Race, find_races


@dataclass(frozen=True)
class Facts:
    """A step of `program` and the one after it, of `next_program`, which may be the same."""

    program: Program
    lowered: Lowered
    next_program: Program
    next_lowered: Lowered
    num_copies: int
    layout: Layout | None = None
    model: ModelSpec | None = None
    wanted: frozenset[tuple[int, int]] = frozenset()
    """(slot, unit) that some program holds at entry and reads."""

    @cached_property
    def history(self) -> History:
        """The first program in issue order."""
        return history_of(self.program)

    @cached_property
    def order(self) -> Order:
        """Happens-before of both steps."""
        return Order((self.lowered, self.next_lowered))

    @cached_property
    def races(self) -> list[Race]:
        """Everything that can go wrong on a slot in these two steps."""
        refill = refill_of(self.program, self.next_program)
        return find_races((self.lowered, self.next_lowered), self.order, self.program.entry, refill, self.num_copies)

    def program_of(self, step: int) -> Program:
        """The program of step 0 or 1."""
        return self.next_program if step else self.program

    def stay_of(self, step: int, content: Content, slot: int) -> Stay | None:
        """The stay, in the program of `step`, that `content` is; None if its bytes came with an earlier step."""
        if content.step != step:
            return None
        history = self.history if step == 0 or self.next_program is self.program else history_of(self.next_program)
        launch = None if content.op == ENTRY_OP else content.op
        found = (s for s in history.stays if (s.slot, s.unit, s.launch) == (slot, content.unit, launch))
        return next(found, None)

    @cached_property
    def gate_nodes(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        """For each step, the node of the event that each record_gate records, by op index."""
        nodes: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for step, listed in enumerate((self.lowered, self.next_lowered)):
            ops = self.program_of(step).ops
            for index, op in enumerate(listed.ops):
                if isinstance(op, Record) and 0 <= op.op < len(ops) and isinstance(ops[op.op], RecordGate):
                    nodes[step][op.op] = self.order.node(step, index)
        return nodes


def refill_of(program: Program, following: Program) -> dict[int, int]:
    """Slot and unit that the host fills between two replays: gathers from outside, and priming where states differ.

    A program after itself is never primed: its tail has to bring what its head needs.
    """
    refill = {gather.slot: gather.unit for gather in following.outside}
    if following is not program and following != program:
        for slot, unit in enumerate(following.entry):
            if unit is not None and (slot >= len(program.exit) or program.exit[slot] != unit):
                refill[slot] = unit
    return refill
