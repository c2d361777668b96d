"""N ranks in one thread, step by step together: blocks run on slices of their weights, over what an exchange moves.

Each rank has sequences of its own, so all tokens are disjoint. `Exchange` is what the ranks do right; the others are
what runs just as well, and is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from executor import Executor
from torch import Tensor

from graphshard.core.specs import StepShape
from graphshard.runtime.model import Block, SegmentedModel, StepState, blocks_of


class Exchange:
    """All ranks' tokens, `[N * t, width]`; then for each rank the sum, in rank order, of the parts of its tokens."""

    def gather(self, tokens: Sequence[Tensor], rank: int) -> Tensor:
        return torch.cat(list(tokens))

    def bring_back(self, partial: Sequence[Tensor], rank: int) -> Tensor:
        mine = [part.chunk(len(partial))[rank] for part in partial]
        total = mine[0].clone()
        for part in mine[1:]:
            total += part
        return total


class SplicedOutputs(Exchange):
    """Wrong: of each rank's result the features that are its share, side by side instead of summed."""

    def bring_back(self, partial: Sequence[Tensor], rank: int) -> Tensor:
        count = len(partial)
        mine = [part.chunk(count)[rank] for part in partial]
        return torch.cat([part.tensor_split(count, dim=1)[at] for at, part in enumerate(mine)], dim=1)


class SplicedActivations(Exchange):
    """Wrong: each rank makes its share of the activations of its own tokens, as if they were everybody's."""

    def gather(self, tokens: Sequence[Tensor], rank: int) -> Tensor:
        return torch.cat([tokens[rank]] * len(tokens))


class SlicedRank(Executor):
    """One of the ranks: whole weights for the model's segments, slices for those of its blocks."""

    def __init__(self, model: SegmentedModel, weights: Mapping[str, Tensor], rank: int, world_size: int) -> None:
        super().__init__(model, weights)
        self.world_size = world_size
        for block in model.spec().blocks:
            slices = {name: weights[name].chunk(world_size)[rank].clone() for name in block.weights}
            assert all(len(slices[name]) * world_size == len(weights[name]) for name in slices)
            seen = {**weights, **slices}
            self.weights |= {one.path: {name: seen[name] for name in one.reads} for one in block.sliced_segments}

    def more_buffers(self, shape: StepShape) -> dict[str, Tensor]:
        (block, *others), t = self.model.spec().blocks, shape.batch_size * shape.tokens_per_sequence
        assert all((one.width_in, one.width_out) == (block.width_in, block.width_out) for one in others)
        sizes = {
            "tp.tokens": (t, block.width_in),
            "tp.gathered": (self.world_size * t, block.width_in),
            "tp.partial": (self.world_size * t, block.width_out),
            "tp.summed": (t, block.width_out),
        }
        dtype = getattr(torch, block.dtype)
        return {name: torch.full(size, torch.nan, dtype=dtype) for name, size in sizes.items()}


class SlicedGroup:
    """A step of all ranks."""

    def __init__(
        self, model: SegmentedModel, weights: Mapping[str, Tensor], world_size: int, exchange: Exchange
    ) -> None:
        self.model, self.exchange = model, exchange
        self.ranks = [SlicedRank(model, weights, rank, world_size) for rank in range(world_size)]
        self.after_block: Callable[[Block, list[StepState], list[Tensor]], None] | None = None
        """Told of each block, the ranks' states after it, and their hidden states before it."""

    def step(self, tokens: Sequence[Tensor], positions: Sequence[Tensor]) -> list[Tensor]:
        """Each rank's logits `[batch, t, vocab]`."""
        states = [rank.state(StepShape(*mine.shape)) for rank, mine in zip(self.ranks, tokens, strict=True)]
        for state, mine, at in zip(states, tokens, positions, strict=True):
            state.buffer("tokens").copy_(mine)
            state.buffer("positions").copy_(at)
        blocks = {block.spec.begin: block for block in blocks_of(self.model)}
        at = 0
        with torch.inference_mode():
            while at < len(self.model.segments):
                block = blocks.get(at)
                if block is None:
                    for state in states:
                        state.run(self.model.segments[at : at + 1])
                    at += 1
                else:
                    self._run(block, states)
                    at = block.spec.end
        return [state.buffer("logits").clone() for state in states]

    def _run(self, block: Block, states: list[StepState]) -> None:
        before = [state.buffer("hidden").clone() for state in states]
        for state in states:
            state.run([block.prepare])
        tokens = [state.buffer("tp.tokens") for state in states]
        for rank, state in enumerate(states):
            state.buffer("tp.gathered").copy_(self.exchange.gather(tokens, rank))
            state.run([block.compute])
        partial = [state.buffer("tp.partial") for state in states]
        for rank, state in enumerate(states):
            state.buffer("tp.summed").copy_(self.exchange.bring_back(partial, rank))
            state.run([block.finish])
        if self.after_block is not None:
            self.after_block(block, states, before)
