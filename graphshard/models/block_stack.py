"""A model of nothing but blocks, to be measured: what dual mode decides about, and no attention beside it.

    first_norm | gate_proj up_proj down_proj (each layer, a block) | last_norm

A step feeds `x` `[tokens, H]` and gives `y` `[tokens, H]`: one sequence a token, since no token sees another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.models.blocks import MlpBlock, add_product
from graphshard.runtime.model import Block, Segment, StepState

EPS = 1e-5


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Of each layer's MLP: gate and up `[intermediate, hidden]`, down stored `[intermediate, hidden]`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    dtype: str = "float32"


class BlockStack:
    """A SegmentedModel; each layer is a block."""

    def __init__(self, sizes: BlockSizes) -> None:
        self.sizes = sizes
        self._weights: dict[str, WeightSpec] = {}
        self._segments: list[Segment] = [self._outer("first_norm", "x", "hidden")]
        self._blocks: list[Block] = []
        for layer in range(sizes.num_layers):
            self._add_layer(layer)
        self._segments.append(self._outer("last_norm", "hidden", "y"))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of a step."""
        return tuple(self._segments)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """One a layer."""
        return tuple(self._blocks)

    def spec(self) -> ModelSpec:
        """Weights in the order in which a step first reads them."""
        segments = tuple(segment.spec for segment in self._segments)
        blocks = tuple(block.spec for block in self._blocks)
        return ModelSpec("blocks", tuple(self._weights.values()), segments, blocks=blocks)

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Input, output, and three activations."""
        n, s = shape.batch_size * shape.tokens_per_sequence, self.sizes
        wide = (n, s.hidden_size)
        return (
            BufferSpec("x", wide, s.dtype, "input"),
            BufferSpec("y", wide, s.dtype, "output"),
            BufferSpec("hidden", wide, s.dtype, "activation"),
            BufferSpec("normed", wide, s.dtype, "activation"),
            BufferSpec("mlp", (n, s.intermediate_size), s.dtype, "activation"),
        )

    def random_weights(self, seed: int = 0) -> dict[str, Tensor]:
        """The same for the same seed on every machine."""
        generator = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.sizes.dtype)
        values = {spec.name: torch.randn(spec.shape, generator=generator) for spec in self.spec().weights}
        return {name: self._scaled(name, value).to(dtype) for name, value in values.items()}

    def _scaled(self, name: str, values: Tensor) -> Tensor:
        """Standard normal `values` brought to a size that keeps activations in bounds."""
        if name.endswith("norm.weight"):
            return 1 + values / 10
        is_down = name.endswith("down_proj.weight")
        return values / float((self.sizes.intermediate_size if is_down else self.sizes.hidden_size) ** 0.5)

    def _weight(self, name: str, *shape: int) -> str:
        self._weights[name] = WeightSpec(name, shape, self.sizes.dtype)
        return name

    def _outer(self, name: str, source: str, target: str) -> Segment:
        weight = self._weight(f"{name}.weight", self.sizes.hidden_size)

        def run(state: StepState) -> None:
            state.buffer(target).copy_(_normed(state, source) * state.weight(weight))

        return Segment(SegmentSpec(name, None, (weight,)), run)

    def _add_layer(self, layer: int) -> None:
        size = (self.sizes.intermediate_size, self.sizes.hidden_size)
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (self._weight(f"layers.{layer}.{name}.weight", *size) for name in names)

        def begin(state: StepState) -> None:
            normed = state.buffer("normed").copy_(_normed(state, "hidden"))
            torch.mm(normed, state.weight(gate).t(), out=state.buffer("mlp"))

        def activated(state: StepState, gathered: Tensor) -> Tensor:
            mlp = state.buffer("mlp").view(len(gathered), -1)  # fewer features of more tokens
            torch.mm(gathered, state.weight(gate).t(), out=mlp)
            return _swiglu(state, mlp, gathered, up)

        def go_on(state: StepState) -> None:
            _swiglu(state, state.buffer("mlp"), state.buffer("normed"), up)

        first = len(self._segments)
        self._add(layer, "gate_proj", gate, begin)
        self._add(layer, "up_proj", up, go_on)
        self._add(layer, "down_proj", down, lambda state: add_product(state, state.buffer("mlp"), down))
        mlp = MlpBlock(
            name=f"layers.{layer}.mlp",
            layer=layer,
            begin=first,
            end=len(self._segments),
            label="mlp_",
            columns=(gate, up),
            down=down,
            hidden_size=self.sizes.hidden_size,
            dtype=self.sizes.dtype,
            source=lambda state: _normed(state, "hidden"),
            activated=activated,
        )
        self._blocks.append(mlp.block())

    def _add(self, layer: int, name: str, weight: str, run: Callable[[StepState], None]) -> None:
        self._segments.append(Segment(SegmentSpec(name, layer, (weight,)), run))


def _normed(state: StepState, name: str) -> Tensor:
    x = state.buffer(name)
    return F.rms_norm(x, x.shape[-1:], None, EPS)


def _swiglu(state: StepState, mlp: Tensor, x: Tensor, up: str) -> Tensor:
    """`mlp = silu(mlp) * (x @ up.T)`."""
    product = torch.empty_like(mlp)
    torch.mm(x, state.weight(up).t(), out=product)
    return F.silu(mlp, inplace=True).mul_(product)
