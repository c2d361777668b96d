"""Rows of a server's own that no step can take: refused by name, before anything is issued."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from speculative_fakes import PlainStep, plain_graphs

from graphshard.core.errors import SpecError
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import Llama, random_llama
from graphshard.models.speculative.acceptance import Row, empty_row
from graphshard.models.speculative.decoder import SpeculativeDecoder
from graphshard.models.speculative.proposers import TokenProposer

SMALL = LlamaConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
LENGTH, BLOCK = 40, 4


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([Row([1, 2], 2, 9)], r"1 rows for a step of 2 sequences: fill up with empty_row\(\)"),
        ([Row([1, 2], 2, 9)] * 3, "3 rows for a step of 2 sequences"),
        ([empty_row(), Row([1, 2], 2, 9, committed=2)], "row 1: 2 of its 2 tokens are committed; a step begins at"),
        ([empty_row(), Row([1, 2], 2, 9, committed=-1)], "row 1: -1 of its 2 tokens are committed"),
        ([empty_row(), Row([], 0, 9)], "row 1: 0 of its 0 tokens are committed"),
        ([Row([1, 61], 2, 9), empty_row()], "row 0 has token 61, outside the vocabulary of 61: use the tokenizer"),
        ([Row([1, -1, 2], 3, 9, committed=2), empty_row()], "row 0 has token -1, outside the vocabulary"),
        ([Row([1] * 38, 38, 50, committed=37), empty_row()], "row 0: its block of 4 begins at position 37, and the ca"),
    ],
)
def test_rows_that_no_step_can_take_are_refused_before_it_begins(rows: Sequence[Row], text: str) -> None:
    model, weights = Llama(SMALL, 2, LENGTH), random_llama(SMALL, seed=3)[1]
    proposer = TokenProposer(2, BLOCK)
    step = PlainStep(plain_graphs(model, weights, [(2, BLOCK)])[0], plain_graphs(model, weights, proposer.shapes))
    decoder = SpeculativeDecoder(step, proposer, num_positions=LENGTH)
    with pytest.raises(SpecError, match=text):
        decoder.advance(rows)
    last = Row([1] * 37, 37, 38, committed=36)
    gained = decoder.advance([last, empty_row()])  # the step that was refused did not begin
    assert gained == [1, 0] and last.is_done
