"""How large a model's caches are: a row for each sequence of the largest batch, a position for each of its tokens."""

from __future__ import annotations

from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape

DEFAULT_CACHE_LENGTH = 64


def check_caches(model: str, max_batch_size: int, cache_length: int, max_positions: int) -> None:
    """SpecError, in the name of `model`, unless it can have caches of `max_batch_size` x `cache_length`."""
    if not 1 <= cache_length <= max_positions:
        raise SpecError(
            f"{model}: cache_length {cache_length} is not within 1 and the model's {max_positions} positions"
        )
    if max_batch_size < 1:
        raise SpecError(f"{model}: max_batch_size is {max_batch_size}, must be at least 1")


def check_fits(model: str, shape: StepShape, max_batch_size: int, cache_length: int) -> None:
    """SpecError, in the name of `model`, if a step of `shape` does not fit its caches."""
    if shape.batch_size > max_batch_size or shape.tokens_per_sequence > cache_length:
        raise SpecError(
            f"{model}: step shape {shape} does not fit {max_batch_size} sequences of {cache_length} "
            "positions; make the model with a larger max_batch_size or cache_length"
        )
