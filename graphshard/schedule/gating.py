"""When a block's compute may be cut over ranks: the published conditions, as a question with its answer in words."""

from __future__ import annotations


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
