"""What to do at a number of tokens: shard all, shard a part, or nothing; each with its reasons."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from graphshard.core.errors import SpecError
from graphshard.core.sizes import format_bytes
from graphshard.core.specs import StepShape
from graphshard.cost.frontier import Frontier, frontier
from graphshard.cost.problem import Outcome, Problem, ResidencyRequest, Setup
from graphshard.cost.published import published_ends
from graphshard.cost.residency import Residency

Answer = Literal["full", "partial", "none"]
HIDDEN_SHARE = 0.02
"""A gather is hidden if it exposes at most this share of the step: the first unit's is exposed in any plan."""
MAX_TOKENS = 2**17
"""Thresholds are looked for up to so many tokens a rank."""
NUM_POINTS = 17
FULL_SETUPS = (("layer", 1), ("layer", 2), ("weight", 2))


@dataclass(frozen=True)
class Recommendation:
    """An answer that can be printed, and the plan for it."""

    answer: Answer
    reasons: tuple[str, ...]
    full: Outcome
    """Everything sharded."""
    hardest: StepShape
    """Where a full gather exposes the largest share of the step: the plan is sought there."""
    residency: Residency | None
    """The plan to run; None: nothing to shard."""
    hides_from: int | None
    """Tokens a rank from which everything sharded is hidden; None: not up to MAX_TOKENS."""
    hides_between: tuple[int | None, int | None] | None
    """The same with a published machine's most and least favourable figures; None: the machine is no published one."""

    def lines(self) -> list[str]:
        """For people."""
        return [f"recommended: {self.answer}", *self.reasons]


def recommend(
    request: ResidencyRequest, max_share: float = HIDDEN_SHARE, like: Problem | None = None
) -> Recommendation:
    """Whether to gather everything at the request's step shapes, and if not, how much and why.

    A plan is hidden if at *every* step shape it exposes at most `max_share` of that step; the plan is searched for
    where that is hardest.

    Args:
        request: its step shapes are those that are served; how often each runs does not count here.
        max_share: of a replicated step that may be exposed.
        like: a problem of the same model, from which is taken over what does not differ.

    Raises:
        SpecError: `max_share` is no share; others as `Problem`.
    """
    if not 0 <= max_share < 1:
        raise SpecError(f"max_share is {max_share!r}: it is a share of the step, from 0 to below 1")
    advice = _Advice(request, max_share, like)
    full = advice.full
    how_far = (
        f"a full gather of {format_bytes(full.sharded_bytes)} over {full.setup.world_size} ranks takes "
        f"{full.gather_us / 1e3:,.1f} ms of the link a step; {advice.threshold_text()}"
    )
    partial = advice.most_hidden()
    if advice.is_hidden(full):
        why = f"it is hidden here: {advice.exposed_text(full)}"
        most = max(full.freed_bytes, partial.freed_bytes)
        residency = advice.front.residency(most) if most > 0 else None
        return advice.recommend("full", (how_far, why), residency)
    why = f"no full gather at {_shapes_text(request)}: it would have {advice.exposed_text(full)}"
    if partial.freed_bytes <= 0:
        nothing = f"nothing smaller is hidden within {max_share:.0%} of the step either: keep every weight resident"
        return advice.recommend("none", (how_far, why, nothing), None)
    residency = advice.front.residency(partial.freed_bytes)
    freed = format_bytes(partial.freed_bytes)
    part = f"a part is hidden: {freed} a rank are freed, net of slots, with {advice.exposed_text(residency.outcome)}"
    return advice.recommend("partial", (how_far, why, part), residency)


class _Advice:
    """What the sentences are made of."""

    def __init__(self, request: ResidencyRequest, max_share: float, like: Problem | None) -> None:
        self.request, self.max_share = request, max_share
        self.problem = problem = Problem(request, like)
        self.full = full_gather(problem)
        self.steps_us = [times.total_us for times in problem.times]
        shares = [us / step for us, step in zip(self.full.exposed_by_shape, self.steps_us, strict=True)]
        self.hardest = shares.index(max(shares))
        only = tuple(float(index == self.hardest) for index in range(len(shares)))
        self.front: Frontier = frontier(replace(request, shape_weights=only), NUM_POINTS, problem)

    def recommend(self, answer: Answer, reasons: tuple[str, ...], residency: Residency | None) -> Recommendation:
        """The answer with what holds for any."""
        return Recommendation(
            answer, reasons, self.full, self._hardest_shape, residency, self.hides_from, self.hides_between
        )

    @property
    def _hardest_shape(self) -> StepShape:
        return self.request.step_shapes[self.hardest]

    def is_hidden(self, outcome: Outcome) -> bool:
        """At every step shape."""
        pairs = zip(outcome.exposed_by_shape, self.steps_us, strict=True)
        return all(us <= self.max_share * step + 1e-6 for us, step in pairs)

    def most_hidden(self) -> Outcome:
        """The point of the frontier that frees most and is hidden; the first one frees nothing."""
        return max((one for one in self.front.points if self.is_hidden(one)), key=lambda one: one.freed_bytes)

    def exposed_text(self, outcome: Outcome) -> str:
        """What it exposes at the hardest step shape."""
        us, step = outcome.exposed_by_shape[self.hardest], self.steps_us[self.hardest]
        shape = self._hardest_shape
        tokens = shape.batch_size * shape.tokens_per_sequence
        at = "1 token" if tokens == 1 else f"{tokens:,} tokens"
        return f"{us / 1e3:,.2f} ms exposed in a step of {step / 1e3:,.1f} ms ({us / step:.0%}) at {at}"

    @cached_property
    def hides_from(self) -> int | None:
        """Tokens a rank from which a full gather is hidden."""
        return hides_from(self.request, self.max_share, self.problem)

    @cached_property
    def hides_between(self) -> tuple[int | None, int | None] | None:
        """`hides_from` at either end of what was published for the machine."""
        ends = published_ends(self.request.hardware)
        if ends is None:
            return None
        requests = (replace(self.request, hardware=one) for one in ends)
        least, most = (hides_from(one, self.max_share, self.problem) for one in requests)
        return most, least

    def threshold_text(self) -> str:
        """From where on it hides."""
        if self.hides_from is None:
            return f"up to {MAX_TOKENS:,} tokens a rank no step is long enough to hide it"
        text = f"it hides from about {_rounded(self.hides_from):,} tokens a rank"
        if self.hides_between is None:
            return text
        low, high = (f"{_rounded(one):,}" if one else f"over {MAX_TOKENS:,}" for one in self.hides_between)
        ends = published_ends(self.request.hardware)
        assert ends is not None, "hides_between has two ends"
        slow, fast = (one.link(self.request.transport).bytes_per_s / 1e9 for one in ends)
        return (
            f"{text}: {low} with gathers at {fast:.0f} GB/s and slow gemms, {high} at {slow:.0f} GB/s and fast ones, "
            "as far as published figures differ"
        )


def full_gather(problem: Problem) -> Outcome:
    """Everything sharded, in the setup that exposes least."""
    everything = tuple(range(len(problem.weights)))
    groups = problem.request.group_sizes or (problem.request.world_size,)
    setups = [Setup(size, units, depth) for size in groups for units, depth in FULL_SETUPS]
    return min((problem.evaluate(everything, setup) for setup in setups), key=lambda one: one.rank)


def hides_from(request: ResidencyRequest, max_share: float = HIDDEN_SHARE, like: Problem | None = None) -> int | None:
    """The fewest tokens a rank at which a full gather exposes at most `max_share` of the step; None if there is none.

    The tokens are one sequence's, from its beginning on. As many in more sequences, or late in a long one, read more
    caches and states, so they hide it too. `like` is a problem of the same model.
    """
    first = Problem(request, like)

    def is_hidden(tokens: int) -> bool:
        shape = StepShape(1, tokens)
        problem = Problem(replace(request, step_shapes=(shape,), shape_weights=(), context_tokens=tokens), first)
        return full_gather(problem).exposed_us <= max_share * _step_us(problem)

    high = 1
    while not is_hidden(high):
        if high >= MAX_TOKENS:
            return None
        high *= 2
    low = high // 2
    while high - low > max(1, high // 100):  # within 1 %
        middle = (low + high) // 2
        low, high = (low, middle) if is_hidden(middle) else (middle, high)
    return high


def _step_us(problem: Problem) -> float:
    return problem.mean([times.total_us for times in problem.times])


def _shapes_text(request: ResidencyRequest) -> str:
    tokens = sorted({shape.batch_size * shape.tokens_per_sequence for shape in request.step_shapes})
    return f"{tokens[0]:,} tokens a rank" if len(tokens) == 1 else f"{tokens[0]:,} to {tokens[-1]:,} tokens a rank"


def _rounded(tokens: int) -> int:
    """To two digits."""
    scale: int = 10 ** max(0, len(str(tokens)) - 2)
    return round(tokens / scale) * scale
