"""`verify_sequences`: what the host issues around several graphs, proved before any of them runs.

Each graph's program is verified by itself, each sequence by its rules, and every ordered pair of sequences that may
follow each other as one list: both lowered, with a list of every graph in it (see `core.sequence_lowering`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from graphshard.core.errors import ProgramError
from graphshard.core.layout import Layout
from graphshard.core.lowering import Lowered, lower
from graphshard.core.sequence import PrefetchLaunch, SlotState, StepSequence
from graphshard.core.specs import ModelSpec
from graphshard.verify.report import Report, Violation, merge
from graphshard.verify.rules import verify
from graphshard.verify.sequence_history import sequence_history
from graphshard.verify.sequence_races import sequence_races, short_list
from graphshard.verify.sequence_rules import SEQUENCE_RULES, SequenceFacts, graphs_exist


@dataclass(frozen=True, slots=True)
class SequenceReport(Report):
    """All violations, and which sequences may follow which."""

    pairs: tuple[tuple[str, str], ...] = ()
    """(first, second): looked at as issued one after the other."""
    apart: tuple[tuple[str, str, str], ...] = ()
    """(first, second, why not): the second does not expect what the first leaves."""

    @property
    def noun(self) -> str:
        """What was looked at."""
        return "sequence"

    def text(self) -> str:
        """The error's text; or that nothing was found, and who may follow whom."""
        lines = [Report.text(self)]
        if self.violations:
            return lines[0]
        for second in dict.fromkeys(name for _, name, *_ in (*self.pairs, *self.apart)):
            before = [first for first, name in self.pairs if name == second]
            lines.append(f"  {second} may follow {', '.join(before) or 'none'}")
            reasons: dict[str, list[str]] = {}
            for first, name, why in self.apart:
                if name == second:
                    reasons.setdefault(why, []).append(first)
            lines += [f"    not {', '.join(names)}: {why}" for why, names in reasons.items()]
        return "\n".join(lines)


def verify_sequences(
    sequences: Mapping[str, StepSequence],
    *,
    num_copies: int = 2,
    layouts: Mapping[str, Layout] | None = None,
    models: Mapping[str, ModelSpec] | None = None,
    follows: Iterable[tuple[str, str]] | None = None,
) -> SequenceReport:
    """Check R1 to R9, R11 and R12 for the sequences of one target and one draft.

    Args:
        sequences: By name, all over the same graphs.
        num_copies: Copies of a gather.
        layouts: Where bytes lie, by graph; without it R7 and R11 are not checked for a graph's bytes.
        models: What segments and folds read, by graph; without it no fold's weights are looked at.
        follows: (first, second): what the host is going to issue in turn. A pair whose states do not meet is then a
            violation. None: every ordered pair whose states meet; the report says which do not, and why.

    Raises:
        ProgramError: the sequences have different graphs, or `follows` names one that is not there.
    """
    asked = None if follows is None else tuple(follows)
    _check_names(sequences, asked)
    found, lists = _judge_graphs(sequences, num_copies, layouts or {}, models or {})
    own = {}
    wanted = frozenset(state for sequence in sequences.values() for state in _wanted(sequence))
    for name, sequence in sequences.items():
        violations = _own_violations(SequenceFacts(sequence, wanted, models or {}), num_copies, lists)
        own[name] = {violation.key: violation.wrong_bytes for violation in violations}
        found += [replace(violation, where=f" (sequence {name})") for violation in violations]
    pairs, apart = [], []
    for first, second in asked if asked is not None else _all_pairs(sequences):
        before, after = sequences[first], sequences[second]
        if not (_is_readable(before) and _is_readable(after)):
            continue  # R1 has been reported
        why = why_not_after(before, after)
        if why:
            apart.append((first, second, why))
        else:
            pairs.append((first, second))
        if not why or asked is not None:
            violations = merge([*_mismatches(before, after), *sequence_races((before, after), num_copies, lists)])
            said = (own[first], own[second])
            fresh = [v for v in violations if v.wrong_bytes > said[v.step].get(v.key, -1)]
            found += [replace(violation, where=f" (sequence {second} after {first})") for violation in fresh]
    found.sort(key=lambda violation: (violation.rule, -1 if violation.op is None else violation.op))
    num_ops = max((len(sequence.ops) for sequence in sequences.values()), default=0)
    return SequenceReport(tuple(found), num_ops, len(sequences), tuple(pairs), tuple(apart))


def _own_violations(facts: SequenceFacts, num_copies: int, lists: Mapping[str, Lowered]) -> tuple[Violation, ...]:
    """What a sequence breaks by itself."""
    if not _is_readable(facts.sequence):
        return merge(list(graphs_exist(facts)))
    violations = [violation for rule in SEQUENCE_RULES for violation in rule(facts)]
    return merge([*violations, *sequence_races((facts.sequence,), num_copies, lists)])


def _is_readable(sequence: StepSequence) -> bool:
    """Whether all that it names exists; what all other rules take for granted."""
    return not any(True for _ in graphs_exist(SequenceFacts(sequence)))


def why_not_after(first: StepSequence, second: StepSequence) -> str:
    """Why `second` may not be issued after `first`; empty if it may."""
    return "; ".join(violation.text for violation in _mismatches(first, second))


def _mismatches(first: StepSequence, second: StepSequence) -> list[Violation]:
    """R9: `second` finds in flight and held what it expects, and no more in flight than that."""
    found = []
    for item in second.entry:
        if item not in first.exit:
            left = next(
                (f"leaves it {_how(other)}" for other in first.exit if other.place == item.place), "leaves none"
            )
            text = f"it expects {_state_text(item)}, but what comes before {left}"
            found.append(Violation(9, None, item.unit, item.slot, text, step=1))
    expected = {item.place for item in second.entry}
    for item in first.exit:
        if isinstance(item, PrefetchLaunch) and item.place not in expected:
            text = f"{_state_text(item)} is left to it, which it does not expect; discard that between them"
            found.append(Violation(9, None, item.unit, item.slot, text, step=1))
    return found


def _state_text(item: SlotState) -> str:
    """`unit 0 of draft in flight to slot 1`, or `unit 0 of draft held in slot 1`."""
    return (
        f"unit {item.unit} of {item.graph} {_how(item)} {'to' if _how(item) == 'in flight' else 'in'} slot {item.slot}"
    )


def _how(item: SlotState) -> str:
    return "in flight" if isinstance(item, PrefetchLaunch) else "held"


def _wanted(sequence: StepSequence) -> list[SlotState]:
    """What `sequence` expects at its entry and has a replay read."""
    if not _is_readable(sequence):
        return []
    stays = [stay for stay in sequence_history(sequence).stays if stay.op is None]
    return [item for item, stay in zip(sequence.entry, stays, strict=True) if stay.reads]


def _all_pairs(sequences: Mapping[str, StepSequence]) -> list[tuple[str, str]]:
    return [(first, second) for second in sequences for first in sequences]


def _judge_graphs(
    sequences: Mapping[str, StepSequence],
    num_copies: int,
    layouts: Mapping[str, Layout],
    models: Mapping[str, ModelSpec],
) -> tuple[list[Violation], dict[str, Lowered]]:
    """What `verify` says of each graph's program, and the lists with which those without a fault are judged further."""
    found: list[Violation] = []
    lists: dict[str, Lowered] = {}
    for graph in next(iter(sequences.values())).graphs if sequences else ():
        program, name = graph.program, graph.name
        report = verify(program, layouts.get(name), model=models.get(name), num_copies=num_copies)
        found += [replace(violation, where=f" (inside graph {name})") for violation in report.violations]
        lists[name] = short_list(program, num_copies) if report.is_good else lower(program, num_copies)
    return found, lists


def _check_names(sequences: Mapping[str, StepSequence], follows: Iterable[tuple[str, str]] | None) -> None:
    known = list(sequences)
    for name, sequence in sequences.items():
        if sequence.graphs != sequences[known[0]].graphs:
            raise ProgramError(
                f"sequences {known[0]} and {name} have different graphs: verify those of one target and draft together"
            )
    unknown = {name for pair in follows or () for name in pair} - set(known)
    if unknown:
        raise ProgramError(f"there is no sequence {', '.join(sorted(unknown))}; known are {', '.join(known)}")
