"""Which weights to shard, and how, so that a memory target is met and the least time is exposed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.core.sizes import format_bytes
from graphshard.core.specs import StepShape
from graphshard.cost.bound import exposed_bound_us
from graphshard.cost.facts import ModelFacts
from graphshard.cost.patterns import exact_patterns
from graphshard.cost.problem import Outcome, Problem, ResidencyRequest, Setup
from graphshard.cost.search import Search

MUCH_WORSE = 2.0
"""Setups that must expose more than so many times the best found are not worked out (nor those 1 ms behind it)."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A setup that was not taken, its best choice (None: it was not worked out), and why."""

    setup: Setup
    outcome: Outcome | None
    reason: str

    def __str__(self) -> str:
        return f"{self.setup}: {self.reason}"


@dataclass(frozen=True)
class Residency:
    """A choice, with what it was held against."""

    target_bytes: int
    outcome: Outcome
    weights: tuple[str, ...]
    """To shard, in reading order; all others stay resident."""
    include: tuple[str, ...]
    """Patterns that name exactly these."""
    step_shapes: tuple[StepShape, ...]
    transport: str
    bound_us: float
    """No plan that meets the target exposes less (`cost.bound`)."""
    is_exact: bool
    """Whether every choice was judged."""
    rejected: tuple[Rejected, ...]

    def options(self) -> dict[str, Any]:
        """What `make_plan(model, outcome.setup.world_size, device, **options)` takes to run this choice."""
        if not self.weights:
            return {"replicated": True, "step_shapes": self.step_shapes}
        return {
            "units": self.outcome.setup.units,
            "prefetch_depth": self.outcome.setup.prefetch_depth,
            "include": self.include,
            "transport": self.transport,
            "step_shapes": self.step_shapes,
        }

    def lines(self) -> list[str]:
        """For people: the choice, then each setup that lost and why."""
        one = self.outcome
        exposed = ", ".join(
            f"{shape} {us:,.0f}" for shape, us in zip(self.step_shapes, one.exposed_by_shape, strict=True)
        )
        first = (
            f"{len(self.weights)} weights ({format_bytes(one.sharded_bytes)}) in {one.num_units} units: frees "
            f"{format_bytes(one.freed_bytes)} a rank, net of {one.num_slots} slots ({format_bytes(one.slot_bytes)})"
        )
        mean = f"mean by the search's weights {one.exposed_us:,.0f}, bound {self.bound_us:,.0f}"
        how = f"{one.setup}; us exposed by step shape: {exposed} ({mean})"
        return [first, how, *(f"not {one}" for one in self.rejected)]


def solve(request: ResidencyRequest, target_bytes: int) -> Residency:
    """The choice that frees `target_bytes` on each rank (net of slots) and exposes least.

    Small problems (`search.EXHAUSTIVE_CHOICES`) are solved exactly; in others sharded bytes are spread evenly over the
    compute, and `bound_us` says how much better any choice could be.

    Raises:
        SpecError: the target cannot be met; names the most that can be freed. Others as `Problem`.
    """
    return solve_with(Search(Problem(request)), target_bytes)


def solve_with(search: Search, target_bytes: int) -> Residency:
    """The same, with what an earlier search worked out."""
    _check_target(search, target_bytes)
    found: list[tuple[Setup, Outcome | None]] = []
    best: Outcome | None = None
    for setup in search.setups:
        limit = MUCH_WORSE * best.exposed_us + 1000.0 if best is not None else float("inf")
        outcome = search.best_of(setup, target_bytes, limit)
        found.append((setup, outcome))
        if outcome is not None and (best is None or outcome.rank < best.rank):
            best = outcome
    if best is None:
        raise _unreachable(search, target_bytes)
    problem = search.problem
    names = tuple(problem.weights[index].name for index in best.chosen)
    others = [(setup, outcome) for setup, outcome in found if outcome is not best]
    return Residency(
        target_bytes=target_bytes,
        outcome=best,
        weights=names,
        include=exact_patterns(names, [weight.name for weight in problem.request.model.weights]),
        step_shapes=problem.request.step_shapes,
        transport=problem.request.transport,
        bound_us=min(exposed_bound_us(search, target_bytes), best.exposed_us),
        is_exact=search.is_exhaustive,
        rejected=tuple(
            Rejected(setup, outcome, _why_not(search, setup, outcome, target_bytes, best)) for setup, outcome in others
        ),
    )


def bytes_for_kv_tokens(facts: ModelFacts, kv_tokens: int, context_tokens: int) -> int:
    """Bytes that hold `kv_tokens` more cached tokens, in sequences of `context_tokens`; recurrent states included."""
    if kv_tokens < 1 or context_tokens < 1:
        raise SpecError(f"{kv_tokens} KV tokens in sequences of {context_tokens}: both start at 1")
    sequences = -(-kv_tokens // context_tokens)
    return sequences * facts.request_bytes(context_tokens)


def _check_target(search: Search, target_bytes: int) -> None:
    if target_bytes < 0:
        raise SpecError(f"{target_bytes} bytes to free: a target starts at 0 B")
    if target_bytes > search.most_freed().freed_bytes:
        raise _unreachable(search, target_bytes)


def _unreachable(search: Search, target_bytes: int) -> SpecError:
    most = search.most_freed()
    if most.freed_bytes <= 0:
        return SpecError(
            f"{format_bytes(target_bytes)} cannot be freed: {most.setup.world_size} ranks free nothing of "
            f"{search.problem.request.model.name}, since slots take as much as its chunks save; nearest is 0 B"
        )
    gross = sum(weight.num_bytes for weight in search.problem.weights)
    return SpecError(
        f"{format_bytes(target_bytes)} cannot be freed: {format_bytes(gross)} are replicated, of which {most.setup} "
        f"frees {format_bytes(most.freed_bytes)} net of slots ({most.freed_bytes} B), the most there is"
    )


def _why_none(search: Search, setup: Setup, target_bytes: int, best: Outcome) -> str:
    least = None if search.is_exhaustive else search.least_us(setup, target_bytes)
    if least is None:
        most = max((search.all_within(setup, cap).freed_bytes for cap in search.caps(setup)), default=0)
        return f"frees at most {format_bytes(max(most, 0))}: its slots take the rest"
    return f"its gathers alone expose {least:,.0f} us a step or more, {least - best.exposed_us:,.0f} more"


def _why_not(search: Search, setup: Setup, outcome: Outcome | None, target_bytes: int, best: Outcome) -> str:
    if outcome is None:
        return _why_none(search, setup, target_bytes, best)
    over = outcome.exposed_us - best.exposed_us
    if over > 1e-3:
        return f"exposes {outcome.exposed_us:,.0f} us a step, {over:,.0f} more"
    longer = outcome.gather_us - best.gather_us
    if longer > 1e-3:
        return f"exposes as little, but its gathers take {longer:,.0f} us more of the link"
    if outcome.num_units != best.num_units:
        return f"exposes as little, but needs {outcome.num_units} gathers instead of {best.num_units}"
    if outcome.num_slots != best.num_slots:
        return f"exposes as little, but needs {outcome.num_slots} slots instead of {best.num_slots}"
    return "is as good; the first one found is kept"


def spread_of(search: Search, outcome: Outcome) -> tuple[int, ...]:
    """Bytes sharded in each layer that has something to shard, in order: how evenly they lie."""
    chosen = set(outcome.chosen)
    weights = search.problem.weights
    return tuple(
        sum(weights[index].num_bytes for index in layer.weights if index in chosen) for layer in search.problem.layers
    )
