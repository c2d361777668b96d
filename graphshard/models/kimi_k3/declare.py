"""What layers declare, in the order in which a step runs it: weights, segments, buffers, and what is kept and why.

A segment is cut at every large weight. Small weights wait for the next segment, which reads them first.

Weights of several projections with one input may be fused, one on top of the other. Each projection is a gemm of its
own either way, on its own rows and into its own columns: so a fused model gives the bits of an unfused one, and a fused
weight costs the launches of its projections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from graphshard.core.specs import BufferSpec, KeptWeight, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.models.blocks import add_product
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.specs.replicated import SMALL
from graphshard.runtime.model import Block, Segment, StepState

Source = Callable[[StepState], Tensor]
"""Makes what a gemm reads."""
Work = Callable[[StepState], None]
Pieces = Callable[[], Iterable[WeightSpec]]
"""Called by those who load: a hundred thousand experts are not named for a plan."""


class Declarations:
    """Collects a model."""

    def __init__(self, config: KimiK3ModelConfig, is_fused: bool) -> None:
        self.config = config
        self.segments: list[Segment] = []
        self.blocks: list[Block] = []
        self.transposed: set[str] = set()
        """Weights that are stored [in, out]; the pieces they are made of are [out, in]."""
        self._is_fused = is_fused
        self._weights: dict[str, WeightSpec] = {}
        self._pieces: dict[str, Pieces] = {}
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

    def spec(self, name: str, folds: Sequence[Segment] = ()) -> ModelSpec:
        """The model so far, with `folds` between its steps."""
        kept = tuple(KeptWeight(weight, reason) for weight, reason in self._kept.items())
        segments = tuple(segment.spec for segment in self.segments)
        folded = tuple(fold.spec for fold in folds)
        blocks = tuple(block.spec for block in self.blocks)
        return ModelSpec(name, tuple(self._weights.values()), segments, kept, folded, blocks=blocks)

    def pieces(self) -> dict[str, tuple[WeightSpec, ...]]:
        """The published tensors of which each weight is made, one after the other in bytes (or see `transposed`)."""
        return {
            name: tuple(self._pieces[name]()) if name in self._pieces else (spec,)
            for name, spec in self._weights.items()
        }

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
        """A cache of this layer, or of the model; `shape` begins with the largest batch."""
        full = name if self._layer is None else f"layers.{self._layer}.{name}"
        self._caches[full] = BufferSpec(full, tuple(shape), dtype or self.config.dtype, "cache")
        return full

    def small(self, name: str, shape: Sequence[int], reason: str, dtype: str = "") -> str:
        """A weight that the next segment reads too, and that stays resident; its full name."""
        spec = WeightSpec(self.name_of(name), tuple(shape), dtype or self.config.dtype)
        self._declare(spec, reason)
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
        pieces: Pieces | None = None,
    ) -> None:
        """A weight, and the segment `name` that reads it. `pieces`: the published tensors that it is made of."""
        spec = WeightSpec(self.name_of(weight), tuple(shape), self.config.dtype)
        self._declare(spec, keep)
        if pieces is not None:
            self._pieces[spec.name] = pieces
        label = f"{self.label}{name}"
        self.segments.append(Segment(SegmentSpec(label, self._layer, (*self._waiting, spec.name)), run))
        self._waiting.clear()

    @property
    def label(self) -> str:
        """What names of segments here begin with: the place inside the layer, and a dot; or nothing."""
        where = self._block.removeprefix(f"model.layers.{self._layer}").removeprefix("model").strip(".")
        return f"{where}." if where else ""

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
        is_apart: bool = False,
    ) -> None:
        """Projections of one input, by name with their out_features; fused they are one weight, called `name`.

        Their results stand side by side in the activation `target`. `before` runs in the first of their segments.
        Those that are `is_apart` are never fused.
        """
        self.activation(target, sum(rows.values()))
        held = [(name, rows)] if self._is_fused and not is_apart else [(one, {one: out}) for one, out in rows.items()]
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
                pieces=partial(self._rows, self._block, dict(inside), in_features),
            )
            column, before = column + height, None

    def add(self, name: str, out_features: int, in_features: int, source: Source, *, keep: str = "") -> None:
        """A projection whose result is added to the residual."""
        weight = f"{name}.weight"
        self.read(name, weight, (out_features, in_features), _accumulate(self.name_of(weight), source), keep=keep)

    def add_transposed(self, name: str, out_features: int, in_features: int, source: Source) -> str:
        """The same where the weight is stored [in, out]; its full name."""
        weight = f"{name}.weight"
        full = self.name_of(weight)
        published = WeightSpec(full, (out_features, in_features), self.config.dtype)
        self.transposed.add(full)
        self.read(
            name,
            weight,
            (in_features, out_features),
            lambda state: add_product(state, source(state), full),
            pieces=lambda: (published,),
        )
        return full

    def then(self, work: Work) -> None:
        """Let the segment that was declared last do `work` too, at its end."""
        first = self.segments.pop()

        def run(state: StepState) -> None:
            first.run(state)
            work(state)

        self.segments.append(Segment(first.spec, run))

    def _rows(self, block: str, rows: Mapping[str, int], in_features: int) -> list[WeightSpec]:
        return [
            WeightSpec(f"{block}.{name}.weight", (out, in_features), self.config.dtype) for name, out in rows.items()
        ]

    def _declare(self, spec: WeightSpec, reason: str) -> None:
        assert spec.name not in self._weights, f"{spec.name} was declared twice"
        self._weights[spec.name] = spec
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
