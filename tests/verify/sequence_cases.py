"""Sequences for the verifier's tests: those that the scheduler emits for small programs, and changed ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from verify_cases import DEVICE, model_of, program_of

from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
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


def op_mutants(sequence: StepSequence) -> Iterator[tuple[SequenceOp, ...]]:
    """Every change of one op of `sequence`: gone, twice, elsewhere, or with another field."""
    ops = sequence.ops
    for index, op in enumerate(ops):
        rest = ops[:index] + ops[index + 1 :]
        yield rest
        yield ops[: index + 1] + ops[index:]
        for to in range(len(rest) + 1):
            if to != index:
                yield rest[:to] + (op,) + rest[to:]
        for other in _other_fields(op, sequence):
            yield ops[:index] + (other,) + ops[index + 1 :]


def _other_fields(op: SequenceOp, sequence: StepSequence) -> Iterator[SequenceOp]:
    program = sequence.graph(op.graph).program
    if isinstance(op, PrefetchLaunch | PrefetchWait):
        for stream in ("compute", "copy", "prefetch"):
            yield replace(op, stream=stream)
        yield from (replace(op, unit=unit) for unit in range(program.num_units) if unit != op.unit)
        yield from (replace(op, slot=slot) for slot in range(program.num_slots) if slot != op.slot)
        for graph in sequence.graphs:
            if graph.name != op.graph and op.unit < graph.program.num_units and op.slot < graph.program.num_slots:
                yield replace(op, graph=graph.name)
    elif isinstance(op, Fold):
        yield from (replace(op, units=(unit,)) for unit in range(program.num_units))
    for graph in sequence.graphs:
        yield PrefetchDiscard(graph.name)
