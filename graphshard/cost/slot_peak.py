"""How many bytes of units lie in slots at once, in a step that was walked in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphshard.core.layout import Layout
from graphshard.core.program import Program


def peak_slot_bytes(
    gathers: Sequence[tuple[int, float, int]], gates: Mapping[int, Sequence[float]], program: Program, layout: Layout
) -> int:
    """The most bytes of units in slots at once.

    Args:
        gathers: (slot, when it began, unit), in issue order of each slot.
        gates: By slot, when its gates were passed.
        program: What its slots hold at entry.
        layout: Bytes of units.
    """
    units: dict[int, list[tuple[float, int]]] = {
        slot: [(0.0, unit)] for slot, unit in enumerate(program.entry) if unit is not None
    }
    for slot, begin, unit in gathers:
        units.setdefault(slot, []).append((begin, unit))
    changes: list[tuple[float, int]] = []
    for slot, stays in units.items():
        passed = gates.get(slot, [])
        for number, (begin, unit) in enumerate(stays):
            size = layout.units[unit].num_bytes
            changes.append((begin, size))
            if number < len(passed):
                changes.append((passed[number], -size))
    return _highest(changes)


def _highest(changes: Sequence[tuple[float, int]]) -> int:
    held = highest = 0
    for _, change in sorted(changes):
        held += change
        highest = max(highest, held)
    return highest
