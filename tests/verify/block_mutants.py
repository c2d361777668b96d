"""Mutations of programs with tensor-parallel blocks, and of their lists, each with the rules that name its harm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mutate import Mutant, _moved, _swapped, _without

from graphshard.core.lowering import ActCollective, ActCopies, ActOp, ActSum, Compute, FlagWait, FlagWrite, Lowered
from graphshard.core.ops import ActGather, Gemm, Op, ReduceScatter
from graphshard.core.program import Program


def block_program_mutants(program: Program) -> Iterator[Mutant]:
    """Every mutant of the ops of blocks: gone, doubled, elsewhere, of another block, on another stream."""
    for index, op in enumerate(program.ops):
        if isinstance(op, ActGather | ReduceScatter):
            yield from _exchange_mutants(program, index, op)
        elif isinstance(op, Gemm) and op.begin >= program.num_segments:
            yield from _part_mutants(program, index, op)
    for first in range(len(program.ops)):
        for second in range(first + 1, len(program.ops)):
            one, other = program.ops[first], program.ops[second]
            if isinstance(one, ActGather | ReduceScatter) and isinstance(other, ActGather | ReduceScatter):
                ops = list(program.ops)
                ops[first], ops[second] = other, one
                yield _of(program, "swap exchanges", tuple(ops), {13})
    for place in range(len(program.blocks)):
        changed = replace(program, blocks=program.blocks[:place] + program.blocks[place + 1 :])
        yield Mutant("a block is not stated", changed, frozenset({1}), by_definition=True)


def _of(program: Program, kind: str, ops: tuple[Op, ...], rules: set[int], by_definition: bool = False) -> Mutant:
    return Mutant(kind, replace(program, ops=ops), frozenset(rules), None, by_definition)


def _exchange_mutants(program: Program, index: int, op: ActGather | ReduceScatter) -> Iterator[Mutant]:
    ops, name = program.ops, "act_gather" if isinstance(op, ActGather) else "reduce_scatter"
    yield _of(program, f"drop {name}", _without(ops, index), {13})
    yield _of(program, f"{name} twice", ops[: index + 1] + ops[index:], {13}, by_definition=True)
    for to in range(index):
        yield _of(program, f"{name} earlier", _moved(ops, index, to), {13})
    for to in range(index + 1, len(ops)):
        yield _of(program, f"{name} later", _moved(ops, index, to), {13})
    for block in program.blocks:
        if block.index != op.block:
            changed = _swapped(ops, index, replace(op, block=block.index))
            yield _of(program, f"{name} of another block", changed, {13})
    other = ReduceScatter(op.block) if isinstance(op, ActGather) else ActGather(op.block)
    yield _of(program, f"another op for {name}", _swapped(ops, index, other), {13})
    changed = _swapped(ops, index, replace(op, stream="copy"))
    yield _of(program, f"{name} on copy", changed, {13}, by_definition=True)


def _part_mutants(program: Program, index: int, op: Gemm) -> Iterator[Mutant]:
    ops = program.ops
    part = next((part for block in program.blocks if (part := block.part_of(op.begin)) is not None), None)
    for to in range(index):
        yield _of(program, f"{part} earlier", _moved(ops, index, to), {13, 1})
    for to in range(index + 1, len(ops)):
        yield _of(program, f"{part} later", _moved(ops, index, to), {13, 1})
    yield _of(program, f"drop {part}", _without(ops, index), {1}, by_definition=True)
    if part == "compute":
        for unit in range(program.num_units):
            changed = _swapped(ops, index, replace(op, units=(*op.units, unit)))
            yield _of(program, "compute reads a slot", changed, {14}, by_definition=True)
    if part == "prepare":
        merged = replace(op, end=op.end + 1)
        changed = tuple(
            merged if place == index else one
            for place, one in enumerate(ops)
            if not (isinstance(one, Gemm) and one.begin == op.begin + 1)
        )
        yield _of(program, "prepare and compute in one", changed, {13}, by_definition=True)


def block_list_mutants(program: Program, lowered: Lowered) -> Iterator[Mutant]:
    """Every mutant of flags, copies and sums in the list of an unchanged program, and of the gemms around them."""
    ops = lowered.ops
    for index, op in enumerate(ops):
        is_part = isinstance(op, Compute) and op.begin >= program.num_segments
        if not isinstance(op, ActOp) and not is_part:
            continue
        name = _name(op)
        for to in [*range(index), *range(index + 1, len(ops))]:
            where = "earlier" if to < index else "later"
            yield _list(program, lowered, f"list: {name} {where}", _moved(ops, index, to), {13, 1})
        if isinstance(op, Compute):
            continue
        yield _list(program, lowered, f"list: drop {name}", _without(ops, index), {13})
        yield _list(program, lowered, f"list: {name} twice", ops[: index + 1] + ops[index:], {13})
        for block in program.blocks:
            if block.index != op.block:
                changed = _swapped(ops, index, replace(op, block=block.index))
                yield _list(program, lowered, f"list: {name} of another block", changed, {13})
        if isinstance(op, FlagWrite | FlagWait):
            barrier = "exit" if op.barrier == "entry" else "entry"
            changed = _swapped(ops, index, replace(op, barrier=barrier))
            yield _list(program, lowered, f"list: {name}, the other word", changed, {13})


def _list(program: Program, lowered: Lowered, kind: str, ops: tuple, rules: set[int]) -> Mutant:
    return Mutant(kind, program, frozenset(rules), replace(lowered, ops=ops))


def _name(op: object) -> str:
    if isinstance(op, FlagWrite):
        return f"{op.barrier} flag"
    if isinstance(op, FlagWait):
        return f"{op.barrier} wait"
    if isinstance(op, ActCopies):
        return f"copies of {op.what}"
    if isinstance(op, ActCollective):
        return op.kind
    return "sum" if isinstance(op, ActSum) else "a part's compute"
