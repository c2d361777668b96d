"""Searching for the choice that exposes least: every choice of a small problem, spread choices of a large one.

A large model has few kinds of layers. For each kind the subsets of its weights are collapsed to one for each sum of
bytes (its patterns). A spread choice walks the layers and gives each the largest pattern that keeps the bytes gathered
so far below their share of the compute done so far; what a pattern is short of is due to the next layer. So gathers
arrive at an even rate, however coarse or fine the patterns are. `cap` bounds a layer's pattern, hence the slots. The
best spread choice is then improved by moving bytes to where the link idles.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from graphshard.cost.problem import Outcome, Placed, Problem, Setup
from graphshard.cost.shardable import LayerWeights

EXHAUSTIVE_CHOICES = 6000
"""Up to so many (subsets times setups) all are judged."""
MAX_PATTERNS = 512
"""Of one kind of layer."""
NUM_CAPS = 7
MAX_RAISES = 6
MIN_RAISE = 0.002
POLISH_ROUNDS = 6
POLISH_STEP = 0.7
HALVINGS = 4


@dataclass(frozen=True, slots=True)
class Pattern:
    """Weights of a layer, by their place in it; `num_bytes` of them together."""

    num_bytes: int
    members: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Menu:
    """The patterns that a layer may have, rising."""

    patterns: tuple[Pattern, ...]
    sizes: tuple[int, ...]
    """Bytes of each."""

    @classmethod
    def of(cls, patterns: Iterable[Pattern]) -> Menu:
        """Of these."""
        rising = tuple(patterns)
        return cls(rising, tuple(one.num_bytes for one in rising))


class Search:
    """Finds outcomes for a memory target. `seen` has every choice that was judged, for the frontier."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.setups = problem.request.setups()
        self.seen: dict[tuple[Setup, tuple[int, ...]], Outcome] = {}
        self.is_exhaustive = len(self.setups) << len(problem.weights) <= EXHAUSTIVE_CHOICES
        self._patterns: dict[tuple[int, int], tuple[Pattern, ...]] = {}
        self._sizes_of: dict[str, list[int]] = {}
        self._menus: dict[tuple[str, int], list[Menu]] = {}
        self._most_freed: Outcome | None = None
        self._dues = self._shares_of_compute()
        self._last_begin = (max(weight.begin for weight in problem.weights),)
        if self.is_exhaustive:
            for chosen in _subsets(len(problem.weights)):
                for setup in self.setups:
                    self.judge(problem.lay_out(chosen, setup))

    def judge(self, placed: Placed) -> Outcome:
        """The outcome of a choice, judged once."""
        key = (placed.setup, placed.chosen)
        if key not in self.seen:
            self.seen[key] = self.problem.judge(placed)
        return self.seen[key]

    def best_of(self, setup: Setup, target_bytes: int, limit_us: float = float("inf")) -> Outcome | None:
        """The best choice found under `setup` that frees `target_bytes`; None if none does, or none below `limit_us`.

        Choices whose gathers cannot be hidden below the limit are not judged, and what is above it is not improved.
        """
        if self.is_exhaustive:
            fits = [one for (its, _), one in self.seen.items() if its == setup and one.freed_bytes >= target_bytes]
            return min(fits, key=lambda one: one.rank, default=None)
        best: tuple[Outcome, int] | None = None
        spread = [(one, cap) for cap in self.caps(setup) if (one := self._evenly(setup, target_bytes, cap, limit_us))]
        for one, cap in sorted(spread, key=lambda pair: sum(pair[0].gathers)):
            least_us = min(limit_us, best[0].exposed_us if best else limit_us)
            if self.floor_us(sum(one.gathers), one.begins) > least_us:
                break
            outcome = self.judge(one)
            if best is None or outcome.rank < best[0].rank:
                best = outcome, cap
        if best is None or best[0].exposed_us > limit_us:
            return best[0] if best else None
        return self._polished(setup, target_bytes, *best)

    def _evenly(self, setup: Setup, target_bytes: int, cap: int, limit_us: float) -> Placed | None:
        """`spread` by compute, unless the price of its gathers alone is above the limit."""
        if self.price_floor_us(setup, target_bytes, cap) > limit_us:
            return None
        return self.spread(setup, target_bytes, cap, self._dues)

    def price_floor_us(self, setup: Setup, target_bytes: int, cap: int) -> float:
        """What freeing the target exposes at least in units of up to `cap` bytes: all at the best of their prices."""
        cheapest = min(self.problem.gather(size, setup.world_size) / size for size in self._sizes(setup) if size <= cap)
        return self.floor_us(_gross(target_bytes, setup) * cheapest, self._last_begin)

    def _polished(self, setup: Setup, target_bytes: int, best: Outcome, cap: int) -> Outcome:
        """Better neighbours of a spread choice, as long as there are any.

        Bytes move from layers that compute waits for to layers after which the link idles. What the last layer reads
        first is waited for earlier than what it reads last, so less of it may be better.
        """
        if best.exposed_us <= 0:
            return best
        dues = self._dues
        for _ in range(POLISH_ROUNDS if setup.units == "layer" else 0):
            moved = self._dues_after(best)
            placed = self.spread(setup, target_bytes, cap, moved, 0, HALVINGS)
            if placed is None or (outcome := self.judge(placed)).rank >= best.rank:
                break
            best, dues = outcome, moved
        num_last = len(self.problem.layers[-1].weights)
        for place in sorted({num_last // 2, num_last - 1} - {0}):
            placed = self.spread(setup, target_bytes, cap, dues, place, HALVINGS)
            if placed is not None and (outcome := self.judge(placed)).rank < best.rank:
                best = outcome
        return best

    def _dues_after(self, outcome: Outcome) -> list[float]:
        """Each layer's share of the link's time, moved towards what can be hidden there."""
        placed = self.problem.lay_out(outcome.chosen, outcome.setup)
        due = dict.fromkeys((layer.layer for layer in self.problem.layers), 0.0)
        layers = dict.fromkeys(self.problem.weights[index].layer for index in outcome.chosen)
        for layer, us, over in zip(layers, placed.gathers, self.problem.imbalance(placed), strict=True):
            due[layer] = max(0.0, us - POLISH_STEP * over)
        total = sum(due.values())
        return [us / total for us in due.values()] if total > 0 else self._dues

    def least_us(self, setup: Setup, target_bytes: int) -> float | None:
        """What the gathers of spread choices expose at least, whatever is hidden; None if none frees the target."""
        floors = []
        for cap in self.caps(setup):
            placed = self.spread(setup, target_bytes, cap, self._dues)
            if placed is not None:
                floors.append(self.floor_us(sum(placed.gathers), placed.begins))
        return min(floors, default=None)

    def floor_us(self, gathers_us: float, begins: Sequence[int]) -> float:
        """What gathers of this sum expose at least: they end before the last of `begins`."""
        last = begins[-1] if begins else 0
        return self.problem.mean([max(0.0, gathers_us - profile[last]) for profile in self.problem.profiles])

    def spread(
        self, setup: Setup, target_bytes: int, cap: int, dues: Sequence[float], last: int = 0, halvings: int = 0
    ) -> Placed | None:
        """The choice nearest to `dues` (each layer's share of the bytes) that frees the target; None if none does.

        A unit has at most `cap` bytes; the last layer's, weights from place `last` on. `halvings` of the last raise
        bring the freed bytes nearer to the target.
        """
        limits = self._limits(setup, cap, last)
        wanted, too_little = _gross(target_bytes + cap, setup), 0.0
        found = None
        for _ in range(MAX_RAISES):
            chosen, num_full = self._walk(limits, wanted, dues)
            if num_full == len(limits):
                break
            placed = self.problem.lay_out(chosen, setup)
            missing = _gross(target_bytes - placed.freed_bytes, setup)
            if missing <= 0:
                found = placed
                break
            too_little = wanted
            # layers that are full take no more
            wanted += max(missing, wanted * MIN_RAISE) * len(limits) / (len(limits) - num_full)
        if found is None:
            thinned = self._thinned(setup, target_bytes, limits)
            return thinned if thinned.freed_bytes >= target_bytes else None
        for _ in range(halvings if too_little else 0):
            middle = (too_little + wanted) / 2
            placed = self.problem.lay_out(self._walk(limits, middle, dues)[0], setup)
            if placed.freed_bytes >= target_bytes:
                found, wanted = placed, middle
            else:
                too_little = middle
        return found

    def caps(self, setup: Setup) -> tuple[int, ...]:
        """Bounds to try on the bytes of a unit, some of all that make a difference."""
        sizes = self._sizes(setup)
        if len(sizes) <= NUM_CAPS:
            return tuple(sizes)
        return tuple(sizes[round((len(sizes) - 1) * step / (NUM_CAPS - 1))] for step in range(NUM_CAPS))

    def _sizes(self, setup: Setup) -> list[int]:
        """What a unit's bytes can be, rising."""
        if setup.units not in self._sizes_of:
            sizes = {weight.num_bytes for weight in self.problem.weights}
            if setup.units != "weight":
                kinds = {layer.kind: layer for layer in self.problem.layers}
                sizes = {p.num_bytes for layer in kinds.values() for p in self.patterns(layer, None)} - {0}
            self._sizes_of[setup.units] = sorted(sizes)
        return self._sizes_of[setup.units]

    def patterns(self, layer: LayerWeights, largest: int | None) -> tuple[Pattern, ...]:
        """One subset for each sum of bytes, rising, of weights up to `largest`; of equal sums the one read last."""
        key = (layer.kind, -1 if largest is None else largest)
        if key not in self._patterns:
            found: dict[int, tuple[int, ...]] = {0: ()}
            for place in reversed(range(len(layer.weights))):
                size = self.problem.weights[layer.weights[place]].num_bytes
                if largest is not None and size > largest:
                    continue
                for num_bytes, members in list(found.items()):
                    found.setdefault(num_bytes + size, (place, *members))
                found = {size: found[size] for size in _thin(sorted(found))}
            self._patterns[key] = tuple(Pattern(size, found[size]) for size in sorted(found))
        return self._patterns[key]

    def all_within(self, setup: Setup, cap: int) -> Placed:
        """Everything in units of at most `cap` bytes: what frees most under that bound."""
        return self.problem.lay_out(self._members([menu.patterns[-1] for menu in self._limits(setup, cap)]), setup)

    def most_freed(self) -> Outcome:
        """The choice that frees most, whatever it exposes."""
        if self.is_exhaustive:
            return max(self.seen.values(), key=lambda one: (one.freed_bytes, -one.exposed_us))
        if self._most_freed is None:
            placed = [self.all_within(setup, cap) for setup in self.setups for cap in self.caps(setup)]
            self._most_freed = self.judge(max(placed, key=lambda one: one.freed_bytes))
        return self._most_freed

    def _limits(self, setup: Setup, cap: int, last: int = 0) -> list[Menu]:
        """The patterns that each layer may have; in the last one of weights from place `last` on."""
        key = (setup.units, cap)
        if key not in self._menus:
            self._menus[key] = self._all_limits(setup, cap)
        limits = self._menus[key]
        if last:
            late = Menu.of(one for one in limits[-1].patterns if not one.members or one.members[0] >= last)
            return [*limits[:-1], late]
        return limits

    def _all_limits(self, setup: Setup, cap: int) -> list[Menu]:
        kinds = {layer.kind: layer for layer in self.problem.layers}
        if setup.units == "weight":
            cut = {kind: Menu.of(self.patterns(layer, cap)) for kind, layer in kinds.items()}
        else:
            whole = {kind: self.patterns(layer, None) for kind, layer in kinds.items()}
            cut = {kind: Menu.of(p for p in patterns if p.num_bytes <= cap) for kind, patterns in whole.items()}
        return [cut[layer.kind] for layer in self.problem.layers]

    def _walk(self, limits: Sequence[Menu], wanted: float, dues: Sequence[float]) -> tuple[list[int], int]:
        """Give each layer what is due of `wanted` bytes, as far as patterns allow; and how many layers are full.

        What a pattern is short of is due to the next layer. What a full layer could not take is lost: a slot's gate
        keeps the next layer from using the time that is left.
        """
        owed = 0.0
        chosen: list[int] = []
        num_full = 0
        for layer, menu, due in zip(self.problem.layers, limits, dues, strict=True):
            owed += wanted * due
            if owed > 0:
                place = bisect_right(menu.sizes, owed) - 1
                owed -= menu.sizes[place]
                chosen += [layer.weights[member] for member in menu.patterns[place].members]
                if place == len(menu.sizes) - 1:
                    num_full += 1
                    owed = min(owed, 0.0)
        return chosen, num_full

    def _thinned(self, setup: Setup, target_bytes: int, limits: Sequence[Menu]) -> Placed:
        """All that the limits allow, less what the target does not need: taken from the first layers on."""
        picks = [menu.patterns[-1] for menu in limits]
        placed = self.problem.lay_out(self._members(picks), setup)
        spare = placed.freed_bytes - target_bytes
        for index, menu in enumerate(limits):
            if spare <= 0:
                break
            # a layer's slot may shrink with it, which is not counted on
            least = picks[index].num_bytes - _gross(spare, setup)
            smaller = menu.patterns[bisect_left(menu.sizes, least)]
            spare -= (picks[index].num_bytes - smaller.num_bytes) * (setup.world_size - 1) // setup.world_size
            picks[index] = smaller
        thinner = self.problem.lay_out(self._members(picks), setup)
        return thinner if thinner.freed_bytes >= target_bytes else placed

    def _members(self, picks: Sequence[Pattern]) -> list[int]:
        pairs = zip(self.problem.layers, picks, strict=True)
        return [layer.weights[place] for layer, pattern in pairs for place in pattern.members]

    def _shares_of_compute(self) -> list[float]:
        """For each layer, compute between it and the one before, as a share of all before the last; over all shapes."""
        problem = self.problem
        ends = [0.0] * len(problem.layers)
        for share, profile in zip(problem.shares, problem.profiles, strict=True):
            if profile[-1] > 0:
                ends = [
                    end + share * profile[one.begin] / profile[-1]
                    for end, one in zip(ends, problem.layers, strict=True)
                ]
        if ends[-1] <= 0:
            return [1.0 / len(ends)] * len(ends)
        return [(end - before) / ends[-1] for end, before in zip(ends, [0.0, *ends], strict=False)]


def _thin(sizes: list[int]) -> list[int]:
    """At most MAX_PATTERNS of them, the smallest and the largest included."""
    if len(sizes) <= MAX_PATTERNS:
        return sizes
    last = len(sizes) - 1
    return [sizes[round(last * step / (MAX_PATTERNS - 1))] for step in range(MAX_PATTERNS)]


def _gross(freed_bytes: float, setup: Setup) -> float:
    """Bytes to shard so that chunks save `freed_bytes`."""
    return freed_bytes * setup.world_size / max(setup.world_size - 1, 1)


def _subsets(num_weights: int) -> Iterator[tuple[int, ...]]:
    for size in range(num_weights + 1):
        yield from combinations(range(num_weights), size)
