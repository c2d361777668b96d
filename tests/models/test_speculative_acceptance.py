from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.models.speculative.acceptance import (
    Accepted,
    Row,
    accept,
    append,
    block_of,
    empty_row,
    needed_positions,
    rows_for,
)
from graphshard.models.speculative.compare import Difference, differences


def _decoding(total: int = 20) -> Row:
    """Three tokens, of which the last is not committed."""
    return Row([5, 6, 7], 2, total, committed=2)


@pytest.mark.parametrize("right", list(product((False, True), repeat=3)))
def test_the_longest_prefix_and_a_bonus_token_count(right: tuple[bool, ...]) -> None:
    row, chosen = _decoding(), [11, 12, 13, 14]
    proposals = [token if is_right else 99 for token, is_right in zip(chosen, right, strict=False)]
    block = block_of(row, proposals, 4)
    assert (block.tokens, block.begin, block.num_known, block.num_proposed) == ([7, *proposals], 2, 1, 3)
    prefix = (*right, False).index(False)
    accepted = accept(row, block, chosen)
    assert accepted == Accepted(1 + prefix, chosen[prefix])
    assert append(row, block, accepted, [0.5, 0.25, 0.125, 0.0625]) == 1 + prefix
    assert row.tokens == [5, 6, 7, *chosen[: prefix + 1]]
    assert row.gaps == [0.5, 0.25, 0.125, 0.0625][: prefix + 1]
    assert (row.committed, row.num_known) == (3 + prefix, 1)


def test_a_prompt_is_known_and_counts_whatever_is_chosen() -> None:
    row = Row([1, 2, 3, 4, 5, 6], 6, 9)
    for begin, known, bonus in ((0, 4, None), (4, 2, 31)):
        block = block_of(row, [70, 71, 72], 4)
        assert (block.begin, block.num_known, block.num_proposed) == (begin, known, 0)
        assert block.tokens == ([1, 2, 3, 4] if begin == 0 else [5, 6, 6, 6])  # unused places repeat the last token
        accepted = accept(row, block, [30, 31, 32, 33])
        assert accepted == Accepted(known, bonus)
        append(row, block, accepted, [0.0] * 4)
    assert (row.tokens[6:], row.generated, row.committed) == ([31], [31], 6)


def test_a_prompt_that_fills_its_block_gives_a_token() -> None:
    row = Row([1, 2, 3], 3, 9)
    assert accept(row, block_of(row, [], 3), [30, 31, 32]) == Accepted(3, 32)


@pytest.mark.parametrize("room", [1, 2, 3, 4])
def test_no_more_counts_than_makes_a_row_complete(room: int) -> None:
    row = _decoding(3 + room)
    block = block_of(row, [11, 12, 13], 4)
    accepted = accept(row, block, [11, 12, 13, 14])
    assert append(row, block, accepted, [1.0] * 4) == room == accepted.num_tokens
    assert row.tokens == [5, 6, 7, 11, 12, 13, 14][: 3 + room]
    assert (row.is_done, row.num_known, len(row.gaps)) == (True, 1, room)
    again = block_of(row, [11, 12, 13], 4)
    assert again.num_proposed == 0
    assert accept(row, again, [0, 0, 0, 0]) == Accepted(0, None)
    assert append(row, again, Accepted(0, None), [1.0] * 4) == 0


def test_a_row_of_nobody_has_tokens_to_feed_and_none_that_count() -> None:
    row = empty_row()
    block = block_of(row, [3, 4, 5], 4)
    assert (block.tokens, block.begin) == ([0, 0, 0, 0], 0)
    assert accept(row, block, [3, 4, 5, 6]) == Accepted(0, None)


@given(st.integers(1, 12), st.integers(1, 8), st.integers(1, 6), st.integers(1, 5), st.data())
def test_whatever_is_proposed_a_text_is_what_the_target_chooses(
    num_prompt: int, num_tokens: int, block: int, vocab: int, data: st.DataObject
) -> None:
    """A target whose choice depends on the position alone."""
    want = [(7 * at + 3) % vocab for at in range(40)]
    prompt = [data.draw(st.integers(0, vocab - 1)) for _ in range(num_prompt)]
    row, num_steps = Row(list(prompt), num_prompt, num_prompt + num_tokens), 0
    while not row.is_done:
        proposals = data.draw(st.lists(st.integers(0, vocab - 1), max_size=block + 1))
        made = block_of(row, proposals, block)
        assert len(made.tokens) == block
        assert made.begin + block <= needed_positions([prompt], num_tokens, block)
        append(row, made, accept(row, made, want[made.begin + 1 :]), [0.0] * block)
        num_steps += 1
        assert row.num_known >= 1
    assert row.tokens == prompt + want[num_prompt : num_prompt + num_tokens]
    assert len(row.gaps) == num_tokens and num_steps <= -(-num_prompt // block) + num_tokens - 1


def test_prompts_that_cannot_be_decoded_are_refused() -> None:
    def rows(prompts: list[list[int]], num_tokens: int = 3, num_positions: int = 8) -> list[Row]:
        return rows_for(prompts, num_tokens, 2, 10, num_positions, 4)

    assert [row.total for row in rows([[1, 2]])] == [5, 1]
    with pytest.raises(SpecError, match="3 prompts for 2 sequences"):
        rows([[1], [2], [3]])
    with pytest.raises(SpecError, match=">= 1 token each"):
        rows([[1], []])
    with pytest.raises(SpecError, match="prompt 1 has token 10, outside the vocabulary of 10"):
        rows([[1], [10]])
    with pytest.raises(SpecError, match="num_tokens is 0"):
        rows([[1]], 0)
    with pytest.raises(SpecError, match="by blocks of 4 needs 9 positions and the caches have 8"):
        rows([[1, 2, 3], [1]])


def test_a_difference_is_excused_by_a_near_tie_alone() -> None:
    assert differences(0, [1, 2, 3], [1, 2, 3], [0.0] * 3) == []
    found = differences(7, [1, 9, 9, 4], [1, 5, 6, 4], [0.0, 9e-4, 1e-3, 0.0])
    assert found == [Difference(7, 1, 9, 5, 9e-4), Difference(7, 2, 9, 6, 1e-3)]
    assert [one.is_near_tie for one in found] == [True, False]
