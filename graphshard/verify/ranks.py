"""R10: every rank issues the same collectives in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphshard.core.ops import ActGather, AgLaunch, ReduceScatter
from graphshard.core.program import Program
from graphshard.verify.report import Report, Violation


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective as op `op` of a rank's list (None: issued from outside), and its text."""

    op: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first collective in which ranks differ: its number, and for each side its ranks, op and text.

    A side whose list has ended has the text `nothing`.
    """

    number: int
    sides: tuple[tuple[tuple[int, ...], Collective], ...]
    """The larger side first."""

    def text(self) -> str:
        """`collective 7: op 21 ag_launch unit=5 slot=1 stream=copy on ranks 0 1 3; op 21 ... on rank 2`."""
        parts = []
        for ranks, collective in self.sides:
            where = "rank" if len(ranks) == 1 else "ranks"
            op = "" if collective.text == "nothing" else "outside " if collective.op is None else f"op {collective.op} "
            parts.append(f"{op}{collective.text} on {where} {' '.join(map(str, ranks))}")
        return f"collective {self.number}: " + "; ".join(parts)


def collectives_of(program: Program) -> tuple[Collective, ...]:
    """The collectives of one step, in issue order; those issued from outside come first."""
    outside = tuple(Collective(None, str(op)) for op in program.outside)
    kinds = AgLaunch | ActGather | ReduceScatter
    return outside + tuple(Collective(i, str(op)) for i, op in enumerate(program.ops) if isinstance(op, kinds))


def first_difference(sequences: Mapping[int, Sequence[Collective]]) -> Difference | None:
    """The first place where the ranks' sequences differ in text; None if they are the same."""
    for number in range(max(map(len, sequences.values()), default=0)):
        sides: dict[str, list[int]] = {}
        shown: dict[str, Collective] = {}
        for rank in sorted(sequences):
            sequence = sequences[rank]
            collective = sequence[number] if number < len(sequence) else Collective(None, "nothing")
            sides.setdefault(collective.text, []).append(rank)
            shown.setdefault(collective.text, collective)
        if len(sides) > 1:
            ordered = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
            return Difference(number, tuple((tuple(ranks), shown[text]) for text, ranks in ordered))
    return None


def compare_ranks(programs: Mapping[int, Program] | Sequence[Program]) -> Report:
    """R10 over one program of each rank: a report with one violation, the first difference, or none."""
    by_rank = dict(programs) if isinstance(programs, Mapping) else dict(enumerate(programs))
    difference = first_difference({rank: collectives_of(program) for rank, program in by_rank.items()})
    violations: tuple[Violation, ...] = ()
    if difference is not None:
        op = next((collective.op for _, collective in difference.sides if collective.op is not None), None)
        text = difference.text() + ". All ranks must compile the same model, plan and step shapes"
        violations = (Violation(10, op, None, None, text),)
    return Report(violations, max((len(p.ops) for p in by_rank.values()), default=0), 1)
