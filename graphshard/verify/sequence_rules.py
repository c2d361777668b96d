"""The rules of a sequence itself, R1 R2 R3 R4 R7 R9 R12: one small function each, over its ops in issue order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from graphshard.core.sequence import (
    Fold,
    Held,
    Place,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SequenceOp,
    SlotState,
    StepSequence,
)
from graphshard.core.specs import ModelSpec
from graphshard.verify.report import Violation
from graphshard.verify.sequence_history import SequenceHistory, Stay, is_waited, sequence_history


@dataclass(frozen=True)
class SequenceFacts:
    """One sequence, and the models of its graphs, where they are known."""

    sequence: StepSequence
    wanted: frozenset[SlotState] = frozenset()
    """What some sequence expects at its entry and replays."""
    models: Mapping[str, ModelSpec] = field(default_factory=dict)

    @cached_property
    def history(self) -> SequenceHistory:
        """The sequence in issue order; only where R1 holds."""
        return sequence_history(self.sequence)

    def op(self, index: int) -> str:
        """`op 3 prefetch_launch graph=draft unit=0 slot=0`."""
        return sequence_op_text(self.sequence, index)


def sequence_op_text(sequence: StepSequence, index: int | None) -> str:
    """How errors name op `index`: its number, verb and fields but the stream; None: what its entry states."""
    if index is None:
        return "the sequence's entry"
    return f"op {index} " + " ".join(part for part in str(sequence.ops[index]).split() if "stream=" not in part)


def graphs_exist(facts: SequenceFacts) -> Iterator[Violation]:
    """R1: graphs have names of their own, ops and states name one, with units and slots that it has, a slot once."""
    graphs = facts.sequence.graphs
    names = [graph.name for graph in graphs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Violation(1, None, None, None, f"{names.count(name)} graphs are called {name}: give each its own name")
    by_name = {graph.name: graph for graph in graphs}
    for index, op in enumerate(facts.sequence.ops):
        yield from _exists(by_name, index, f"op {index} {op}", op)
    for name, states in (("entry", facts.sequence.entry), ("exit", facts.sequence.exit)):
        seen: set[tuple[str, int]] = set()
        for item in states:
            yield from _exists(by_name, None, f"{name} {item}", item)
            key = (by_name[item.graph].slot_space if item.graph in by_name else "", item.slot)
            if key in seen:
                text = f"{name} states two units of slot {item.slot} of {key[0]}, the second by `{item}`"
                yield Violation(1, None, item.unit, item.slot, text)
            seen.add(key)


def _exists(
    graphs: Mapping[str, SequenceGraph], index: int | None, where: str, op: SequenceOp | SlotState
) -> Iterator[Violation]:
    graph = graphs.get(op.graph)
    if graph is None:
        known = ", ".join(graphs) or "none"
        yield Violation(1, index, None, None, f"{where}: there is no graph {op.graph}; known are {known}")
        return
    program = graph.program
    units = op.units if isinstance(op, Fold) else (op.unit,) if hasattr(op, "unit") else ()
    missing = [f"unit {unit}" for unit in units if not 0 <= unit < program.num_units]
    slot = op.slot if isinstance(op, PrefetchLaunch | PrefetchWait | Held) else None
    if slot is not None and not 0 <= slot < program.num_slots:
        missing.append(f"slot {slot}")
    if missing:
        text = f"{where}: {op.graph} has no {' and no '.join(missing)}; units are 0 to {program.num_units - 1}"
        yield Violation(1, index, None, slot, f"{text}, slots 0 to {program.num_slots - 1}")


def graphs_run_on_compute(facts: SequenceFacts) -> Iterator[Violation]:
    """R1: graphs, folds and discards are issued on one stream, which orders them."""
    for index, op in enumerate(facts.sequence.ops):
        if isinstance(op, Replay | Fold | PrefetchDiscard) and op.stream != "compute":
            text = f"{facts.op(index)} is issued on {op.stream}: graphs and folds follow each other on compute"
            yield Violation(1, index, None, None, text)


def entries_are_there(facts: SequenceFacts) -> Iterator[Violation]:
    """R2: what a graph expects at its entry has been gathered, or was left there."""
    for gap in facts.history.missing:
        text = f"{facts.op(gap.op)} expects unit {gap.unit} in slot {gap.slot}, which holds {holds(gap.held)}"
        text += "; gather it from outside before, and wait for it"
        yield Violation(2, gap.op, gap.unit, gap.slot, text)


def holds(stay: Stay | None) -> str:
    """What a slot holds, in words."""
    return "nothing to rely on" if stay is None else f"unit {stay.unit} of {stay.graph}"


def gathered_once(facts: SequenceFacts) -> Iterator[Violation]:
    """R2: a unit is gathered once for each replay that expects it, and waited for only where it was gathered."""
    sequence = facts.sequence
    for stay in facts.history.stays:
        if stay.again is not None and stay.again.launch is not None and not stay.reads:
            op = stay.again.op
            where = f"{facts.op(op)} gathers unit {stay.unit} again" if op is not None else "entry states it twice"
            text = f"{where}, before a replay of {stay.graph} has used what {_came(facts, stay)}"
            yield Violation(2, op, stay.unit, stay.slot, text)
    for index in facts.history.stray_waits:
        wait = sequence.ops[index]
        assert isinstance(wait, PrefetchWait)
        later = [i for i in range(index, len(sequence.ops)) if _launches(sequence.ops[i]) == wait.place]
        hint = f"; op {later[0]} launches it later" if later else ""
        text = f"{facts.op(index)}: no gather of unit {wait.unit} into slot {wait.slot} is in flight there{hint}"
        yield Violation(2, index, wait.unit, wait.slot, text)


def _launches(op: SequenceOp) -> Place | None:
    return op.place if isinstance(op, PrefetchLaunch) else None


def _came(facts: SequenceFacts, stay: Stay) -> str:
    """Where a stay came from: `op 3 prefetch_launch ... gathered`, or `the entry states`."""
    if stay.op is None:
        return "the entry states"
    return f"op {stay.op} " + ("gathered" if stay.launch is not None else "left")


def folds_read_no_slot(facts: SequenceFacts) -> Iterator[Violation]:
    """R2: a fold reads for all layers at once, and slots hold a layer's weights or two."""
    for index, op in enumerate(facts.sequence.ops):
        for unit in op.units if isinstance(op, Fold) else ():
            text = f"{facts.op(index)} names unit {unit}, which lies in a slot for one layer alone; a fold reads for "
            yield Violation(2, index, unit, None, text + "all layers at once: keep its weights resident")


def waited_before_use(facts: SequenceFacts) -> Iterator[Violation]:
    """R3: compute waits for a gather from outside before the replay that reads it, outside of the graph."""
    for stay in facts.history.stays:
        if stay.is_held or not stay.reads:
            continue
        read = stay.reads[0]
        waits = [wait for wait in stay.waits if facts.sequence.ops[wait].stream == "compute"]
        if not waits or waits[0] > read:
            text = f"{facts.op(read)} reads unit {stay.unit} in slot {stay.slot}, but compute has not waited for it"
            yield Violation(
                3, read, stay.unit, stay.slot, f"{text} ({_came(facts, stay)} it){_hint(facts, stay, read)}"
            )


def _hint(facts: SequenceFacts, stay: Stay, read: int) -> str:
    """Which prefetch_wait was meant, if there is one."""
    for index, op in enumerate(facts.sequence.ops):
        if isinstance(op, PrefetchWait) and op.place == stay.place:
            return f"; its prefetch_wait is op {index} on {op.stream}"
    return f"; issue prefetch_wait before op {read}"


def one_wait(facts: SequenceFacts) -> Iterator[Violation]:
    """R4: a stream waits once for a gather; for what is held nobody waits again."""
    for stay in facts.history.stays:
        first: dict[str, int] = {}
        for index in stay.waits:
            stream = facts.sequence.ops[index].stream
            if stay.is_held or stream in first:
                has_waited = f"op {first[stream]} has waited" if stream in first else "it is held already"
                text = f"{facts.op(index)} waits on {stream} again; {has_waited}. Drop it"
                yield Violation(4, index, stay.unit, stay.slot, text)
            first.setdefault(stream, index)


def spaces_are_apart(facts: SequenceFacts) -> Iterator[Violation]:
    """R7: graphs have slots of their own, as the next graph's gathers follow no gate of the last one."""
    owners: dict[str, list[str]] = {}
    for graph in facts.sequence.graphs:
        owners.setdefault(graph.slot_space, []).append(graph.name)
    for space, names in owners.items():
        if len(names) > 1:
            text = f"graphs {' and '.join(names)} share the slots of {space}: give each graph slots of its own"
            yield Violation(7, None, None, None, text)


def exit_is_true(facts: SequenceFacts) -> Iterator[Violation]:
    """R9: the stated exit is what the sequence leaves, and nothing in flight is left out of it."""
    stated, left = facts.sequence.exit, facts.history.left
    for item in stated:
        if item not in left:
            found = next((f", but `{other}`" for other in left if other.place == item.place), "")
            text = f"exit states `{item}`, which the sequence does not leave{found}"
            yield Violation(9, None, item.unit, item.slot, text)
    for item in left:
        if isinstance(item, PrefetchLaunch) and item not in stated:
            text = f"`{item}` is in flight at the end, but exit does not state it"
            yield Violation(9, None, item.unit, item.slot, text)


def folds_exist(facts: SequenceFacts) -> Iterator[Violation]:
    """R1: a fold is one of its model's, for graphs whose model is known; R11 of its weights is for `verify` to say."""
    for index, op in enumerate(facts.sequence.ops):
        if isinstance(op, Fold) and op.graph in facts.models:
            known = [fold.name for fold in facts.models[op.graph].folds]
            if op.segment not in known:
                text = f"{facts.op(index)}: the model of {op.graph} has no such fold; known are "
                yield Violation(1, index, None, None, text + (", ".join(known) or "none"))


def prefetched_is_used(facts: SequenceFacts) -> Iterator[Violation]:
    """R12: what is gathered from outside is read by a replay, here or in a sequence that expects it."""
    sequence, history = facts.sequence, facts.history
    for stay in history.stays:
        if stay.op is not None and stay.launch is None:
            continue  # a replay leaves what it leaves
        program = sequence.graph(stay.graph).program
        expects = stay.slot < len(program.entry) and program.entry[stay.slot] == stay.unit
        is_carried = stay.ended is None and (stay.launch is None or _state(facts, stay) in facts.wanted)
        is_dropped = stay.op is None and _is_discard(sequence, stay.ended)
        if expects and (stay.reads or is_carried or is_dropped or stay.again is not None):
            continue
        why = "is never used" if expects else "nothing there reads at its entry"
        where = "entry states" if stay.op is None else f"{facts.op(stay.op)} gathers"
        text = f"{where} unit {stay.unit} in slot {stay.slot} of {stay.graph}, which {why}"
        yield Violation(12, stay.op, stay.unit, stay.slot, text)


def _state(facts: SequenceFacts, stay: Stay) -> SlotState:
    assert stay.launch is not None
    return Held(*stay.place) if is_waited(stay, facts.sequence) else stay.launch


def _is_discard(sequence: StepSequence, index: int | None) -> bool:
    return index is not None and isinstance(sequence.ops[index], PrefetchDiscard)


SEQUENCE_RULES = (
    graphs_run_on_compute,
    folds_exist,
    entries_are_there,
    gathered_once,
    folds_read_no_slot,
    waited_before_use,
    one_wait,
    spaces_are_apart,
    exit_is_true,
    prefetched_is_used,
)
"""One small function each; all take `graphs_exist` for granted."""
