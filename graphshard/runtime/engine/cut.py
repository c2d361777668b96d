"""Which rows of a weight each rank keeps between loading and `finalize`, and which rows the parts of a merged one are.

Pure numbers. Cuts are made from the full shape alone, so every rank knows all of them, and rows that do not divide lose
nothing: slices are uneven, or empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphshard.core.errors import SpecError

ShardId = str | int
"""What a loader calls one part of a merged weight: `"q"`, or 0 for the gate of gate and up."""

Blocks = Mapping[ShardId, int] | Sequence[int]
"""Rows of each part of a merged weight, in its order; a sequence means shard ids 0, 1, ..."""


@dataclass(frozen=True, slots=True)
class RowCut:
    """Rank r keeps rows `[bounds[r], bounds[r + 1])`."""

    bounds: tuple[int, ...]

    @staticmethod
    def of(num_rows: int, world_size: int, row_multiple: int) -> RowCut:
        """As even as borders at multiples of `row_multiple` rows allow; only the weight's end may lie elsewhere."""
        blocks = -(-num_rows // row_multiple)
        return RowCut(
            tuple(min(num_rows, row_multiple * (blocks * rank // world_size)) for rank in range(world_size + 1))
        )

    @property
    def num_rows(self) -> int:
        """Of the whole weight."""
        return self.bounds[-1]

    @property
    def most_rows(self) -> int:
        """Of the largest slice."""
        return max(end - begin for begin, end in zip(self.bounds, self.bounds[1:], strict=False))

    def rows_of(self, rank: int) -> tuple[int, int]:
        """Rank `rank`'s rows, half open."""
        return self.bounds[rank], self.bounds[rank + 1]

    def followed(self, name: str, rows_per: int) -> RowCut:
        """The cut of a weight with one row for each `rows_per` rows of this one, such as its scales.

        Raises:
            SpecError: a border lies inside such a row.
        """
        odd = [bound for bound in self.bounds[:-1] if bound % rows_per and bound != self.num_rows]
        if odd:
            raise SpecError(
                f"weight {name} has a row for each {rows_per} rows of the weight that it follows, and ranks part that "
                f"one at row {odd[0]}: cut it between blocks, row_multiple={rows_per}"
            )
        return RowCut(tuple(-(-bound // rows_per) for bound in self.bounds))


def block_rows(name: str, num_rows: int, blocks: Blocks) -> dict[ShardId, tuple[int, int]]:
    """Rows `[begin, end)` of each part of the merged weight `name`, by shard id.

    Raises:
        SpecError: the parts are not `num_rows` rows together, or a part's rows are no whole number from 0 on.
    """
    if not isinstance(blocks, (Mapping, Sequence)):
        raise SpecError(
            f"blocks {blocks!r} of weight {name} are refused: give the rows of each part, in a list or by name"
        )
    sizes: Mapping[ShardId, int] = blocks if isinstance(blocks, Mapping) else dict(enumerate(blocks))
    wrong = [size for size in sizes.values() if not isinstance(size, int) or isinstance(size, bool) or size < 0]
    if wrong or sum(sizes.values()) != num_rows:
        together = "" if wrong else f", {sum(sizes.values())} together"
        raise SpecError(
            f"blocks {dict(sizes)} of weight {name} are refused: it has {num_rows} rows{together}; "
            "give the rows of each part, in the weight's order"
        )
    rows: dict[ShardId, tuple[int, int]] = {}
    end = 0
    for shard_id, size in sizes.items():
        rows[shard_id] = (end, end + size)
        end += size
    return rows


def followed_blocks(
    blocks: Mapping[ShardId, tuple[int, int]], rows_per: int, num_rows: int
) -> dict[ShardId, tuple[int, int]]:
    """The parts of what follows a merged weight; none if a part does not begin between its rows."""
    if any(begin % rows_per and begin != num_rows for begin, _ in blocks.values()):
        return {}
    return {shard_id: (-(-begin // rows_per), -(-end // rows_per)) for shard_id, (begin, end) in blocks.items()}
