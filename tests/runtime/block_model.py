"""A model with blocks whose numbers are small and whole: sums are exact in any order, so modes must agree to the bit.

`hidden` starts as the step's tokens. Every layer adds a weight of its own, which is always gathered, and then what its
block makes of it: relu-like features of `up` [features, width], brought back by `down` [features, width].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from graphshard.core.plan import Mode
from graphshard.core.specs import BlockSpec, BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.model import Block, Segment, StepState

WIDTH, FEATURES = 12, 48
"""Both can be cut over 2, 3 and 4 ranks."""
MODULUS = 64
"""Numbers of `hidden` are below it."""


class BlockModel:
    """`num_layers` layers; the last block is `narrow` of a dtype of its own if asked for."""

    def __init__(self, num_layers: int = 3, *, last_dtype: str = "float32", fail: Callable[[str], None] | None = None):
        """`fail(part)` is called inside a block's segments, and may raise."""
        self.num_layers, self.last_dtype = num_layers, last_dtype
        self._fail = fail or (lambda part: None)
        self.segments: tuple[Segment, ...] = ()
        self.blocks: tuple[Block, ...] = ()
        self.segments = (Segment(SegmentSpec("begin", None, ()), _begin),)
        for layer in range(num_layers):
            self._add_layer(layer)
        self.segments += (Segment(SegmentSpec("end", None, ()), _end),)

    def _add_layer(self, layer: int) -> None:
        bias, up, down = f"{layer}.bias", f"{layer}.up", f"{layer}.down"
        begin = len(self.segments) + 1
        self.segments += (
            Segment(SegmentSpec("bias", layer, (bias,)), _add_bias(bias)),
            Segment(SegmentSpec("up", layer, (up,)), _features(up)),
            Segment(SegmentSpec("down", layer, (down,)), _bring_back(down)),
        )
        parts = (
            SegmentSpec("tp.prepare", layer, ()),
            SegmentSpec("tp.compute", layer, (up, down)),
            SegmentSpec("tp.finish", layer, ()),
        )
        dtype = self.last_dtype if layer == self.num_layers - 1 else "float32"
        spec = BlockSpec(f"{layer}.mlp", layer, begin, begin + 2, (up,), (down,), WIDTH, WIDTH, dtype, *parts)
        runs = (self._prepare, self._compute(up, down), self._finish)
        self.blocks += (Block(spec, *(Segment(part, run) for part, run in zip(parts, runs, strict=True))),)

    def spec(self) -> ModelSpec:
        weights = []
        for layer in range(self.num_layers):
            weights.append(WeightSpec(f"{layer}.bias", (64, WIDTH), "float32"))
            weights += [WeightSpec(f"{layer}.{name}", (FEATURES, WIDTH), "float32") for name in ("up", "down")]
        specs = tuple(segment.spec for segment in self.segments)
        return ModelSpec("blocks", tuple(weights), specs, blocks=tuple(block.spec for block in self.blocks))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        num_tokens = shape.batch_size * shape.tokens_per_sequence
        return (
            BufferSpec("tokens", (num_tokens, WIDTH), "float32", "input"),
            BufferSpec("hidden", (num_tokens, WIDTH), "float32", "activation"),
            BufferSpec("features", (num_tokens, FEATURES), "float32", "activation"),
            BufferSpec("result", (num_tokens, WIDTH), "float32", "output"),
        )

    def tensors(self, version: int = 0) -> dict[str, Tensor]:
        """The checkpoint: whole numbers, -1 to 2."""
        generator = torch.Generator().manual_seed(version)
        return {
            weight.name: torch.randint(-1, 3, weight.shape, generator=generator).to(torch.float32)
            for weight in self.spec().weights
        }

    def expected(self, tokens: Tensor, version: int = 0, num_slices: int = 1) -> Tensor:
        """What a step makes of `tokens`, whoever computes it; a narrow block rounds each of `num_slices` partial sums,
        and their sum."""
        weights, hidden = self.tensors(version), tokens.clone()
        for layer in range(self.num_layers):
            hidden = (hidden + weights[f"{layer}.bias"].sum(0)).remainder(MODULUS)
            made = (hidden @ weights[f"{layer}.up"].T).remainder(16)
            added = made @ weights[f"{layer}.down"]
            if num_slices > 1:
                dtype: torch.dtype = getattr(torch, self.blocks[layer].spec.dtype)
                slices = zip(made.chunk(num_slices, 1), weights[f"{layer}.down"].chunk(num_slices), strict=True)
                added = torch.stack([(part @ down).to(dtype).float() for part, down in slices]).sum(0).to(dtype).float()
            hidden = (hidden + added).remainder(MODULUS)
        return hidden

    # --- a block on slices ---

    def _prepare(self, state: StepState) -> None:
        self._fail("prepare")
        state.buffer("tp.tokens").copy_(state.buffer("hidden"))

    def _compute(self, up: str, down: str) -> Callable[[StepState], None]:
        def run(state: StepState) -> None:
            self._fail("compute")
            made = (state.buffer("tp.gathered").to(torch.float32) @ state.weight(up).T).remainder(16)
            state.buffer("tp.partial").copy_(made @ state.weight(down))

        return run

    def _finish(self, state: StepState) -> None:
        self._fail("finish")
        hidden = state.buffer("hidden")
        hidden.copy_((hidden + state.buffer("tp.summed")).remainder(MODULUS))


@dataclass(frozen=True)
class UpTo:
    """A mode chooser: slices up to so many tokens of a rank."""

    tokens: int
    headline: str = "the test says so"

    @dataclass(frozen=True)
    class Choice:
        mode: Mode
        reason: str = "the test says so"

    def choose(self, model: ModelSpec, block: BlockSpec, tokens_per_rank: int) -> Choice:
        del model, block
        return UpTo.Choice("tensor_parallel" if tokens_per_rank <= self.tokens else "gather")


def _begin(state: StepState) -> None:
    state.buffer("hidden").copy_(state.buffer("tokens"))


def _end(state: StepState) -> None:
    state.buffer("result").copy_(state.buffer("hidden"))


def _add_bias(name: str) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        hidden = state.buffer("hidden")
        hidden.copy_((hidden + state.weight(name).sum(0)).remainder(MODULUS))

    return run


def _features(name: str) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        state.buffer("features").copy_((state.buffer("hidden") @ state.weight(name).T).remainder(16))

    return run


def _bring_back(name: str) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        hidden = state.buffer("hidden")
        hidden.copy_((hidden + state.buffer("features") @ state.weight(name)).remainder(MODULUS))

    return run
