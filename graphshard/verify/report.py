"""What the verifier says: violations, one a line, and the error that carries them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.errors import ProgramError
from graphshard.core.program import Program

RULE_NAMES = {
    1: "indices-exist",
    2: "held-before-use",
    3: "wait-before-read",
    4: "one-wait",
    5: "gate-after-read",
    6: "gate-before-write",
    7: "unit-fits-slot",
    8: "forks-joined",
    9: "exit-meets-entry",
    10: "same-sequence",
    11: "reads-inside-unit",
    12: "gathered-is-read",
    13: "block-in-order",
    14: "slices-in-shard",
}

Key = tuple[int, int | None, int | None, int | None]
"""Rule, op, unit, slot."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule: where (op index, unit, slot; None where there is no such thing) and what was found there.

    `wrong_bytes` is True if two steps can read wrong bytes or never end because of it, and the verifier has shown so;
    False if a rule of the op list is broken that may do no harm by itself.
    """

    rule: int
    op: int | None
    unit: int | None
    slot: int | None
    text: str
    wrong_bytes: bool = False
    step: int = 0
    """Whose op it is: 0 or 1 of two consecutive steps."""
    where: str = ""
    """The step shapes it is about; empty if all share one program."""

    @property
    def name(self) -> str:
        """The rule's name, as errors print it."""
        return RULE_NAMES[self.rule]

    @property
    def key(self) -> Key:
        """What makes two findings one violation."""
        return (self.rule, self.op, self.unit, self.slot)


@dataclass(frozen=True, slots=True)
class Report:
    """All violations, by rule and then by op; none means that the programs are free of races."""

    violations: tuple[Violation, ...]
    num_ops: int
    """Ops of the largest program that was looked at."""
    num_programs: int
    """Distinct programs."""

    @property
    def is_good(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    @property
    def noun(self) -> str:
        """What was looked at."""
        return "program"

    @property
    def rules(self) -> frozenset[int]:
        """The numbers of the broken rules."""
        return frozenset(violation.rule for violation in self.violations)

    def text(self) -> str:
        """The error's text, or one line that says that nothing was found."""
        subject = f"a {self.noun} of {count_text(self.num_ops, 'op')}"
        if self.num_programs > 1:
            subject = f"{count_text(self.num_programs, self.noun)} of up to {count_text(self.num_ops, 'op')}"
        if not self.violations:
            return f"no violations in {subject}"
        lines = [f"{count_text(len(self.violations), 'violation')} in {subject}"]
        number_width = max(len(f"R{violation.rule}") for violation in self.violations)
        name_width = max(len(violation.name) for violation in self.violations)
        for violation in self.violations:
            head = f"{f'R{violation.rule}':<{number_width}} {violation.name:<{name_width}}"
            lines.append(f"  {head}  {violation.text}{violation.where}")
        return "\n".join(lines)

    def raise_if_bad(self) -> None:
        """Raise the ProgramError that lists every violation, if there is one."""
        if self.violations:
            raise ProgramError(self.text())


def merge(found: Sequence[Violation]) -> tuple[Violation, ...]:
    """One violation for each key, the one that shows harm first; sorted by rule, op, unit, slot."""
    kept: dict[Key, Violation] = {}
    for violation in found:
        known = kept.get(violation.key)
        if known is None or (violation.wrong_bytes and not known.wrong_bytes):
            kept[violation.key] = violation
    return tuple(sorted(kept.values(), key=lambda v: tuple(-1 if part is None else part for part in v.key)))


def op_text(program: Program, index: int) -> str:
    """How errors name op `index`: its number, verb and first two fields."""
    if not 0 <= index < len(program.ops):
        return "the list's own fork or join"
    return f"op {index} " + " ".join(str(program.ops[index]).split()[:3])


def count_text(count: int, noun: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{count} {noun}" + ("" if count == 1 else "s")
