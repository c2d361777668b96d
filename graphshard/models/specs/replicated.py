"""Which weights all ranks of a group hold alike under a deployment, and are worth sharding; a sentence for each.

| weight                                        | sharded                                                       |
|-----------------------------------------------|---------------------------------------------------------------|
| attention, MLP, shared expert, latent         | yes, where tensor parallelism has not cut it                    |
| routed experts                                | no, unless every rank holds all of them (ep 1, tp 1)             |
| router, norms, convolutions, biases           | no: small                                                       |
| embedding, head                               | no: one is read by rows, the other is a matter of policy         |
| what a server rewrites or reads in its own way | no: the part says why (`Part.keep`)                            |

`include` patterns replace the rules for what is held alike, and may not name anything that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from graphshard.core.errors import SpecError
from graphshard.core.patterns import first_match
from graphshard.core.sizes import format_bytes
from graphshard.core.specs import WeightSpec
from graphshard.cost.deployment import Deployment
from graphshard.models.specs.part import Part
from graphshard.schedule.units import DEFAULT_MIN_SHARD_BYTES

SHARED_ROLES = ("attention", "mlp", "shared_expert", "latent", "routed_expert")
SMALL = {
    "router": "a router is small and is read first in its layer",
    "norm": "a norm is small",
    "other": "it is no projection of a layer: small, or read by kernels of its own",
    "embedding": "a step reads a few rows of it: a gather would move all of them",
    "head": "it is read once, last in a step: include it if its bytes are wanted",
}


class Decision(NamedTuple):
    """Whether to shard, and why."""

    is_replicated: bool
    reason: str


def decide(part: Part, weight: WeightSpec, deployment: Deployment) -> Decision:
    """Whether `weight`, what a rank holds of `part`, is worth sharding over the group.

    Raises:
        SpecError: an include pattern names a weight whose ranks hold different bytes.
    """
    ranks = deployment.world_size
    differs = why_different(part, deployment)
    excluded = first_match(weight.name, deployment.exclude)
    if excluded:
        return Decision(False, f"excluded by {excluded}")
    included = first_match(weight.name, deployment.include)
    if included and differs and ranks > 1:
        raise SpecError(f"include pattern {included!r} names {weight.name}, which ranks do not hold alike: {differs}")
    if ranks == 1:
        return Decision(False, "one rank: nothing is held twice")
    if differs:
        return Decision(False, differs)
    if deployment.include:
        return Decision(bool(included), f"named by {included}" if included else "no include pattern names it")
    if part.keep:
        return Decision(False, part.keep)
    if part.role not in SHARED_ROLES:
        return Decision(False, SMALL[part.role])
    if weight.num_bytes < DEFAULT_MIN_SHARD_BYTES:
        return Decision(False, f"{format_bytes(weight.num_bytes)} are below {format_bytes(DEFAULT_MIN_SHARD_BYTES)}")
    return Decision(True, _why_equal(part, deployment))


def why_different(part: Part, deployment: Deployment) -> str:
    """Why the group's ranks hold different bytes of `part`; empty where they hold the same."""
    if part.role == "routed_expert" and deployment.expert_ranks > 1:
        mine = part.num_experts // deployment.expert_ranks
        return f"each rank holds {mine} of the {part.num_experts} routed experts (ep {deployment.expert_ranks})"
    if deployment.tp > 1 and part.split != "none":
        return f"tensor parallelism has cut it over {deployment.tp} ranks already"
    return ""


def check_patterns(names: Sequence[str], deployment: Deployment, model: str) -> None:
    """SpecError for a pattern that matches none of `names`."""
    for option in ("include", "exclude"):
        for pattern in getattr(deployment, option):
            if not any(fnmatchcase(name, pattern) for name in names):
                example = names[0] if names else "none at all"
                raise SpecError(f"{option} pattern {pattern!r} matches no weight of {model}: names look like {example}")


def _why_equal(part: Part, deployment: Deployment) -> str:
    ranks = deployment.world_size
    if part.split == "none" and deployment.tp > 1:
        return f"tensor parallelism does not cut it, so all {ranks} ranks hold it whole"
    whose = {
        "attention": "attention is data parallel",
        "mlp": "the MLP is data parallel with the attention",
        "shared_expert": "the shared expert runs on each rank's own tokens",
        "latent": "the latent projection runs on each rank's own tokens, before and after the experts",
        "routed_expert": "experts are not spread (ep 1)",
    }[part.role]
    return f"{whose}: all {ranks} ranks hold it whole"
