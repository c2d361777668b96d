"""Facts of a model of which nothing but its spec is known: each matrix is a gemm of the rank's own tokens."""

from __future__ import annotations

from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import LayerFact, ModelFacts, WeightFact


def plain_facts(model: ModelSpec, world_size: int) -> ModelFacts:
    """Attention, caches and all outside the layers cost nothing here, so a step is predicted too short, not too long.

    That errs to the safe side: what is hidden in the predicted step is hidden in the real one.
    """
    layer_of: dict[str, int | None] = {}
    for segment in model.segments:
        for name in segment.reads:
            layer_of.setdefault(name, segment.layer)
    why_resident = model.why_kept | model.why_whole
    weights = tuple(
        _fact(weight, layer_of.get(weight.name), why_resident.get(weight.name, "")) for weight in model.weights
    )
    numbers = dict.fromkeys(segment.layer for segment in model.segments if segment.layer is not None)
    hidden = max((fact.k for fact in weights), default=0)
    return ModelFacts(
        name=model.name,
        weights=weights,
        layers=tuple(LayerFact(layer, "none", "") for layer in numbers),
        hidden_size=hidden,
        vocab_size=0,
        activation_bytes_per_token=0,
        deployment=Deployment(world_size=world_size),
    )


def _fact(weight: WeightSpec, layer: int | None, why_kept: str) -> WeightFact:
    is_matrix = len(weight.shape) == 2
    n, k = weight.shape if is_matrix else (0, 0)
    is_sharded = is_matrix and layer is not None and weight.num_bytes > 0 and not why_kept
    return WeightFact(
        weight=weight.name,
        role="other",
        block=f"layers.{layer}" if layer is not None else "",
        n=n,
        k=k,
        dtype=weight.dtype,
        rows="rank" if is_matrix and layer is not None else "none",
        split="none",
        is_replicated=is_sharded,
        reason="a matrix that a layer reads" if is_sharded else why_kept or "no matrix of a layer",
    )
