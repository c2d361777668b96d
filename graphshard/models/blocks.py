"""An MLP as a block: its down_proj stored [in, out], and what runs where each rank has a slice of it.

    prepare   tp.tokens = what gate and up read
    compute   tp.partial = act(tp.gathered @ gate.T, tp.gathered @ up.T) @ down, all three a rank's slice of I features
    finish    hidden += tp.summed

Whole, the weights are gate and up [I, H] and down [I, H]: rank r's slice of each is rows [r I / N, (r + 1) I / N). The
activation works on single features, so a slice of it needs no other; the products with slices of down are summed over
the ranks, and one of them is no result.

Down lies the other way round than in checkpoints also where it is used as a whole, so a transposed gemm never differs
from the one that it is compared with: gathered and replicated runs of one model have the same bits. A model without
blocks multiplies by [out, in], and may round otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphshard.core.specs import BlockSpec, SegmentSpec
from graphshard.runtime.model import Block, Segment, StepState

Work = Callable[[StepState], None]
Source = Callable[[StepState], Tensor]
"""What gate and up read, `[t, H]`."""
Activated = Callable[[StepState, Tensor], Tensor]
"""The activations `[n, features]` of the input `[n, H]`; as many features as the weights it sees have."""


@dataclass(frozen=True)
class MlpBlock:
    """An MLP that is segments `[begin, end)` of its model where it is whole."""

    name: str
    layer: int
    begin: int
    end: int
    label: str
    """What its segments' names begin with."""
    columns: tuple[str, ...]
    """Gate, up, and their biases if they have any."""
    down: str
    """Stored [in, out]."""
    hidden_size: int
    """H, of its input and its result."""
    dtype: str
    source: Source
    """Makes the input `[t, H]`, of weights `source_reads`."""
    activated: Activated
    """Makes what stands before down."""
    source_reads: tuple[str, ...] = ()
    after: Work | None = None
    """What follows the sum, with weights `after_reads`."""
    after_reads: tuple[str, ...] = ()

    def block(self) -> Block:
        """Its segments in slices."""
        prepare = self._segment("prepare", self.source_reads, _prepare(self.source))
        compute = self._segment("compute", (*self.columns, self.down), _compute(self.activated, self.down))
        finish = self._segment("finish", self.after_reads, _finish(self.after))
        spec = BlockSpec(
            name=self.name,
            layer=self.layer,
            begin=self.begin,
            end=self.end,
            columns=self.columns,
            rows=(self.down,),
            width_in=self.hidden_size,
            width_out=self.hidden_size,
            dtype=self.dtype,
            prepare=prepare.spec,
            compute=compute.spec,
            finish=finish.spec,
        )
        return Block(spec, prepare, compute, finish)

    def _segment(self, what: str, reads: tuple[str, ...], run: Work) -> Segment:
        return Segment(SegmentSpec(f"{self.label}{what}", self.layer, reads), run)


def add_product(state: StepState, x: Tensor, down: str) -> None:
    """`hidden += x @ down` with `down` [in, out]: the residual is the gemm's accumulator."""
    state.buffer("hidden").addmm_(x, state.weight(down))


def _prepare(source: Source) -> Work:
    def run(state: StepState) -> None:
        state.buffer("tp.tokens").copy_(source(state))

    return run


def _compute(activated: Activated, down: str) -> Work:
    def run(state: StepState) -> None:
        activations = activated(state, state.buffer("tp.gathered"))
        torch.mm(activations, state.weight(down), out=state.buffer("tp.partial"))

    return run


def _finish(after: Work | None) -> Work:
    def run(state: StepState) -> None:
        state.buffer("hidden").add_(state.buffer("tp.summed"))
        if after is not None:
            after(state)

    return run
