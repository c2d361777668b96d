"""What ranks compare before an update stops anything: that all of them got the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphshard.comm.group import Group
from graphshard.core.counts import by_value, some_of
from graphshard.core.errors import CommError
from graphshard.runtime.update.selection import Selection


@dataclass(frozen=True)
class Told:
    """What one rank says of an update that it has staged."""

    epoch: int
    updated: Sequence[str]
    checksums: Mapping[str, int]
    """Of each tensor that it was given and used, by name."""


def compare_staged(group: Group, epoch: int, selection: Selection, checksums: Mapping[str, int]) -> None:
    """Compare what all ranks have staged (collective).

    Raises:
        CommError: on every rank alike, naming the first tensor that differs, and the ranks by what they got.
    """
    mine = [epoch, list(selection.updated), dict(checksums)]
    gathered: list[Any] = [value for value, _ in group.all_gather(mine, name="update: checksums of tensors")]
    difference = first_difference([Told(*value) for value in gathered])
    if difference is not None:
        raise CommError(f"update: {difference}")


def first_difference(told: Sequence[Told]) -> str | None:
    """How ranks differ; None if they do not."""
    epochs = [f"epoch {one.epoch}" for one in told]
    if len(set(epochs)) > 1:
        return f"ranks have weights of different versions: {by_value(epochs)}; start all ranks anew"
    chosen = [f"{len(one.updated)} weights ({some_of(list(one.updated), 3)})" for one in told]
    if len({tuple(one.updated) for one in told}) > 1:
        return f"ranks update different weights: {by_value(chosen)}; give all ranks the same only and keep"
    names = sorted({name for one in told for name in one.checksums})
    unlike = [name for name in names if len({one.checksums.get(name) for one in told}) > 1]
    if not unlike:
        return None
    sums = [f"{one.checksums[unlike[0]]:016x}" if unlike[0] in one.checksums else "nothing" for one in told]
    return (
        f"tensor {unlike[0]} is not the same on all ranks: its checksum is {by_value(sums)} ({len(unlike)} of "
        f"{len(names)} tensors differ); give all ranks the same bytes"
    )
