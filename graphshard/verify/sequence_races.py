"""R2 R3 R6 R9 where sequences issued in turn are shown to read wrong bytes: their one lowered list, and its races.

What goes wrong inside one replay is for `verify` to say. Streams of a replay are told apart by replay: what orders two
of them is the graph's own fork and join, not that a captured graph would use one stream twice.

# Note [short lists]
Nothing outside is ordered against a part of a replay: it is before the fork, after the join, or beside all of it. So
where `verify` finds no fault in a program, all that others can see of its list is, for each slot, what it finds there,
that it overwrites it, that it reads what it put there, and what it leaves. `short_list` is that, on compute alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from graphshard.core.lowering import NO_SLOT, ORIGIN, Compute, CopyRun, Lowered, LoweredOp
from graphshard.core.program import Program
from graphshard.core.sequence import Fold, PrefetchDiscard, PrefetchLaunch, Replay, SequenceOp, StepSequence
from graphshard.core.sequence_lowering import ENTRY_STEP, LoweredSequence, Source, lower_sequences
from graphshard.verify.history import Stay, history_of
from graphshard.verify.order import Order
from graphshard.verify.races import ENTRY_OP, Access, Content, Race, find_races
from graphshard.verify.report import Violation, op_text
from graphshard.verify.sequence_history import SequenceHistory, is_waited, sequence_history
from graphshard.verify.sequence_rules import sequence_op_text


def sequence_races(
    sequences: Sequence[StepSequence], num_copies: int, lists: Mapping[str, Lowered] | None = None
) -> Iterator[Violation]:
    """What can go wrong on a slot when `sequences` are issued one after another; a violation's `step` is its place.

    `lists` are the graphs' own; where there is none it is the program's, lowered.
    """
    judge = _Judge(sequences, num_copies, lists)
    for race in judge.races:
        violation = judge.violation_of(race)
        if violation is not None:
            yield violation


def short_list(program: Program, num_copies: int) -> Lowered:
    """What others can see of `program`'s list, if it has no fault: see Note [short lists]."""
    stays: dict[int, list[Stay]] = {}
    for stay in history_of(program).stays:
        stays.setdefault(stay.slot, []).append(stay)
    ops: list[LoweredOp] = []
    for slot, all_of_slot in stays.items():
        first_read = next((stay for stay in all_of_slot if stay.reads and stay.launch is not None), None)
        ends = (all_of_slot[0], all_of_slot[-1])
        for stay in all_of_slot:
            if stay is not first_read and stay not in ends:
                continue
            if stay.launch is not None:
                ops.append(CopyRun(stay.unit, slot, 0, num_copies, ORIGIN, stay.launch))
            if stay.reads:
                ops.append(Compute(0, 0, ((stay.unit, slot),), ORIGIN, stay.reads[0]))
    return Lowered(tuple(ops), (ORIGIN,), 0, 0)


def split_streams(made: LoweredSequence) -> Lowered:
    """The list with streams of its own for each replay."""
    ops = []
    for op in made.lowered.ops:
        source = made.source(op)
        is_own = source.program_op is not None and op.stream != ORIGIN
        ops.append(replace(op, stream=f"{op.stream}@{source.step}.{source.op}") if is_own else op)
    return replace(made.lowered, ops=tuple(ops), streams=tuple(dict.fromkeys((ORIGIN, *(op.stream for op in ops)))))


class _Judge:
    """Sequences as one list, its races, and the names of what they touch."""

    def __init__(self, sequences: Sequence[StepSequence], num_copies: int, lists: Mapping[str, Lowered] | None) -> None:
        self.sequences = sequences
        self.graphs = {graph.name: graph for graph in sequences[0].graphs}
        self.made = lower_sequences(sequences, num_copies, lists)
        lowered = split_streams(self.made)
        self.races = find_races((lowered,), Order((lowered,)), self.made.entry, {}, num_copies)

    @cached_property
    def histories(self) -> list[SequenceHistory]:
        """Each sequence in issue order."""
        return [sequence_history(sequence) for sequence in self.sequences]

    def violation_of(self, race: Race) -> Violation | None:
        """The one violation that `race` is; None if it lies inside one replay."""
        if race.write is not None and self.is_one_replay(race.read, race.write):
            return None
        if race.kind == "partial":
            return None  # the copies of a gather from outside are issued at once
        if race.kind == "absent":
            return self.absent(race)
        if race.kind == "early":
            return self.early(race)
        assert race.write is not None
        if race.kind == "overwrite":
            text = f"{self.op(race.write)} overwrites {self.what(race.read, race.slot)}, still read by "
            text += f"{self.op(race.read)}{self.before(race.read, race.write)}; {self.hint(race.slot)}"
        else:
            text = f"{self.op(race.write)} may run before {self.op(race.read)}{self.before(race.read, race.write)} has "
            text += f"filled slot {self.slot(race.read, race.slot)}; {self.hint(race.slot, 'order the two gathers')}"
        return self.violation(6, race.write, race.read, race.slot, text)

    def absent(self, race: Race) -> Violation | None:
        """A replay or a fold whose unit is not where it looks."""
        read, source = race.read, self.source(race.read)
        if source.program_op is not None and not self.is_expected(source, read, race.slot):
            return None
        reads = f"{self.op(read)} reads {self.what(read, race.slot)}"
        found = "nothing" if race.held is None else self.content(race.held)
        if isinstance(self.step_op(source), Fold):
            where = "lies in no slot" if race.slot == NO_SLOT else f"is overwritten by then: the slot holds {found}"
            return self.violation(2, read, read, race.slot, f"{reads}, which {where}; keep its weights resident")
        if race.lost is not None and race.write is not None and self.is_lost(race.lost, race.write, read):
            text = f"{self.op(race.write)} overwrites {self.what(read, race.slot)} before {self.op(read)} has read it"
            return self.violation(6, race.write, read, race.slot, f"{text}; {self.hint(race.slot)}")
        if self.is_promised(source, read, race.slot):
            text = f"{reads}, expected at entry, but what comes before leaves {found} there"
            return replace(self.violation(9, read, read, race.slot, text), op=None)
        text = f"{reads}, but that holds {found}; gather it from outside before, and wait for it"
        return self.violation(2, read, read, race.slot, text)

    def early(self, race: Race) -> Violation:
        """A replay that does not wait for a gather, or a gather of the same unit that does not wait for the replay."""
        assert race.write is not None
        read, write = race.read, race.write
        if self.was_ready(self.source(write)):
            text = f"{self.op(write)} overwrites {self.what(read, race.slot)}, which {self.op(read)} is still to read"
            return self.violation(6, write, read, race.slot, f"{text}; launch it after that replay")
        text = f"{self.op(read)} reads {self.what(read, race.slot)}, but no prefetch_wait on compute is ordered before "
        text += f"(gathered by {self.op(write)}{self.before(write, read)})"
        return self.violation(3, read, read, race.slot, text)

    def violation(self, rule: int, at: Access, read: Access, slot: int, text: str) -> Violation:
        """A violation of `rule` by the op of `at`, about what `read` reads."""
        source = self.source(at)
        op = None if source.step == ENTRY_STEP else source.op
        local = None if slot == NO_SLOT else self.slot(read, slot)
        return Violation(rule, op, self.unit(read), local, text, wrong_bytes=True, step=max(source.step, 0))

    def source(self, access: Access) -> Source:
        """Where `access` comes from."""
        return self.made.sources[access.op]

    def unit(self, access: Access) -> int:
        """The unit as its graph numbers it."""
        return access.unit - self.made.units[self.source(access).graph]

    def slot(self, access: Access, slot: int) -> int:
        """The slot as its graph numbers it."""
        return slot - self.made.slots[self.graphs[self.source(access).graph].slot_space]

    def what(self, access: Access, slot: int) -> str:
        """`unit 0 of draft in slot 1`."""
        where = "" if slot == NO_SLOT else f" in slot {self.slot(access, slot)}"
        return f"unit {self.unit(access)} of {self.source(access).graph}{where}"

    def op(self, access: Access) -> str:
        """`op 1 replay graph=draft (its op 4 gemm layer=0 segment=proj)`."""
        source = self.source(access)
        if source.step == ENTRY_STEP:
            return "the gather in flight at entry"
        text = sequence_op_text(self.sequences[source.step], source.op)
        if source.program_op is None:
            return text
        return f"{text} (its {op_text(self.graphs[source.graph].program, source.program_op)})"

    def before(self, earlier: Access, later: Access) -> str:
        """Says so where `earlier` is an op of a sequence before."""
        steps = self.source(earlier).step, self.source(later).step
        return " of the sequence before" if ENTRY_STEP < steps[0] < steps[1] else ""

    def content(self, content: Content) -> str:
        """`unit 2 of target`."""
        if content.unit == self.made.nothing:
            return "nothing, as it was discarded"
        units = self.made.units
        graph = [name for name, first in units.items() if first <= content.unit][-1]
        return f"unit {content.unit - units[graph]} of {graph}"

    def hint(self, slot: int, otherwise: str = "launch it after that replay") -> str:
        """What to do about a write that comes too early."""
        spaces = [graph.slot_space for graph in self.graphs.values()]
        space = [name for name, first in self.made.slots.items() if first <= slot][-1]
        is_shared = spaces.count(space) > 1
        return f"graphs share the slots of {space}: give each graph slots of its own" if is_shared else otherwise

    def is_one_replay(self, first: Access, second: Access) -> bool:
        """Whether both are inside the same replay."""
        sources = self.source(first), self.source(second)
        is_inside = all(source.program_op is not None for source in sources)
        return is_inside and (sources[0].step, sources[0].op) == (sources[1].step, sources[1].op)

    def is_expected(self, source: Source, read: Access, slot: int) -> bool:
        """Whether the graph of `source` expects at its entry what `read` reads."""
        entry = self.graphs[source.graph].program.entry
        return slot != NO_SLOT and entry[self.slot(read, slot)] == self.unit(read)

    def is_lost(self, content: Content, write: Access, read: Access) -> bool:
        """Whether `write` overwrites `content` before its one use, or overwrites what another graph relies on."""
        source = self.source(write)
        if isinstance(self.step_op(source), PrefetchDiscard):
            return False
        is_outside = content.op == ENTRY_OP or self.made.sources[content.op].program_op is None
        return source.graph != self.source(read).graph or (is_outside and not content.reads)

    def step_op(self, source: Source) -> SequenceOp | None:
        """The sequence's op that `source` is; None if it was in flight before."""
        return None if source.step == ENTRY_STEP else self.sequences[source.step].ops[source.op]

    def is_promised(self, source: Source, read: Access, slot: int) -> bool:
        """Whether the sequence of `source`, not the first, relies on its entry for `read`."""
        sequence = self.sequences[source.step]
        place = (source.graph, self.unit(read), self.slot(read, slot))
        for op in sequence.ops[: source.op]:
            if op.graph == source.graph and isinstance(op, Replay | PrefetchLaunch):
                return False
        return source.step > 0 and any(item.place == place for item in sequence.entry)

    def was_ready(self, source: Source) -> bool:
        """Whether `source`, a gather from outside, was launched over the same unit, waited for and not yet read."""
        if source.step == ENTRY_STEP:
            return False
        sequence, stays = self.sequences[source.step], self.histories[source.step].stays
        overwritten = (stay for stay in stays if stay.again is not None and stay.again.op == source.op)
        return any(is_waited(stay, sequence) and not stay.reads for stay in overwritten)
