"""The table of what captured graphs can see: an update writes in place, so nothing in it may have moved."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.core.counts import some_of
from graphshard.runtime.memory import BufferRow


def moved_rows(recorded: Sequence[BufferRow], now: Sequence[BufferRow]) -> list[str]:
    """What is not where `recorded` says, or is another tensor: one clause a row. Rows that are new are no matter."""
    places = {(row.role, row.name): row for row in now}
    found = []
    for row in recorded:
        place = places.get((row.role, row.name))
        if place != row:
            found.append(f"{row.role} {row.name} was {_text(row)}, is {'gone' if place is None else _text(place)}")
    return found


def moved_text(moved: Sequence[str]) -> str:
    """All of them in one clause."""
    return f"{len(moved)} of the buffers that graphs see moved since capture: {some_of(list(moved), 3)}"


def _text(row: BufferRow) -> str:
    shape = f"[{', '.join(map(str, row.shape))}]" if row.shape else ""
    strides = f" strides {row.strides}" if row.strides else ""
    return f"{row.num_bytes} B of {row.dtype}{shape}{strides} at {row.address:#x}"
