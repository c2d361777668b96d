"""R1, R11, R13 and R14 of tensor-parallel blocks: their parts in order, and slices read from the shard alone.

Why the order that R13 asks for is enough: Note [two barriers a block] in `core.lowering`. The exact judge of it is
`verify.rank_interpreter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

from graphshard.core.lowering import ActOp, Compute, act_ops
from graphshard.core.ops import BLOCK_PARTS, ActGather, Gemm, ReduceScatter
from graphshard.core.program import SlicedBlock, first_of_block
from graphshard.verify.facts import Facts
from graphshard.verify.report import Violation, op_text


def blocks_exist(facts: Facts) -> Iterator[Violation]:
    """R1 on the program: tensor-parallel blocks follow one another, and act ops name one of them."""
    program = facts.program
    end, numbers = 0, set(range(program.num_segments))
    for block in program.blocks:
        if not end <= block.begin < block.end <= program.num_segments:
            text = f"block {block} is not behind segment {end} and inside the {program.num_segments} segments"
            yield Violation(1, None, None, None, text)
        end = max(end, block.end)
        own = set(range(block.first, block.first + len(BLOCK_PARTS)))
        if numbers & own:
            yield Violation(1, None, None, None, f"block {block}: others have its segment numbers {sorted(own)}")
        numbers |= own
    known = [block.index for block in program.blocks]
    if len(set(known)) != len(known):
        yield Violation(1, None, None, None, f"blocks {known}: one is there twice")
    for index, op in enumerate(program.ops):
        if isinstance(op, ActGather | ReduceScatter) and op.block not in known:
            text = f"{op_text(program, index)}: that block is not tensor-parallel here; known are {known or 'none'}"
            yield Violation(1, index, None, None, text)


def blocks_are_the_models(facts: Facts) -> Iterator[Violation]:
    """R11: a block covers the segments that the model's block of that index covers, and its weights are sliced."""
    model, layout = facts.model, facts.layout
    sliced = {view.weight for unit in layout.units for view in unit.slices} if layout is not None else set()
    for block in facts.program.blocks:
        if model is None:
            continue
        if not 0 <= block.index < len(model.blocks):
            text = f"block {block}: {model.name} has {len(model.blocks)} blocks"
            yield Violation(11, None, None, None, text)
            continue
        spec = model.blocks[block.index]
        due = SlicedBlock(block.index, spec.begin, spec.end, first_of_block(model, block.index))
        if block != due:
            yield Violation(11, None, None, None, f"block {block} is not {spec.name}, which is {due}")
        whole = [name for name in spec.weights if name not in sliced]
        if layout is not None and whole:
            text = f"block {block.index} ({spec.name}) computes on slices, but the layout slices no {', '.join(whole)}"
            yield Violation(11, None, None, None, text)


def blocks_in_order(facts: Facts) -> Iterator[Violation]:
    """R13 on the program: prepare, act_gather, compute, reduce_scatter, finish; each once, all on compute."""
    program = facts.program
    places: dict[int, dict[str, list[int]]] = {block.index: {name: [] for name in _ORDER} for block in program.blocks}
    for index, block, name in _parts(facts):
        places[block][name].append(index)
        if program.ops[index].stream != "compute":
            text = f"{op_text(program, index)} is block {block}'s {name} on {program.ops[index].stream}"
            yield Violation(13, index, None, None, f"{text}: what ranks exchange is ordered by compute alone")
    for block, parts in places.items():
        yield from _order(facts, block, parts)


_ORDER = ("prepare", "act_gather", "compute", "reduce_scatter", "finish")


def _parts(facts: Facts) -> Iterator[tuple[int, int, str]]:
    """(op, block, part) of each op that is a part of a tensor-parallel block; a gemm may run several parts."""
    blocks = facts.program.blocks
    known = {block.index for block in blocks}
    numbers = {block.first + place: (block.index, part) for block in blocks for place, part in enumerate(BLOCK_PARTS)}
    for index, op in enumerate(facts.program.ops):
        if isinstance(op, ActGather | ReduceScatter):
            if op.block in known:
                yield index, op.block, "act_gather" if isinstance(op, ActGather) else "reduce_scatter"
        elif isinstance(op, Gemm) and numbers and op.end > facts.program.num_segments:
            for number in range(max(op.begin, min(numbers)), min(op.end, max(numbers) + 1)):
                if number in numbers:
                    yield index, *numbers[number]


def _order(facts: Facts, block: int, parts: Mapping[str, Sequence[int]]) -> Iterator[Violation]:
    """What is missing, doubled, or before what it needs. Gemms that are missing or doubled are R1's."""
    program = facts.program
    for name, reader in (("act_gather", "compute"), ("reduce_scatter", "finish")):
        if not parts[name]:
            first = parts[reader][0] if parts[reader] else None
            where = "the program" if first is None else op_text(program, first)
            text = f"{where} needs block {block}'s {name} before it, and there is none"
            yield Violation(13, first, None, None, text)
        for again in parts[name][1:]:
            text = f"{op_text(program, again)}: op {parts[name][0]} is block {block}'s {name} already"
            yield Violation(13, again, None, None, text)
    there = [(name, parts[name][0]) for name in _ORDER if parts[name]]
    for (before, first), (after, second) in pairwise(there):
        if second <= first:
            text = f"{op_text(program, second)} is block {block}'s {after}, but its {before} is op {first}"
            yield Violation(13, second, None, None, f"{text}; issue {', '.join(_ORDER)} in this order")


def slices_are_not_in_slots(facts: Facts) -> Iterator[Violation]:
    """R14: compute on slices reads this rank's shard; what a slot holds is a whole unit, of this step or another."""
    for index, block, part in _parts(facts):
        op = facts.program.ops[index]
        for unit in op.units if part == "compute" and isinstance(op, Gemm) else ():
            text = (
                f"{op_text(facts.program, index)} computes block {block} on slices, and reads unit {unit} from a slot"
            )
            yield Violation(14, index, unit, None, f"{text}: keep its weights resident")


def exchanges_match(facts: Facts) -> Iterator[Violation]:
    """R13 on the lowered list: each act op is its flags and copies, or its collective, in the program's order."""
    program, lowered = facts.program, facts.lowered
    if not program.blocks and not any(isinstance(op, ActOp) for op in lowered.ops):
        return
    due: list[ActOp | int] = []
    for index, op in enumerate(program.ops):
        if isinstance(op, ActGather | ReduceScatter):
            due += act_ops(op, index, is_collective=facts.num_copies == 1)
        elif isinstance(op, Gemm):
            due.append(index)
    made = [op.op if isinstance(op, Compute) else op for op in lowered.ops if isinstance(op, Compute | ActOp)]
    for wanted, found in zip_longest(due, made):
        if wanted != found:
            place = _op_of(wanted if found is None else found)
            is_op = 0 <= place < len(program.ops)
            where = op_text(program, place) if is_op else "the lowered list"
            text = f"{where}: the lowered list has {_text(found)} where {_text(wanted)} is due"
            yield Violation(13, place if is_op else None, None, None, text)
            return


def _op_of(item: ActOp | int | None) -> int:
    return -1 if item is None else item if isinstance(item, int) else item.op


def _text(item: ActOp | int | None) -> str:
    if item is None:
        return "nothing"
    return f"the compute of op {item}" if isinstance(item, int) else str(item)
