"""Modes of a plan's blocks by the cost model: `cost.dual`'s times of each, where a machine's figures are known."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from graphshard.core.plan import Mode, Transport
from graphshard.core.specs import BlockSpec, ModelSpec, StepShape
from graphshard.cost.dual import Block, BlockGemm, DualEstimate
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.plain import plain_facts
from graphshard.cost.segments import BlockTime, step_times
from graphshard.schedule.dual import Chosen


@dataclass(frozen=True)
class CostChooser:
    """Chooses the faster mode of each block, of gathered weights and slices alone (`schedule.dual.ModeChooser`)."""

    hardware: HardwareSpec
    world_size: int
    transport: Transport
    is_ahead: bool
    """Whether gathers run ahead, beside what is computed before the block."""
    _done: dict[tuple[object, ...], Chosen] = field(default_factory=dict, compare=False, repr=False)

    @property
    def headline(self) -> str:
        """Whose figures they are."""
        beside = "beside what is computed before the block" if self.is_ahead else "right before the block"
        return f"by the cost model with the figures of {self.hardware.name}, gathers {beside}"

    def choose(self, model: ModelSpec, block: BlockSpec, tokens_per_rank: int) -> Chosen:
        """The faster mode of `block`; blocks with equal weights behind equal segments are estimated once."""
        before = _before(model, block)
        shapes = tuple((model.weight(name).shape, model.weight(name).dtype) for name in block.weights)
        key = (model.digest, shapes, tuple(model.segments[i].name for i in before), tokens_per_rank)
        if key not in self._done:
            self._done[key] = self._choose(model, block, before, tokens_per_rank)
        return self._done[key]

    def _choose(self, model: ModelSpec, block: BlockSpec, before: range, tokens_per_rank: int) -> Chosen:
        hide_us = 0.0
        if self.is_ahead:
            facts = plain_facts(model, self.world_size)
            times = step_times(model, facts, StepShape(1, tokens_per_rank), self.hardware)
            hide_us = sum(times.segments[i].alone_us for i in before)
        estimate = DualEstimate(as_cost_block(model, block), self.hardware, self.world_size, self.transport, hide_us)
        times_us = estimate.times(tokens_per_rank * self.world_size)
        sliced_us, gather_us = times_us.tensor_parallel_us, times_us.gather_us
        if sliced_us is None:
            return Chosen("gather", estimate.block.why_not_sliced(self.world_size))
        mode: Mode = "tensor_parallel" if sliced_us < gather_us else "gather"
        both = sorted((sliced_us, gather_us))
        return Chosen(mode, f"predicted: {both[0]:.3g} us against {both[1]:.3g} us at {tokens_per_rank} tokens a rank")


def block_times(model: ModelSpec, hardware: HardwareSpec, world_size: int, tokens_per_rank: int) -> list[BlockTime]:
    """Each block of `model` in slices, by itself, in steps of so many tokens of each rank."""
    times = []
    for block in model.blocks:
        estimate = DualEstimate(as_cost_block(model, block), hardware, world_size)
        times.append(BlockTime(*estimate.sliced_parts_us(tokens_per_rank * world_size)))
    return times


def _before(model: ModelSpec, block: BlockSpec) -> range:
    """The segments between the block before and `block`: what its gather may run beside, one block ahead."""
    return range(max((other.end for other in model.blocks if other.end <= block.begin), default=0), block.begin)


def as_cost_block(model: ModelSpec, block: BlockSpec) -> Block:
    """`block` as the cost model has it: its weights lie [intermediate, features], columns and rows alike."""
    gemms = []
    for name in block.weights:
        weight = model.weight(name)
        if len(weight.shape) < 2:
            continue  # a bias is no gemm; its bytes count
        intermediate = weight.shape[0]
        features = math.prod(weight.shape[1:])
        is_column = name in block.columns
        sizes = (intermediate, features) if is_column else (features, intermediate)
        gemms.append(BlockGemm(*sizes, weight.dtype, "column" if is_column else "row"))
    num_bytes = sum(model.weight(name).num_bytes for name in block.weights)
    return Block(block.name, "mlp", tuple(gemms), num_bytes, 1)
