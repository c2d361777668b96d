"""A weight of a whole model, before a deployment cuts it over ranks: what every reader of models produces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphshard.core.specs import SegmentSpec
from graphshard.cost.facts import LayerFact, Role, Split


@dataclass(frozen=True, slots=True)
class Part:
    """One weight, whole. `out_axis` and `in_axis` are the axes of its gemm's n and k; None where there is no gemm."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    block: str
    """Weights that are used together: see WeightFact."""
    out_axis: int | None = None
    in_axis: int | None = None
    split: Split = "none"
    packed: int = 1
    """Values in one element along `in_axis`: 2 for 4-bit values in pairs, 32 for a scale of 32 values."""
    num_experts: int = 0
    """Routed experts, which axis 0 counts."""
    top_k: int = 0
    heads: int = 0
    """Heads that `split` must not cut: key and value heads may be fewer than ranks; 0 where that is no matter."""
    is_large: bool = False
    """A matrix that has FP8 kernels; small or delicate ones keep their dtype."""
    keep: str = ""
    """Why it stays resident under any deployment, one sentence; empty where the rules decide."""

    @property
    def is_gemm(self) -> bool:
        """Whether a step multiplies by it; it looks up embeddings, and scales of 4-bit values are no operand."""
        return self.out_axis is not None and self.role != "embedding" and self.packed <= 2


@dataclass(frozen=True)
class Parts:
    """A whole model."""

    name: str
    parts: Sequence[Part]
    segments: Sequence[SegmentSpec]
    layers: Sequence[LayerFact]
    """Of one rank already."""
    hidden_size: int
    vocab_size: int
    num_heads: int = 0
    """Query heads, which tensor parallelism must divide; 0 where that is not known."""
    notes: Sequence[str] = field(default=())
    """What of the model is left out, one sentence each."""
