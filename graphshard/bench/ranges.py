"""What a captured step cannot check of its inputs, checked on the host before they are written."""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.core.errors import SpecError


def check_tokens(what: object, tokens: Sequence[int], vocab_size: int) -> None:
    """SpecError if one of `tokens` is outside the vocabulary; `what` they stand for."""
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise SpecError(
            f"prompt {what!r} has token {wrong}, outside the vocabulary of {vocab_size}: use the tokenizer that "
            "belongs to the model"
        )


def check_positions(num_positions: int, cache_length: int) -> None:
    """SpecError if so many steps, from position 0 on, do not fit the caches."""
    if num_positions > cache_length:
        raise SpecError(
            f"decoding needs {num_positions} positions and the caches have {cache_length}: make the model with a "
            "larger cache_length, or generate fewer tokens"
        )
