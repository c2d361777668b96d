"""What one rank holds of a part under a deployment: its slice of a dense weight, its experts of the routed ones."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.core.errors import SpecError
from graphshard.cost.deployment import Deployment
from graphshard.models.specs.part import Part


@dataclass(frozen=True, slots=True)
class Held:
    """A part as a rank holds it."""

    shape: tuple[int, ...]
    n: int
    k: int
    num_matrices: int


def held_by_a_rank(part: Part, deployment: Deployment) -> Held:
    """The slice of `part` that one rank holds.

    Raises:
        SpecError: a size is not a multiple of the ranks that it is cut over; names the nearest that works.
    """
    shape = list(part.shape)
    matrices = 1
    if part.role == "routed_expert":
        shape[0] = matrices = _experts_of_a_rank(part, deployment)
    if _is_cut(part, deployment):
        _cut(part, shape, deployment.tp)
    n = k = 0
    if part.is_gemm and part.out_axis is not None and part.in_axis is not None:
        n, k = shape[part.out_axis], shape[part.in_axis] * part.packed
    return Held(tuple(shape), n, k, matrices)


def check_heads(num_heads: int, deployment: Deployment, model: str) -> None:
    """SpecError unless tensor parallelism gives each rank whole heads of attention; 0 heads are not known."""
    tp = deployment.tp
    if num_heads % tp:
        nearest = next(n for n in range(min(tp, num_heads), 0, -1) if num_heads % n == 0)
        raise SpecError(f"tp {tp} does not divide the {num_heads} attention heads of {model}: use tp {nearest}")


def _is_cut(part: Part, deployment: Deployment) -> bool:
    """Whether tensor parallelism cuts it: routed experts only where they are not spread whole."""
    if deployment.tp == 1 or part.split == "none":
        return False
    return part.role != "routed_expert" or deployment.expert_ranks == 1


def _experts_of_a_rank(part: Part, deployment: Deployment) -> int:
    ranks = deployment.expert_ranks
    if part.num_experts % ranks:
        nearest = next(n for n in range(min(ranks, part.num_experts), 0, -1) if part.num_experts % n == 0)
        raise SpecError(
            f"ep {ranks} does not divide the {part.num_experts} routed experts of {part.block}: use ep {nearest}"
        )
    return part.num_experts // ranks


def _cut(part: Part, shape: list[int], tp: int) -> None:
    """Divide the axis that `split` names, in place; what is no matrix (a bias, a convolution) its channels."""
    axis = part.in_axis if part.split == "row" else part.out_axis
    if axis is None:
        axis = len(shape) - 1 if part.role == "routed_expert" else shape.index(max(shape))
    if part.role in ("embedding", "head"):
        shape[axis] = -(-shape[axis] // tp)  # vocabularies are padded, as servers do
        return
    if part.role == "other" and shape[axis] % tp:
        return  # a few values that are not counted by head or channel
    ways = min(tp, part.heads) if part.heads else tp  # with fewer key heads than ranks, each rank holds one
    if shape[axis] % ways or (part.heads and (part.heads % ways or tp % ways)):
        nearest = next(n for n in range(ways, 0, -1) if shape[axis] % n == 0 and part.heads % n == 0)
        what = f"{part.heads} key and value heads" if part.heads else f"dimension {shape[axis]}"
        raise SpecError(f"tp {tp} does not divide the {what} of {part.name}: use tp {nearest}")
    shape[axis] //= ways
