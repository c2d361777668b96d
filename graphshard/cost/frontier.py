"""The frontier: for every amount of memory freed, the least time exposed; each point is a plan that can be run."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.core.errors import SpecError
from graphshard.core.sizes import BYTE_UNITS
from graphshard.cost.problem import Outcome, Problem, ResidencyRequest
from graphshard.cost.residency import Residency, solve_with
from graphshard.cost.search import Search

DEFAULT_POINTS = 33


@dataclass(frozen=True)
class Frontier:
    """Points by freed bytes, rising; exposed time rises with them, since a point that another beats is not one."""

    points: tuple[Outcome, ...]
    search: Search
    """What was worked out, so that `residency` costs little."""

    def residency(self, target_bytes: int) -> Residency:
        """The plan for a target, with why others lost; SpecError if it cannot be met."""
        return solve_with(self.search, target_bytes)

    def within(self, max_exposed_us: float) -> Outcome:
        """The point that frees most and exposes at most so much; the first one frees nothing and exposes nothing."""
        return max(
            (one for one in self.points if one.exposed_us <= max_exposed_us + 1e-6),
            key=lambda one: one.freed_bytes,
            default=self.points[0],
        )

    def lines(self) -> list[str]:
        """A row for each point."""
        rows = ["freed GiB  exposed us  setup"]
        for one in self.points:
            freed = one.freed_bytes / BYTE_UNITS["GiB"]
            rows.append(f"{freed:9.2f}  {one.exposed_us:10,.0f}  {one.setup}, {one.num_units} units")
        return rows


def frontier(request: ResidencyRequest, num_points: int = DEFAULT_POINTS, like: Problem | None = None) -> Frontier:
    """Solve for targets from nothing to all that can be freed, and keep what nothing beats.

    `like` is a problem of the same model, from which is taken over what does not differ.

    Raises:
        SpecError: fewer than 2 points; others as `Problem`.
    """
    if num_points < 2:
        raise SpecError(f"a frontier of {num_points} points: it has at least 2, nothing and all")
    search = Search(Problem(request, like))
    if not search.is_exhaustive:
        most = search.most_freed().freed_bytes
        for step in range(1, num_points):
            best_exposed(search, most * step // (num_points - 1))
    return Frontier(unbeaten(search), search)


def best_exposed(search: Search, target_bytes: int) -> None:
    """Judge what may be best for a target, setup by setup; later ones only as far as they can be better."""
    limit = float("inf")
    for setup in search.setups:
        outcome = search.best_of(setup, target_bytes, limit)
        if outcome is not None:
            limit = min(limit, outcome.exposed_us)


def unbeaten(search: Search) -> tuple[Outcome, ...]:
    """Judged choices that no other frees as much as with less exposed; by freed bytes. The first frees nothing."""
    nothing = search.judge(search.problem.lay_out((), search.setups[0]))
    kept: list[Outcome] = []
    for one in sorted(search.seen.values(), key=lambda one: (-one.freed_bytes, one.rank)):
        if one.freed_bytes > 0 and (not kept or one.exposed_us < kept[-1].exposed_us - 1e-6):
            kept.append(one)
    return (nothing, *reversed(kept))
