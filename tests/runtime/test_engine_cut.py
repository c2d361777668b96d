"""Cuts into rows: every row has one owner, borders keep to multiples, what follows a weight is cut with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.runtime.engine.cut import RowCut, block_rows, followed_blocks


@given(num_rows=st.integers(0, 3000), world_size=st.integers(1, 16), every=st.sampled_from([1, 2, 16, 128]))
def test_every_row_has_one_owner_and_borders_lie_between_blocks(num_rows: int, world_size: int, every: int) -> None:
    cut = RowCut.of(num_rows, world_size, every)
    slices = [cut.rows_of(rank) for rank in range(world_size)]
    assert [row for begin, end in slices for row in range(begin, end)] == list(range(num_rows))
    assert all(begin % every == 0 or begin == num_rows for begin, _ in slices)
    blocks = [-(-(end - begin) // every) for begin, end in slices]
    assert max(blocks) - min(blocks) <= 1 and cut.most_rows == max(end - begin for begin, end in slices)


@given(num_rows=st.integers(1, 3000), world_size=st.integers(1, 16), every=st.sampled_from([1, 3, 128]))
def test_what_follows_is_cut_where_its_leader_is(num_rows: int, world_size: int, every: int) -> None:
    leader = RowCut.of(num_rows, world_size, every)
    follower = leader.followed("scale", every)
    assert follower.num_rows == -(-num_rows // every)
    for rank in range(world_size):
        begin, end = leader.rows_of(rank)
        assert [row // every for row in range(begin, end, every)] == list(range(*follower.rows_of(rank)))


def test_a_cut_inside_a_block_is_refused() -> None:
    with pytest.raises(SpecError, match=r"ranks part that one at row 100: .* row_multiple=128"):
        RowCut.of(200, 2, 1).followed("layers.0.scale", 128)
    assert RowCut.of(100, 3, 128).followed("layers.0.scale", 128).bounds == (0, 0, 0, 1)


def test_parts_are_rows_in_their_order_and_must_add_up() -> None:
    assert block_rows("w", 10, {"q": 6, "k": 0, "v": 4}) == {"q": (0, 6), "k": (6, 6), "v": (6, 10)}
    assert block_rows("w", 10, [3, 7]) == {0: (0, 3), 1: (3, 10)}
    for wrong in ({"q": 6, "k": 3}, [11], [-1, 11], [True, 9], [2.5, 7.5]):
        with pytest.raises(SpecError, match=r"blocks .* of weight w are refused: it has 10 rows"):
            block_rows("w", 10, wrong)  # type: ignore[arg-type]


def test_parts_that_do_not_begin_between_blocks_have_no_scales_of_their_own() -> None:
    assert followed_blocks({"q": (0, 256), "k": (256, 300)}, 128, 300) == {"q": (0, 2), "k": (2, 3)}
    assert followed_blocks({"q": (0, 192), "k": (192, 384)}, 128, 384) == {}
