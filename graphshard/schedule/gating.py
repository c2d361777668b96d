"""When a block's compute may be cut over ranks: the published conditions, as a question with its answer in words."""

from __future__ import annotations

from graphshard.core.sizes import dtype_bits
from graphshard.core.specs import BlockSpec, ModelSpec


def why_not_tensor_parallel(
    *,
    is_asked: bool,
    is_sequence_parallel: bool,
    world_size: int,
    hidden: int,
    intermediate: int,
    name: str = "a block",
) -> str:
    """Why `name` is not computed in slices, one clause; empty if it may be.

    All four must hold (vLLM's sharded shared expert under sequence parallelism): it was asked for; ranks hold tokens of
    their own, which are gathered before and given back after; there is more than one rank; hidden and intermediate
    size both divide by the number of ranks.

    Args:
        is_asked: Whether somebody wants slices.
        is_sequence_parallel: Whether ranks hold disjoint tokens. Of ranks that hold the same ones each would add up
            sums of all of them, for tokens that it has already.
        world_size: Ranks that share one copy of the weights.
        hidden: Features of a token before and after the block.
        intermediate: Features between its weights, which ranks divide among themselves.
        name: How the block is called.
    """
    if not is_asked:
        return f"{name} is not to be computed in slices: dual mode is off"
    if not is_sequence_parallel:
        return f"{name} is not sequence-parallel: ranks hold no tokens of their own to gather and to give back"
    if world_size < 2:
        return f"{name} has one rank: there is nobody to divide its compute with"
    for what, size in (("intermediate", intermediate), ("hidden", hidden)):
        if size % world_size:
            return f"{name} does not divide: {what} size {size} is no multiple of {world_size} ranks"
    return ""


def why_block_is_gathered(model: ModelSpec, block: BlockSpec, world_size: int, *, is_asked: bool = True) -> str:
    """Why a runtime never computes `block` in slices, wherever its weights lie; empty if nothing speaks against it."""
    shape = model.weight(block.weights[0]).shape
    why = why_not_tensor_parallel(
        is_asked=is_asked,
        is_sequence_parallel=True,  # ranks of a runtime have requests of their own
        world_size=world_size,
        hidden=next((wide for wide in (block.width_in, block.width_out) if wide % world_size), block.width_in),
        intermediate=shape[0] if shape else 0,
        name="it",
    )
    if not why and block.dtype.startswith("float") and dtype_bits(block.dtype) <= 8:
        return f"its partial sums are {block.dtype}, which cannot be added up"
    return why
