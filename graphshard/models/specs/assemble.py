"""From a whole model and a deployment to what planning sees: one rank's ModelSpec and its facts."""

from __future__ import annotations

from collections.abc import Iterable

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.cost.deployment import Deployment
from graphshard.cost.facts import ModelFacts, PlanningModel, Rows, WeightFact
from graphshard.models.specs.cutting import Held, check_heads, held_by_a_rank
from graphshard.models.specs.formats import kept_dtype
from graphshard.models.specs.part import Part, Parts
from graphshard.models.specs.replicated import check_patterns, decide

ACTIVATION_BYTES = 2
"""bfloat16."""


def assemble(model: Parts, deployment: Deployment) -> PlanningModel:
    """What one rank of `deployment` holds of `model`, with the decision and the costs of each weight.

    Raises:
        SpecError: a token is sent to more experts than there are, the deployment does not divide the model, or a
            pattern names nothing or what cannot be sharded.
    """
    check_heads(model.num_heads, deployment, model.name)
    weights, facts = [], []
    for part in model.parts:
        if part.top_k > part.num_experts:
            raise SpecError(
                f"{model.name} sends a token to {part.top_k} of the {part.num_experts} routed experts of {part.block}: "
                f"there are at most {part.num_experts}; correct the config"
            )
        held = held_by_a_rank(part, deployment)
        weight = WeightSpec(part.name, held.shape, kept_dtype(part, deployment.weights))
        weights.append(weight)
        facts.append(_fact(part, held, weight, deployment))
    check_patterns([weight.name for weight in weights], deployment, model.name)
    spec = ModelSpec(model.name, tuple(weights), tuple(model.segments))
    return PlanningModel(
        spec,
        ModelFacts(
            name=model.name,
            weights=tuple(facts),
            layers=tuple(model.layers),
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            activation_bytes_per_token=_activation_bytes(model.hidden_size, facts),
            deployment=deployment,
            notes=tuple(model.notes),
        ),
    )


def _fact(part: Part, held: Held, weight: WeightSpec, deployment: Deployment) -> WeightFact:
    decision = decide(part, weight, deployment)
    return WeightFact(
        weight=part.name,
        role=part.role,
        block=part.block,
        n=held.n,
        k=held.k,
        dtype=weight.dtype,
        rows=_rows(part),
        split=part.split,
        is_replicated=decision.is_replicated,
        reason=decision.reason,
        num_matrices=held.num_matrices,
        num_experts=part.num_experts,
        top_k=part.top_k,
    )


def _rows(part: Part) -> Rows:
    if not part.is_gemm:
        return "none"
    return "routed" if part.role == "routed_expert" else "rank"


def _activation_bytes(hidden_size: int, facts: Iterable[WeightFact]) -> int:
    """A token's residual and normed row, and the widest gemm's input and output; the head's logits are not counted.

    A token has `top_k` rows in the gemms of routed experts.
    """
    widest = max(((fact.n + fact.k) * fact.num_rows(1) for fact in facts if fact.role != "head"), default=0)
    return ACTIVATION_BYTES * (2 * hidden_size + widest)
