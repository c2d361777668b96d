"""What layers declare, in the order in which a step runs it: weights, segments, buffers, and what is kept and why.

A segment is cut at every large weight. Small weights wait for the next segment, which reads them first.

Weights of several projections with one input may be fused, one on top of the other. Each projection is a gemm of its
own either way, on its own rows and into its own columns: so a fused model gives the bits of an unfused one, and a fused
weight costs the launches of its projections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from graphshard.core.specs import BufferSpec, KeptWeight, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.specs.replicated import SMALL
from graphshard.runtime.model import Segment, StepState

Source = Callable[[StepState], Tensor]
"""Makes what a gemm reads."""
Work = Callable[[StepState], None]


class Declarations:
    """Collects a model."""

    def __init__(self, config: KimiK3ModelConfig, is_fused: bool) -> None:
        self.config = config
        self.segments: list[Segment] = []
        self.pieces: dict[str, tuple[WeightSpec, ...]] = {}
        """The published tensors of which each weight is made, one after the other in bytes."""
        self._is_fused = is_fused
        self._weights: dict[str, WeightSpec] = {}
        self._kept: dict[str, str] = {}
        self._activations: dict[str, tuple[int, str]] = {}
        self._caches: dict[str, BufferSpec] = {}
        self._waiting: list[str] = []
        self._layer: int | None = None
        self._block = ""

    def at(self, layer: int | None, block: str) -> None:
        """What follows is part of `layer`; its weights' names begin with `block`."""
        self._layer, self._block = layer, block

    def name_of(self, name: str) -> str:
        """The full name of the weight `name` of this block."""
        return f"{self._block}.{name}" if self._block else name

    def spec(self, name: str) -> ModelSpec:
        """The model so far."""
        kept = tuple(KeptWeight(weight, reason) for weight, reason in self._kept.items())
        return ModelSpec(name, tuple(self._weights.values()), tuple(segment.spec for segment in self.segments), kept)

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Activations `[tokens of the step, width]`, and caches."""
        num_tokens = shape.batch_size * shape.tokens_per_sequence
        activations = (
            BufferSpec(name, (num_tokens, width), dtype, "activation")
            for name, (width, dtype) in self._activations.items()
        )
        return (*activations, *self._caches.values())

    def activation(self, name: str, width: int, dtype: str = "") -> str:
        """A buffer `[tokens of the step, width]`, of the model's dtype unless another is named; layers share it."""
        found = self._activations.setdefault(name, (width, dtype or self.config.dtype))
        assert found == (width, dtype or self.config.dtype), f"{name} was declared as {found}"
        return name

    def cache(self, name: str, shape: Sequence[int], dtype: str = "") -> str:
        """A cache of this layer; `shape` begins with the largest batch."""
        full = f"layers.{self._layer}.{name}"
        self._caches[full] = BufferSpec(full, tuple(shape), dtype or self.config.dtype, "cache")
        return full

    def small(self, name: str, shape: Sequence[int], reason: str, dtype: str = "") -> str:
        """A weight that the next segment reads too, and that stays resident; its full name."""
        spec = WeightSpec(self.name_of(name), tuple(shape), dtype or self.config.dtype)
        self._declare(spec, (spec,), reason)
        self._waiting.append(spec.name)
        return spec.name

    def norm(self, name: str, width: int) -> str:
        """The weight of a norm, see `small`."""
        return self.small(name, (width,), SMALL["norm"])

    def read(
        self,
        name: str,
        weight: str,
        shape: Sequence[int],
        run: Work,
        *,
        keep: str = "",
        pieces: Sequence[tuple[str, tuple[int, ...]]] = (),
    ) -> str:
        """A weight, and the segment `name` that reads it; its full name. `pieces`: published names and shapes."""
        spec = WeightSpec(self.name_of(weight), tuple(shape), self.config.dtype)
        made_of = tuple(WeightSpec(self.name_of(piece), size, spec.dtype) for piece, size in pieces)
        self._declare(spec, made_of or (spec,), keep)
        where = self._block.removeprefix(f"model.layers.{self._layer}").removeprefix("model").strip(".")
        label = f"{where}.{name}" if where else name
        self.segments.append(Segment(SegmentSpec(label, self._layer, (*self._waiting, spec.name)), run))
        self._waiting.clear()
        return spec.name

    def project(
        self,
        name: str,
        rows: Mapping[str, int],
        in_features: int,
        source: Source,
        target: str,
        *,
        before: Work | None = None,
        keep: str = "",
    ) -> None:
        """Projections of one input, by name with their out_features; fused they are one weight, called `name`.

        Their results stand side by side in the activation `target`. `before` runs in the first of their segments.
        """
        self.activation(target, sum(rows.values()))
        held = [(name, rows)] if self._is_fused else [(one, {one: out}) for one, out in rows.items()]
        column = 0
        for weight, inside in held:
            height = sum(inside.values())
            full, columns = self.name_of(f"{weight}.weight"), (column, tuple(inside.values()))
            self.read(
                weight,
                f"{weight}.weight",
                (height, in_features),
                _multiply(full, source, target, columns, before),
                keep=keep,
                pieces=[(f"{piece}.weight", (out, in_features)) for piece, out in inside.items()],
            )
            column, before = column + height, None

    def add(self, name: str, out_features: int, in_features: int, source: Source, *, keep: str = "") -> None:
        """A projection whose result is added to the residual."""
        weight = f"{name}.weight"
        self.read(name, weight, (out_features, in_features), _accumulate(self.name_of(weight), source), keep=keep)

    def _declare(self, spec: WeightSpec, pieces: tuple[WeightSpec, ...], reason: str) -> None:
        assert spec.name not in self._weights, f"{spec.name} was declared twice"
        self._weights[spec.name] = spec
        self.pieces[spec.name] = pieces
        if reason:
            self._kept[spec.name] = reason


def buffer(name: str) -> Source:
    """The buffer `name` as it is."""
    return lambda state: state.buffer(name)


def normalise(norm: str, eps: float) -> Work:
    """`normed = RMSNorm(hidden)` with the weight `norm`."""

    def run(state: StepState) -> None:
        state.buffer("normed").copy_(rms_norm(state.buffer("hidden"), state.weight(norm), eps))

    return run


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x * x) + eps) * weight` over the last dimension, in x's dtype."""
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def _multiply(
    weight: str, source: Source, target: str, columns: tuple[int, tuple[int, ...]], before: Work | None
) -> Work:
    """`target[:, columns] = source @ weight.T`, a gemm for each projection; `columns`: (begin, their widths)."""

    def run(state: StepState) -> None:
        if before is not None:
            before(state)
        x, whole, out = source(state), state.weight(weight), state.buffer(target)
        (column, widths), row = columns, 0
        for width in widths:
            part = out[:, column + row : column + row + width]
            torch.mm(x, whole[row : row + width].t(), out=part)
            row += width

    return run


def _accumulate(weight: str, source: Source) -> Work:
    """`hidden += source @ weight.T`: the residual is the gemm's accumulator."""

    def run(state: StepState) -> None:
        state.buffer("hidden").addmm_(source(state), state.weight(weight).t())

    return run
