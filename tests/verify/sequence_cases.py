"""Sequences for the verifier's tests: those that the scheduler emits for small programs, and changed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from verify_cases import DEVICE, model_of, program_of

from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SequenceOp,
    StepSequence,
)
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.schedule.sequence import emit_sequences

HEADS = ("inside", "outside", "tail", "replicated")
Sequences = dict[str, StepSequence]


def chain(num_units: int, head: str = "inside", depth: int = 1) -> Program:
    """A program of `num_units` layers of one unit each."""
    reads = [(unit,) for unit in range(num_units)]
    if head == "replicated":
        return emit(model_of(reads), make_plan(model_of(reads), 2, DEVICE, replicated=True))
    return program_of(reads, head=head, prefetch_depth=depth)


def usual(num_draft_replays: int = 1, num_units: int = 3, **options: str) -> Sequences:
    """A target that gathers inside, a draft whose first gather comes from outside."""
    target, draft = chain(num_units), chain(num_units, "outside")
    return emit_sequences(target, draft, num_draft_replays=num_draft_replays, **options)  # type: ignore[arg-type]


def changed(sequences: Sequences, name: str, **fields: object) -> Sequences:
    """`sequences` with fields of one of them replaced."""
    return {**sequences, name: replace(sequences[name], **fields)}  # type: ignore[arg-type]


def with_ops(sequences: Sequences, name: str, *ops: SequenceOp) -> Sequences:
    """`sequences` with other ops in one of them."""
    return changed(sequences, name, ops=ops)


def with_graphs(sequences: Sequences, *graphs: SequenceGraph) -> Sequences:
    """`sequences` over other graphs."""
    return {name: replace(sequence, graphs=graphs) for name, sequence in sequences.items()}


def sharing(sequences: Sequences) -> Sequences:
    """`sequences` whose graphs have one and the same slots."""
    graphs = next(iter(sequences.values())).graphs
    return with_graphs(sequences, *(replace(graph, space="shared") for graph in graphs))


@dataclass(frozen=True)
class SequenceMutant:
    """Changed ops. `rules` name its harm; with `by_definition` it is a fault whatever it does to bytes."""

    kind: str
    ops: tuple[SequenceOp, ...]
    rules: frozenset[int]
    by_definition: bool = False


def op_mutants(sequence: StepSequence) -> Iterator[SequenceMutant]:
    """Every change of one op of `sequence`: gone, twice, elsewhere, or with another field."""
    ops = sequence.ops
    for index, op in enumerate(ops):
        verb, rest = str(op).split()[0], ops[:index] + ops[index + 1 :]
        # without a gather the replay misses its unit, here (R2) or in the next sequence (R9)
        lacking = {3} if isinstance(op, PrefetchWait) else {2, 9}
        yield SequenceMutant(f"drop {verb}", rest, frozenset(lacking), isinstance(op, PrefetchLaunch | PrefetchWait))
        again = {PrefetchWait: {4}, PrefetchLaunch: {2}, Replay: {2}}.get(type(op), set())
        is_fault = isinstance(op, PrefetchWait | PrefetchLaunch)
        yield SequenceMutant(f"{verb} twice", ops[: index + 1] + ops[index:], frozenset(again), is_fault)
        for to in range(len(rest) + 1):
            if to != index:
                yield SequenceMutant(f"move {verb}", rest[:to] + (op,) + rest[to:], frozenset({2, 3, 6, 9}))
        for kind, other, rules, is_fault in _other_fields(op, sequence):
            yield SequenceMutant(kind, ops[:index] + (other,) + ops[index + 1 :], frozenset(rules), is_fault)


def _other_fields(op: SequenceOp, sequence: StepSequence) -> Iterator[tuple[str, SequenceOp, set[int], bool]]:
    program = sequence.graph(op.graph).program
    if isinstance(op, PrefetchLaunch | PrefetchWait):
        verb = "gather" if isinstance(op, PrefetchLaunch) else "wait for"
        for stream in ("compute", "copy", "prefetch"):
            if stream != op.stream:
                yield f"{verb} on {stream}", replace(op, stream=stream), {3, 9}, False
        for unit in range(program.num_units):
            if unit != op.unit:
                yield f"{verb} another unit", replace(op, unit=unit), {2, 3, 9}, True
        for slot in range(program.num_slots):
            if slot != op.slot:
                yield f"{verb} another slot", replace(op, slot=slot), {2, 3, 6, 9}, True
        for graph in sequence.graphs:
            if graph.name != op.graph and op.unit < graph.program.num_units and op.slot < graph.program.num_slots:
                yield f"{verb} another graph", replace(op, graph=graph.name), {2, 3, 6, 9}, True
    elif isinstance(op, Fold):
        for unit in range(program.num_units):
            yield "fold names a unit", replace(op, units=(unit,)), {2}, True
    for graph in sequence.graphs:
        yield "discard instead", PrefetchDiscard(graph.name), {2, 3, 9}, False
