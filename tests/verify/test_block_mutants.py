"""Blocks over two and three ranks: no good program is flagged or does harm; every harmful mutant is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
from block_cases import DECODE, PREFILL, block_model, block_plan, block_program, judged
from block_mutants import block_list_mutants, block_program_mutants
from mutate import Mutant

from graphshard.core.layout import build_layout
from graphshard.core.lowering import ActCopies, ActSum, Compute, FlagWait, FlagWrite, LoweredOp, lower
from graphshard.core.ops import BLOCK_PARTS, ActGather, AgLaunch, Gemm, ReduceScatter
from graphshard.core.plan import Mode
from graphshard.core.program import Program
from graphshard.core.sequence import StepSequence
from graphshard.core.sequence_lowering import lower_sequences
from graphshard.core.specs import StepShape
from graphshard.schedule.emit import emit_all
from graphshard.schedule.sequence import emit_sequences
from graphshard.verify import compare_ranks, verify, verify_sequences

SLICED: Mode = "tensor_parallel"
COPIES = {"flags": None, "collectives": 1}
HARMLESS = {
    "list: a part's compute earlier",
    "list: copies of tokens twice",
    "list: copies of partial twice",
    "list: sum twice",
    "list: all_gather twice",
    "list: reduce_scatter twice",
}
"""Against a rule, and without harm where all ranks do it."""


@pytest.mark.parametrize("head", ["inside", "tail", "outside"])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("norms", [False, True])
def test_programs_of_unlike_modes_fit_one_set_of_slots(head: str, depth: int, norms: bool) -> None:
    model = block_model(3, norms=norms)
    shapes = [StepShape(1 + number) for number in range(8)]
    modes = dict(zip(shapes, product(("gather", SLICED), repeat=3), strict=True))
    plan = block_plan(model, modes, head=head, prefetch_depth=depth)
    programs = emit_all(model, plan)
    assert len({program.digest for program in programs.values()}) == 8
    report = verify(programs, build_layout(model, plan), model=model)
    assert report.is_good and report.num_programs == 8, report.text()


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_every_pair_of_programs_ends_with_the_right_bytes_on_all_ranks(how: str, num_ranks: int) -> None:
    model = block_model(2)
    modes: dict[StepShape, tuple[Mode, ...]] = {
        DECODE: (SLICED, SLICED),
        StepShape(2): ("gather", SLICED),
        PREFILL: ("gather", "gather"),
    }
    programs = emit_all(model, block_plan(model, modes, world_size=num_ranks))
    for first, second in product(programs.values(), repeat=2):
        outcome = judged([first, second], num_ranks, num_copies=COPIES[how])
        assert not outcome.is_harmful, f"{outcome}\n{first.text()}{second.text()}"


class Score:
    """Counts of one run: by kind, mutants and harmful ones; what the right rule has missed."""

    def __init__(self, num_ranks: int, how: str) -> None:
        self.num_ranks, self.num_copies = num_ranks, COPIES[how] or num_ranks
        self.counts: Counter[str] = Counter()
        self.harmful: Counter[str] = Counter()
        self.missed: list[str] = []
        self.flagged = 0

    def add(self, mutant: Mutant) -> None:
        """Judge one that all ranks have; wrong bytes and standstills are for the exact judge to say."""
        program, listed = mutant.program, mutant.lowered or lower(mutant.program, self.num_copies)
        report = verify(program, num_copies=self.num_copies, lowered={program: listed})
        outcome = judged([program] * 2, self.num_ranks, lists=[listed] * 2, num_copies=self.num_copies)
        self.counts[mutant.kind] += 1
        self.flagged += not report.is_good
        if outcome.is_harmful or mutant.by_definition:
            self.harmful[mutant.kind] += 1
            if not mutant.rules & report.rules:
                self.missed.append(f"{mutant.kind}: {report.text()}\n{outcome}\n{program.text()}{listed.text()}")

    def assert_complete(self, what: str, capsys: pytest.CaptureFixture[str]) -> None:
        with capsys.disabled():
            print(
                f"\n{what}, {self.num_ranks} ranks: {self.counts.total()}, harmful {self.harmful.total()}, all of them "
                f"caught by the right rule; flagged {self.flagged}"
            )
        assert not self.missed, f"{len(self.missed)} missed, the first: {self.missed[0]}"
        idle = {kind for kind in self.counts if not self.harmful[kind]}
        assert idle <= HARMLESS, f"kinds that never did harm: {sorted(idle - HARMLESS)}"


@pytest.mark.parametrize("how", COPIES)
def test_every_harmful_program_mutant_is_named(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    score = Score(2, how)
    for mutant in block_program_mutants(block_program(block_model(2), (SLICED, SLICED))):
        score.add(mutant)
    score.assert_complete(f"mutants of blocks, {how}", capsys)


@pytest.mark.parametrize("how", COPIES)
def test_every_harmful_list_mutant_is_named(how: str, capsys: pytest.CaptureFixture[str]) -> None:
    program = block_program(block_model(2, attention=False), (SLICED, SLICED))
    score = Score(2, how)
    for mutant in block_list_mutants(program, lower(program, score.num_copies)):
        score.add(mutant)
    score.assert_complete(f"mutants of blocks' lists, {how}", capsys)


def test_three_ranks_find_no_more_than_two(capsys: pytest.CaptureFixture[str]) -> None:
    program = block_program(block_model(2, attention=False), (SLICED, SLICED), world_size=3)
    score = Score(3, "flags")
    for mutant in block_program_mutants(program):
        score.add(mutant)
    score.assert_complete("mutants of blocks", capsys)


def test_a_rank_that_does_something_else_is_named() -> None:
    model = block_model(2, attention=False)
    plan = block_plan(model, {DECODE: (SLICED, SLICED), PREFILL: ("gather", SLICED)})
    good, other = emit_all(model, plan).values()
    outcome = judged([good, good], rank_1=[other, other])
    assert outcome.deadlock is not None, outcome
    (violation,) = compare_ranks([good, other]).violations
    assert violation.rule == 10 and "act_gather block=0" in violation.text
    number = 0
    for mutant in block_program_mutants(good):
        outcome = judged([good, good], rank_1=[mutant.program] * 2)
        if outcome.is_harmful:
            rules = compare_ranks([good, mutant.program]).rules | verify(mutant.program).rules
            assert rules & (mutant.rules | {10}), f"{mutant.kind}: {outcome}\n{mutant.program.text()}"
            number += 1
    assert number > 50, number


def test_tokens_are_not_overwritten_before_all_have_read_them() -> None:
    """With the exit barrier before the copies, a fast rank prepares again while a slow one copies the last tokens."""
    program = block_program(block_model(2, attention=False), (SLICED, SLICED))
    listed = lower(program, 2)
    finish = {block.first + BLOCK_PARTS.index("finish") for block in program.blocks}
    kept: list[LoweredOp] = []
    for op in listed.ops:
        if _is_of_partial(op) or (isinstance(op, Compute) and op.begin in finish):
            continue
        if isinstance(op, FlagWrite | FlagWait) and op.barrier == "exit":
            copies = next(i for i, one in enumerate(kept) if isinstance(one, ActCopies) and one.block == op.block)
            kept.insert(copies, op)
        else:
            kept.append(op)
    changed = replace(listed, ops=tuple(kept))
    outcome = judged([program, program], lists=[changed, changed])
    assert outcome.wrong is not None and "tp.tokens" in outcome.wrong, outcome
    assert 13 in verify(program, lowered={program: changed}).rules


def _is_of_partial(op: object) -> bool:
    return isinstance(op, ActSum) or (isinstance(op, ActCopies) and op.what == "partial")


def test_violations_say_what_to_do() -> None:
    good = block_program(block_model(1, attention=False), (SLICED,))
    ops = good.ops
    gather = next(i for i, op in enumerate(ops) if isinstance(op, ActGather))
    scatter = next(i for i, op in enumerate(ops) if isinstance(op, ReduceScatter))
    without = verify(replace(good, ops=ops[:gather] + ops[gather + 1 :])).text()
    assert "R13 block-in-order" in without and "needs block 0's act_gather before it" in without
    late = list(ops)
    late[scatter], late[scatter + 1] = late[scatter + 1], late[scatter]
    text = verify(replace(good, ops=tuple(late))).text()
    assert "is block 0's finish, but its reduce_scatter is op 4" in text and "in this order" in text
    compute = ops[scatter - 1]
    assert isinstance(compute, Gemm)
    reading = replace(good, ops=(*ops[: scatter - 1], replace(compute, units=(0,)), *ops[scatter:]))
    assert "R14 slices-in-shard" in verify(reading).text()


def test_blocks_that_are_not_the_models_are_named() -> None:
    model = block_model(2)
    plan = block_plan(model, {DECODE: (SLICED, SLICED)})
    (good,) = emit_all(model, plan).values()
    layout = build_layout(model, plan)
    first = good.blocks[0]
    for changed, text in [
        (replace(first, index=7), "has 2 blocks"),
        (replace(first, begin=0), "is not layers.0.mlp"),
        (replace(first, first=5), "others have its segment numbers"),
    ]:
        report = verify(replace(good, blocks=(changed, good.blocks[1])), layout, model=model)
        assert text in report.text(), report.text()
    flat = build_layout(model, replace(plan, units=tuple(replace(unit, is_sliced=False) for unit in plan.units)))
    assert "the layout slices no layers.0.gate" in verify(good, flat, model=model).text()


def test_text_is_read_back() -> None:
    program = block_program(block_model(2, norms=True), (SLICED, "gather"))
    assert Program.parse(program.text()) == program
    assert "block    index=0 begin=1 end=3 first=6" in program.text()


@pytest.mark.parametrize("modes", [(SLICED, SLICED), ("gather", SLICED)])
@pytest.mark.parametrize("is_draft", [False, True])
def test_a_speculative_step_of_graphs_in_slices(modes: tuple[Mode, ...], is_draft: bool) -> None:
    model = block_model(2)
    target = block_program(model, modes)
    draft = block_program(model, modes if is_draft else ("gather", "gather"), head="outside")
    sequences = emit_sequences(target, draft, fold=None)
    report = verify_sequences(sequences, models={"target": model, "draft": model})
    assert report.is_good, report.text()
    read_back = StepSequence.parse(sequences["step"].text())
    assert read_back == sequences["step"] and read_back.graph("target").program.blocks == target.blocks
    lists = {"target": lower(target, 2), "draft": lower(draft, 2)}
    joined = lower_sequences([sequences["step"]] * 2, 2, lists).lowered
    exchanges = [op for op in joined.ops if isinstance(op, FlagWait)]
    assert len(exchanges) == 2 * sum(2 * len(program.blocks) for program in (target, draft))
    late = replace(target, ops=target.ops[1:] + target.ops[:1])
    broken = verify_sequences(emit_sequences(late, draft, fold=None))
    assert not broken.is_good and "inside graph target" in broken.text()


def test_a_gather_that_no_step_in_slices_reads_is_named() -> None:
    model = block_model(2)
    plan = block_plan(model, {DECODE: (SLICED, SLICED), PREFILL: ("gather", "gather")})
    sliced, gathered = emit_all(model, plan).values()
    unit = next(unit.index for unit in plan.units if unit.is_sliced)
    launch = next(op for op in gathered.ops if isinstance(op, AgLaunch) and op.unit == unit)
    assert not any(isinstance(op, AgLaunch) and op.unit == unit for op in sliced.ops)
    for place in (0, len(sliced.ops)):
        ops = (*sliced.ops[:place], launch, *sliced.ops[place:])
        report = verify(replace(sliced, ops=ops, exit=(None,) * sliced.num_slots))
        assert any(one.rule == 12 and one.unit == unit for one in report.violations), report.text()
