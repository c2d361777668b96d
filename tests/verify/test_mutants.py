"""Every harmful mutant of a good program is caught by the rule that names it; no good program is flagged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from mutate import Mutant, list_mutants, modulo_slots, program_mutants
from verify_cases import DEVICE, good_programs, harm, program_of

from graphshard.core.layout import Layout, build_layout
from graphshard.core.lowering import lower
from graphshard.core.ops import AgLaunch, Gemm
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.verify import Report, compare_ranks, verify

MAX_UNITS = 3
MAX_UNITS_OF_LISTS = 3
LOWERINGS = {"2 copies": (2, 1, False), "2 copy streams": (2, 2, False), "own branch": (3, 1, True)}


class Score:
    """Counts by kind: mutants, harmful ones, harmful ones that the right rule caught; what was missed."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.missed: list[str] = []

    def add(self, mutant: Mutant, report: Report, found: str | None) -> None:
        """Judge one mutant: `found` is what the exact interpreter found."""
        count = self.counts.setdefault(mutant.kind, Counter())
        count["mutants"] += 1
        shown = any(violation.wrong_bytes for violation in report.violations)
        if shown != (found is not None):
            self.missed.append(f"{mutant.kind}: {report.text()}\nbut the interpreter: {found}\n{mutant.program.text()}")
        if found is None and not mutant.by_definition:
            count["equal"] += report.is_good
            count["rule alone"] += not report.is_good
            return
        count["harmful"] += 1
        if mutant.rules & report.rules:
            count["caught"] += 1
        else:
            self.missed.append(f"{mutant.kind}: {report.text()}\nharm: {found}\n{mutant.program.text()}")

    def text(self) -> str:
        """A table: kind, mutants, harmful, caught."""
        width = max(map(len, self.counts))
        lines = [f"{'mutation':<{width}}  mutants  harmful   caught  rule alone   equal"]
        total: Counter[str] = Counter()
        for kind, count in [*sorted(self.counts.items()), ("all", total)]:
            total += count if kind != "all" else Counter()
            cells = [count[name] for name in ("mutants", "harmful", "caught")]
            lines.append(
                f"{kind:<{width}}  "
                + "  ".join(f"{cell:7}" for cell in cells)
                + f"  {count['rule alone']:10}  {count['equal']:6}"
            )
        return "\n".join(lines)

    def assert_complete(self, what: str, capsys: pytest.CaptureFixture[str]) -> None:
        """Print the counts (by kind under `-s`); every harmful mutant must have been caught, some of every kind."""
        print(self.text())
        total = sum(self.counts.values(), Counter())
        with capsys.disabled():
            print(
                f"\n{what}: {total['mutants']}, harmful {total['harmful']}, of these caught by the right rule "
                f"{total['caught']}; harmless but against a rule {total['rule alone']}, accepted {total['equal']}"
            )
        assert not self.missed, f"{len(self.missed)} mutants, the first: {self.missed[0]}"
        idle = [kind for kind, count in self.counts.items() if not count["harmful"]]
        assert set(idle) <= HARMLESS, f"kinds that never did harm: {idle}"


HARMLESS = {"launch on compute", "launch on prefetch", "gemm on copy", "list: copies on another stream"}
"""Serial or on another stream, what has its gate and its wait is right: these may not be flagged as races."""


def test_good_programs_are_not_flagged(capsys: pytest.CaptureFixture[str]) -> None:
    number = 0
    for name, program in good_programs(max_units=5):
        for lowering, (copies, streams, own) in LOWERINGS.items():
            report = verify(program, num_copies=copies, num_copy_streams=streams, own_branch=own)
            assert report.is_good, f"{name}, {lowering}: {report.text()}\n{program.text()}"
            found = harm(program, lower(program, copies, streams, own), copies)
            assert found is None, f"{name}, {lowering}: {found}\n{program.text()}"
            number += 1
    with capsys.disabled():
        print(f"\n{number} good lists: none flagged, none harmful")


def test_every_harmful_program_mutant_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    score = Score()
    for _, program in good_programs(MAX_UNITS):
        for mutant in program_mutants(program):
            score.add(mutant, verify(mutant.program), harm(mutant.program))
    score.assert_complete("program mutants", capsys)


@pytest.mark.parametrize(
    "lowering",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "2 copy streams" else []) for name in LOWERINGS],
)
def test_every_harmful_list_mutant_is_caught(lowering: str, capsys: pytest.CaptureFixture[str]) -> None:
    copies, streams, own = LOWERINGS[lowering]
    score = Score()
    for head in ("inside", "tail", "outside"):
        program = program_of([(u,) for u in range(MAX_UNITS_OF_LISTS)], head=head, prefetch_depth=1)
        lowered = lower(program, copies, streams, own)
        for mutant in list_mutants(program, lowered):
            report = verify(program, num_copies=copies, lowered={program: mutant.lowered})
            score.add(mutant, report, harm(program, mutant.lowered, copies))
    score.assert_complete(f"list mutants, {lowering}", capsys)


@pytest.mark.parametrize("num_units", [1, 2, 3, 4, 5, 7, 61])
@pytest.mark.parametrize("num_slots", [2, 3])
def test_slots_modulo_k_are_caught_where_the_wrap_does_not_fit(num_units: int, num_slots: int) -> None:
    # `i mod k` is right exactly where k divides the number of stays
    depth = num_slots - 1
    good = program_of([(u,) for u in range(num_units)], head="tail", prefetch_depth=depth)
    assert verify(good).is_good
    if not any(unit is not None for unit in good.entry):
        return  # too few units for a tail: nothing wraps
    mutant = modulo_slots(good, sum(unit is not None for unit in good.entry) + 1)
    report = verify(mutant)
    fits = num_units % mutant.num_slots == 0
    assert report.is_good == fits, f"{report.text()}\n{mutant.text()}"
    if not fits:
        assert report.rules & {6, 9}
    if num_units <= 5:
        assert (harm(mutant) is None) == fits


def test_a_swap_on_one_rank_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    # R10, by definition
    number = 0
    for _, program in good_programs(MAX_UNITS):
        launches = [index for index, op in enumerate(program.ops) if isinstance(op, AgLaunch)]
        assert compare_ranks([program] * 4).is_good
        for first, second in pairwise(launches):
            ops = list(program.ops)
            ops[first], ops[second] = ops[second], ops[first]
            if ops[first] == ops[second]:
                continue
            other = replace(program, ops=tuple(ops))
            for rank in range(4):
                report = compare_ranks([other if r == rank else program for r in range(4)])
                assert report.rules == {10}
                assert report.violations[0].op == first
                assert f"on rank {rank}" in report.text()
                number += 1
    with capsys.disabled():
        print(f"\n{number} swaps on a rank: all caught by R10")


def test_layout_mutants_are_caught(capsys: pytest.CaptureFixture[str]) -> None:
    # R7 and R11, by definition
    sizes = {"layers.0.q": 4096, "layers.0.k": 300, "layers.1.q": 8192, "norm": 64}
    model = ModelSpec(
        "two weights a unit",
        tuple(WeightSpec(name, (size,), "uint8") for name, size in sizes.items()),
        (
            SegmentSpec("qk", 0, ("layers.0.q", "layers.0.k", "norm")),
            SegmentSpec("q", 1, ("layers.1.q",)),
            SegmentSpec("again", 0, ("layers.0.q",)),
        ),
    )
    plan = make_plan(model, 2, DEVICE, units="layer", include=("layers.*",))
    layout, program = build_layout(model, plan), emit(model, plan)
    assert verify(program, layout, model=model).is_good
    mutants = list(_layout_mutants(layout))
    for kind, changed, rule in mutants:
        report = verify(program, changed, model=model)
        assert rule in report.rules, f"{kind}: {report.text()}"
    gemm = next(i for i, op in enumerate(program.ops) if isinstance(op, Gemm) and op.units)
    op = program.ops[gemm]
    assert isinstance(op, Gemm)
    ops = program.ops[:gemm] + (replace(op, units=op.units[1:]),) + program.ops[gemm + 1 :]
    assert 11 in verify(replace(program, ops=ops), layout, model=model).rules
    with capsys.disabled():
        print(f"\n{len(mutants) + 1} layout mutants: all caught by R7 or R11")


def _layout_mutants(layout: Layout) -> Iterator[tuple[str, Layout, int]]:
    """(kind, layout, rule that names it)."""
    slot, unit = layout.slots[0], layout.units[0]
    alignment = layout.alignment_bytes

    def with_slot(**changes: int) -> Layout:
        return replace(layout, slots=(replace(slot, **changes), *layout.slots[1:]))

    def with_unit(**changes: object) -> Layout:
        return replace(layout, units=(replace(unit, **changes), *layout.units[1:]))

    yield "slot too small", with_slot(num_bytes=slot.num_bytes - alignment), 7
    yield "slot off its alignment", with_slot(offset=slot.offset + 16), 7
    if len(layout.slots) > 1:
        yield "two slots share bytes", with_slot(offset=layout.slots[1].offset), 7
    yield "slot outside the window", replace(layout, slot_bytes=layout.slot_bytes - alignment), 7
    yield "slot missing", replace(layout, slots=layout.slots[1:]), 7
    yield "unit missing", replace(layout, units=layout.units[1:]), 7
    yield "chunks share bytes", with_unit(chunk_offset=layout.units[1].chunk_offset), 7
    yield "copy dropped", with_unit(copies=unit.copies[1:]), 7
    for name, change in {
        "copy to the wrong place": {"slot_offset": unit.copies[1].slot_offset},
        "copy behind the unit": {"slot_offset": unit.num_bytes},
        "copy of another chunk": {"source_offset": unit.copies[0].source_offset + unit.chunk_bytes},
        "copy of a rank that is not there": {"source_rank": layout.world_size},
        "copy of another rank": {"source_rank": unit.copies[1].source_rank},
    }.items():
        yield name, with_unit(copies=(replace(unit.copies[0], **change), *unit.copies[1:])), 7
    view = unit.views[0]
    for name, change in {
        "view behind the unit": {"offset": unit.num_bytes},
        "view too long": {"num_bytes": unit.num_bytes + 1},
        "view off its alignment": {"offset": view.offset + 16},
        "view on another weight": {"offset": unit.views[1].offset},
        "view too short": {"num_bytes": view.num_bytes - 1},
        "view of another dtype": {"dtype": "int64"},
        "view of another shape": {"shape": (*view.shape, 1)},
        "view of other strides": {"strides": (1,) * len(view.shape)},
        "view of a weight that is not there": {"weight": "nobody's"},
    }.items():
        yield name, with_unit(views=(replace(view, **change), *unit.views[1:])), 11
    yield "weight not placed", with_unit(views=unit.views[1:]), 11
