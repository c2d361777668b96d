"""A lower bound on exposed time for a memory target, to hold plans against. No plan of any tried setup is below it.

Weights are sand: what is gathered is a mixture of the cheapest units, with no order among them. Kept are
- slots: with k of them, the largest unit is one slot, and any k neighbouring units lie in k slots, so that of n units
  at most ceil(n / k) are larger than the second slot, and (k - 1) times as many larger than the smallest;
- sizes: a layer's unit is at most the layer, and a byte costs no less than in the largest unit that is allowed;
- time: what is read from some segment on is all that may be gathered after it, and with one slot nothing is gathered
  while another unit is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphshard.cost.problem import Problem, Setup
from graphshard.cost.search import MAX_PATTERNS, Search

_NEVER = float("inf")
SHARES = (0.5, 0.25, 0.75, 0.0, 1.0)
"""Of a t0, see `_Sand`; each gives a bound, the likely largest first."""
SLACK = 1e-9
"""Of a bound for a range, since times are rounded."""
Gathered = tuple[float, float]
"""(bytes, us): what is gathered at least, and how long that takes at least."""
Priced = tuple[float, float]
"""(us a byte, bytes that there are at it)."""


def exposed_bound_us(search: Search, target_bytes: int) -> float:
    """What every choice that frees `target_bytes` exposes at least, a mean over the step shapes; inf if none does."""
    if target_bytes <= 0:
        return 0.0
    found = _NEVER
    below: dict[tuple[int, str], float] = {}  # least gathers of setups that hide as much: more are of no interest
    for setup in sorted(search.setups, key=lambda setup: setup.prefetch_depth):
        same = (setup.world_size, setup.units)
        exposed, us = _setup_bound_us(search, setup, target_bytes, below.get(same, _NEVER))
        found = min(found, exposed)
        if setup.prefetch_depth:
            below[same] = min(us, below.get(same, _NEVER))
    return found


def _setup_bound_us(search: Search, setup: Setup, target_bytes: int, below_us: float) -> tuple[float, float]:
    """(exposed, gathers) of `setup` at least; inf where the gathers are no less than `below_us`."""
    problem = search.problem
    if setup.world_size == 1:
        return _NEVER, _NEVER
    gathered = _by_layer if setup.units == "layer" else _by_weight if setup.units == "weight" else _by_any
    hidden = _hidden_us(problem, setup)
    last = max(weight.begin for weight in problem.weights)
    before_last = [profile[last] for profile in problem.profiles]
    read = _read_times(problem) if setup.prefetch_depth == 0 else [0.0] * len(hidden)
    largest = _largest_unit(problem, setup)  # the last unit is read after its gather
    found = least = _NEVER
    for size, us in gathered(search, setup, target_bytes, below_us):
        taken = max(0.0, size - largest)
        exposed = [
            max(0.0, us - most, us + taken * per - before)
            for most, per, before in zip(hidden, read, before_last, strict=True)
        ]
        found, least = min(found, problem.mean(exposed)), min(least, us)
    return found, least


def _largest_unit(problem: Problem, setup: Setup) -> int:
    if setup.units == "weight":
        return max(weight.num_bytes for weight in problem.weights)
    return max(sum(problem.weights[index].num_bytes for index in layer.weights) for layer in problem.layers)


def _hidden_us(problem: Problem, setup: Setup) -> list[float]:
    """For each step shape, the most that gathers can take with nothing exposed.

    That is, for any segment, the compute before it and the gathers of all weights that are first read after it.
    """
    after: list[tuple[int, float]] = []
    us = 0.0
    layer, tail = -1, 0
    closed = 0.0  # gathers of the layers behind
    for weight in reversed(problem.weights):
        after.append((weight.begin, us))
        if setup.units == "layer":
            if weight.layer != layer:
                layer, tail, closed = weight.layer, 0, us
            tail += weight.num_bytes
            us = closed + problem.gather(tail, setup.world_size)
        else:
            us += problem.gather(weight.num_bytes, setup.world_size)
    last = dict(reversed(after))  # of weights that begin together, none is after
    return [min(profile[begin] + us for begin, us in last.items()) for profile in problem.profiles]


def _by_layer(search: Search, setup: Setup, target_bytes: int, below_us: float) -> Iterator[Gathered]:
    """One unit a layer, at most: every largest unit, second slot and smallest slot."""
    kinds = {layer.kind: layer for layer in search.problem.layers}
    patterns = {kind: [p.num_bytes for p in search.patterns(layer, None)] for kind, layer in kinds.items()}
    if any(len(sizes) >= MAX_PATTERNS for sizes in patterns.values()):
        yield from _by_any(search, setup, target_bytes, below_us)  # some sizes were left out
        return
    depth = setup.prefetch_depth
    sizes = sorted({size for one in patterns.values() for size in one} - {0})
    sand = [_Sand(search, setup, patterns, sizes, share) for share in (SHARES if depth else (0.0,))]
    best = below_us
    for index, largest in enumerate(sizes):
        # smallest slots [begin, end) of sizes; there is one slot without any depth
        ranges = [(0 if depth else index, index + 1)]
        while ranges:
            begin, end = ranges.pop()
            wanted = _gross(target_bytes + largest + depth * sizes[begin], setup)
            us = _most_of(sand, wanted, (largest, largest, sizes[begin], sizes[end - 1]), best)
            if end - begin > 1:
                if us < best * (1 + SLACK):
                    middle = (begin + end) // 2
                    ranges += [(middle, end), (begin, middle)]
                continue
            if us < best and depth > 1:
                us = _NEVER
                for second in sizes[begin : index + 1]:
                    wanted = _gross(target_bytes + largest + second + (depth - 1) * sizes[begin], setup)
                    us = min(us, _most_of(sand, wanted, (largest, second, sizes[begin], sizes[begin]), best))
            if us < best:
                best = us if depth else best  # with one slot fewer bytes may take longer to read, so all count
                yield wanted, us


def _most_of(sand: Sequence[_Sand], wanted: float, sizes: tuple[int, int, int, int], enough: float) -> float:
    """The largest bound of any share; the first one that is `enough` will do."""
    us = 0.0
    for one in sand:
        us = max(us, one.fill(wanted, *sizes))
        if us >= enough:
            break
    return us


class _Sand:
    """Prices of bytes in units of each size, and how many bytes there are at a price.

    For each depth large units in a row there is a smaller one between them, with a t0 of its own. `share` of that t0 is
    charged to the large ones and taken off the small ones: with any share the sum is no more than what is paid.
    """

    def __init__(
        self, search: Search, setup: Setup, patterns: dict[int, list[int]], limits: Sequence[int], share: float
    ) -> None:
        """`limits` are all that is asked of `fill`, rising."""
        self.setup = setup
        layers = search.problem.layers
        self.counts = {kind: sum(layer.kind == kind for layer in layers) for kind in patterns}
        self.depth = setup.prefetch_depth
        self.per_slot = -(-len(layers) // (self.depth + 1))
        request = search.problem.request
        self.extra_us = share * request.hardware.link(request.transport).t0_us if self.depth else 0.0
        per_large = self.extra_us / max(self.depth, 1)
        self.large = {kind: self._prices(search, sizes, limits, per_large) for kind, sizes in patterns.items()}
        small = {kind: self._prices(search, sizes, limits, -self.extra_us) for kind, sizes in patterns.items()}
        self.small = {limit: self._all_of(small, limit) for limit in limits}
        self.taken: dict[tuple[int, int, int], tuple[list[Priced], int]] = {}

    def _prices(
        self, search: Search, sizes: Sequence[int], limits: Sequence[int], more_us: float
    ) -> dict[int, tuple[int, float]]:
        """For each limit (the largest of a kind's units up to it, least us a byte of any up to it)."""
        found = {}
        last, price = 0, _NEVER
        held = set(sizes)
        for limit in limits:
            if limit in held:
                last = limit
                price = min(price, (search.problem.gather(limit, self.setup.world_size) + more_us) / limit)
            found[limit] = (last, price)
        return found

    def _all_of(self, prices: dict[int, dict[int, tuple[int, float]]], limit: int) -> list[Priced]:
        """All layers' units of up to `limit` bytes."""
        rows = [(*prices[kind][limit], count) for kind, count in self.counts.items()]
        return [(price, float(size * count)) for size, price, count in rows if size]

    def fill(self, wanted: float, largest: int, second: int, above: int, smallest: int) -> float:
        """The cheapest; inf if it is too little.

        A slot's worth of layers has units up to `largest`, as many for each further slot but one up to `second`, all
        others up to `smallest`; larger than `above` are no others. That is the smallest, or the first one of a range:
        what is found then is no more than with any of the range.
        """
        left = self.depth * self.per_slot
        rows, taken = self._take(min(left, self.per_slot), largest, second)
        more, _ = self._take(left - taken, second, above)
        us = -self.depth * self.extra_us
        for price, there in sorted(rows + more + self.small[smallest]):
            if there >= wanted:
                return us + wanted * price
            us += there * price
            wanted -= there
        return us if wanted <= 0 else _NEVER

    def _take(self, most: int, limit: int, above: int) -> tuple[list[Priced], int]:
        """`most` layers' units of up to `limit` bytes that are above another size, largest first; and how many."""
        key = (most, limit, above)
        if key not in self.taken:
            left = most
            rows = []
            for kind in sorted(self.counts, key=lambda kind: -self.large[kind][limit][0]):
                size, price = self.large[kind][limit]
                many = min(self.counts[kind], left) if size > above else 0
                left -= many
                if many:
                    rows.append((price, float(size * many)))
            self.taken[key] = rows, most - left
        return self.taken[key]


def _by_weight(search: Search, setup: Setup, target_bytes: int, below_us: float) -> Iterator[Gathered]:
    """Each weight alone: the cheapest bytes first, for every largest weight."""
    problem = search.problem
    sizes = sorted(weight.num_bytes for weight in problem.weights)
    for largest in dict.fromkeys(sizes):
        slots = largest + setup.prefetch_depth * sizes[0]
        wanted = _gross(target_bytes + slots, setup)
        left = wanted
        us = 0.0
        allowed = [size for size in sizes if size <= largest]
        for size in sorted(allowed, key=lambda size: problem.gather(size, setup.world_size) / size):
            taken = min(float(size), left)
            us += problem.gather(size, setup.world_size) * taken / size
            left -= taken
            if left <= 0:
                if us < below_us:
                    yield wanted, us
                break


def _by_any(search: Search, setup: Setup, target_bytes: int, below_us: float) -> Iterator[Gathered]:
    """Any units inside layers: the best price of any size up to the largest layer, one slot of the smallest weight."""
    problem = search.problem
    weights = problem.weights
    wanted = _gross(target_bytes + min(weight.num_bytes for weight in weights), setup)
    if wanted > sum(weight.num_bytes for weight in weights):
        return
    layer = _largest_unit(problem, setup)
    link = problem.request.hardware.link(problem.request.transport)
    slowest = problem.gather(layer, setup.world_size) - link.t0_us
    prices = [problem.gather(weight.num_bytes, setup.world_size) / weight.num_bytes for weight in weights]
    us = wanted * min(slowest / layer, *prices)
    if us < below_us:
        yield wanted, us


def _gross(freed: float, setup: Setup) -> float:
    """Bytes to shard so that `freed` are saved, slots apart."""
    return freed * setup.world_size / (setup.world_size - 1)


def _read_times(problem: Problem) -> list[float]:
    """For each step shape, us that a sharded byte is read at least: nothing is gathered meanwhile with one slot."""
    parts: list[list[int]] = []  # (begin, end, bytes) of weights whose reading overlaps
    for weight in problem.weights:
        if parts and weight.begin < parts[-1][1]:
            parts[-1][1] = max(parts[-1][1], weight.end)
            parts[-1][2] += weight.num_bytes
        else:
            parts.append([weight.begin, weight.end, weight.num_bytes])
    bytes_read = [next(size for begin, end, size in parts if begin <= w.begin < end) for w in problem.weights]
    return [
        min((profile[w.end] - profile[w.begin]) / size for w, size in zip(problem.weights, bytes_read, strict=True))
        for profile in problem.profiles
    ]
