"""The table of rules, and `verify`, which runs it over every program and every ordered pair of programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphshard.core.layout import Layout
from graphshard.core.lowering import Lowered, lower
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.verify import block_rules, layout_rules, op_rules
from graphshard.verify.facts import Facts
from graphshard.verify.history import history_of
from graphshard.verify.race_rules import race_violations
from graphshard.verify.report import Key, Report, Violation, merge


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule `number`: a sentence, and the function that finds what breaks it. Some need more than one function."""

    number: int
    says: str
    check: Callable[[Facts], Iterable[Violation]]
    over_pairs: bool = False
    """Whether it is about what two consecutive steps do to each other."""


def _races(number: int) -> Callable[[Facts], Iterable[Violation]]:
    return partial(race_violations, rule=number)


RULES: tuple[Rule, ...] = (
    Rule(1, "units, slots and states exist", op_rules.indices_exist),
    Rule(1, "tensor-parallel blocks exist", block_rules.blocks_exist),
    Rule(1, "every segment runs once, in order", op_rules.segments_run_once),
    Rule(1, "the lowered list is the program's", op_rules.list_matches),
    Rule(1, "each event is recorded once", op_rules.events_exist),
    Rule(2, "every unit used is gathered or held at entry", _races(2), over_pairs=True),
    Rule(2, "once for each stay", op_rules.gathered_once),
    Rule(2, "with all of its copies", op_rules.gathers_are_whole),
    Rule(3, "a wait is ordered before the first read", _races(3), over_pairs=True),
    Rule(3, "the outputs' event is after the last gemm", op_rules.outputs_are_ready),
    Rule(4, "no second wait for one gather on one stream", op_rules.one_wait),
    Rule(4, "no second wait for one event on one stream", op_rules.one_wait_in_list),
    Rule(5, "the gate follows the slot's last reader", op_rules.gate_follows_readers),
    Rule(5, "and no gather passes it before", _races(5), over_pairs=True),
    Rule(6, "a gather into a used slot is after that gate", _races(6), over_pairs=True),
    Rule(7, "a unit fits its slot", layout_rules.unit_fits_slot),
    Rule(7, "slots and chunks are aligned and apart", layout_rules.slots_are_apart),
    Rule(7, "copies fill their unit", layout_rules.copies_fill_unit),
    Rule(8, "forks are joined", op_rules.forks_are_joined),
    Rule(9, "exit matches the next entry", op_rules.exit_meets_entry),
    Rule(9, "also where a gather left it", _races(9), over_pairs=True),
    Rule(9, "no event crosses a capture border", op_rules.events_stay_inside),
    Rule(11, "weights lie inside their unit", layout_rules.reads_inside_unit),
    Rule(11, "a weight's place is as the weight is", layout_rules.views_are_the_weights),
    Rule(11, "a gemm names the units of its weights", layout_rules.segments_read_their_units),
    Rule(11, "what runs between steps reads no unit", layout_rules.folds_read_no_unit),
    Rule(11, "a block is the model's, and its weights are sliced", block_rules.blocks_are_the_models),
    Rule(12, "nothing is gathered and never read", op_rules.gathered_is_read),
    Rule(13, "a block's parts and exchanges are in order", block_rules.blocks_in_order),
    Rule(13, "and so they are in the lowered list", block_rules.exchanges_match),
    Rule(14, "compute on slices reads no slot", block_rules.slices_are_not_in_slots),
)
"""R10 compares ranks: see `graphshard.verify.ranks`."""


@dataclass(frozen=True, slots=True)
class _Case:
    """A distinct program, its list, and the step shapes that share it."""

    program: Program
    lowered: Lowered
    shapes: str


def verify(
    programs: Program | Sequence[Program] | Mapping[StepShape, Program],
    layout: Layout | None = None,
    *,
    model: ModelSpec | None = None,
    num_copies: int | None = None,
    num_copy_streams: int = 1,
    own_branch: bool = False,
    lowered: Mapping[Program, Lowered] | None = None,
) -> Report:
    """Check R1 to R9 and R11 to R14 for each program and each ordered pair of programs that share slots.

    Args:
        programs: One program, or those of all step shapes. Equal ones are looked at once.
        layout: Where bytes lie; without it R7 and R11 are not checked.
        model: The segments' reads; without it R11 looks at the layout alone.
        num_copies: Copies of a gather; the layout's world size, or 2.
        num_copy_streams: As `lower` takes it.
        own_branch: As `lower` takes it.
        lowered: Lists to judge instead of `lower`'s own.
    """
    if num_copies is None:
        num_copies = layout.world_size if layout is not None else 2
    cases = []
    for program, shapes in _distinct(programs):
        own = (lowered or {}).get(program) if lowered else None
        listed = own or lower(program, num_copies, num_copy_streams, own_branch)
        cases.append(_Case(program, listed, shapes))
    found = _check(cases, num_copies, layout, model)
    return Report(found, max((len(case.program.ops) for case in cases), default=0), len(cases))


def _check(
    cases: Sequence[_Case], num_copies: int, layout: Layout | None, model: ModelSpec | None
) -> tuple[Violation, ...]:
    """All violations of each program after itself, and of each program after another."""
    wanted = frozenset(key for case in cases for key in _entry_reads(case.program))
    found: list[Violation] = []
    known: dict[int, dict[Key, bool]] = {}
    for number, case in enumerate(cases):
        facts = _facts(case, case, num_copies, layout, model, wanted)
        violations = merge([violation for rule in RULES for violation in rule.check(facts)])
        known[number] = {violation.key: violation.wrong_bytes for violation in violations}
        where = f" (step shape {case.shapes})" if len(cases) > 1 and case.shapes else ""
        found += [replace(violation, where=where) for violation in violations]
    for first, before in enumerate(cases):
        for second, after in enumerate(cases):
            is_barrier = not known[first] and all(key[0] != 8 for key in known[second])
            if first == second or is_barrier:
                continue  # what is joined before and forked after meets nothing, and the first leaves what it states
            facts = _facts(before, after, num_copies, layout, model, wanted)
            said = (known[first], known[second])
            pairwise = [violation for rule in RULES if rule.over_pairs for violation in rule.check(facts)]
            fresh = merge([v for v in pairwise if v.wrong_bytes > said[v.step].get(v.key, -1)])
            where = f" (step shape {after.shapes} after {before.shapes})"
            found += [replace(violation, where=where) for violation in fresh]
    return tuple(sorted(found, key=lambda v: (v.rule, -1 if v.op is None else v.op)))


def _facts(
    case: _Case,
    following: _Case,
    num_copies: int,
    layout: Layout | None,
    model: ModelSpec | None,
    wanted: frozenset[tuple[int, int]],
) -> Facts:
    return Facts(
        program=case.program,
        lowered=case.lowered,
        next_program=following.program,
        next_lowered=following.lowered,
        num_copies=num_copies,
        layout=layout,
        model=model,
        wanted=wanted,
    )


def _distinct(programs: Program | Sequence[Program] | Mapping[StepShape, Program]) -> list[tuple[Program, str]]:
    """Each distinct program once, with the step shapes that share it; equal objects are compared by identity first."""
    if isinstance(programs, Program):
        return [(programs, "")]
    named = programs.items() if isinstance(programs, Mapping) else enumerate(programs)
    shapes: dict[int, list[str]] = {}
    by_identity: dict[int, int] = {}
    kept: list[Program] = []
    for name, program in named:
        if id(program) not in by_identity:
            if program not in kept:
                kept.append(program)
            by_identity[id(program)] = kept.index(program)
        shapes.setdefault(by_identity[id(program)], []).append(str(name))
    return [(program, " ".join(shapes[number])) for number, program in enumerate(kept)]


def _entry_reads(program: Program) -> list[tuple[int, int]]:
    """(slot, unit) that `program` holds at entry and reads."""
    return [(stay.slot, stay.unit) for stay in history_of(program).stays if stay.launch is None and stay.reads]
