"""The residency problem as arithmetic: weights that may be sharded, step shapes, and what a choice frees and exposes.

A choice is a set of weights and a `Setup`. Its units, slots and gates are the scheduler's own; its time is

    gather i begins when gather i - 1 has ended and the slot's last reader is done
    compute waits at the first segment that reads unit i for the end of gather i

which is what `timeline.predict` walks op by op, but for one thing: here compute is as fast beside a gather as alone.
The gathers of two plans that free equal bytes slow compute about equally, so it would not change which one is better.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.errors import SpecError
from graphshard.core.sizes import align_up
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.cost.facts import ModelFacts
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.kernels import gather_us
from graphshard.cost.segments import DEFAULT_CONTEXT_TOKENS, StepTimes, segment_kinds, step_times
from graphshard.cost.shardable import layers_of, shardable_weights
from graphshard.schedule.slots import assign_slots, issue_order
from graphshard.schedule.units import unit_cap


@dataclass(frozen=True, slots=True)
class Setup:
    """How chosen weights are gathered: the options of `make_plan` beside which weights."""

    world_size: int
    units: str
    """`layer`, `weight`, or `bytes:CAP`."""
    prefetch_depth: int
    """Slots are the fewest for it: one more than the depth unless segments read two units."""

    def __str__(self) -> str:
        return f"units {self.units}, prefetch_depth {self.prefetch_depth}, {self.world_size} ranks"


@dataclass(frozen=True)
class ResidencyRequest:
    """What is asked. Everything beside the memory target, which `solve` and `frontier` take."""

    model: ModelSpec
    facts: ModelFacts
    hardware: HardwareSpec
    world_size: int
    step_shapes: tuple[StepShape, ...]
    shape_weights: tuple[float, ...] = ()
    """How often each step shape runs, in any unit; (): equally often."""
    group_sizes: tuple[int, ...] = ()
    """Shard groups to try; (): of `world_size` ranks."""
    units: tuple[str, ...] = ("layer", "weight")
    prefetch_depths: tuple[int, ...] = (0, 1, 2)
    transport: str = "pull"
    other_traffic: float = 0.0
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    alignment_bytes: int = 256

    def setups(self) -> tuple[Setup, ...]:
        """Every way to gather that is tried."""
        groups = self.group_sizes or (self.world_size,)
        return tuple(Setup(n, units, depth) for n in groups for units in self.units for depth in self.prefetch_depths)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a choice does."""

    setup: Setup
    chosen: tuple[int, ...]
    """Indices of the weights to shard, in order."""
    freed_bytes: int
    """On one rank, against every weight resident: net of chunks and slots."""
    exposed_us: float
    """Mean over the step shapes, by weight."""
    exposed_by_shape: tuple[float, ...]
    gather_us: float
    """All gathers of a step, one after the other."""
    sharded_bytes: int
    slot_bytes: int
    num_slots: int
    num_units: int

    @property
    def rank(self) -> tuple[float, float, int, int]:
        """Smaller is better: exposed time (to a nanosecond), then time on the link, then units, then slots."""
        return (round(self.exposed_us, 3), round(self.gather_us, 3), self.num_units, self.num_slots)


class Problem:
    """A request, worked out once: candidates, times of every segment at every shape, gathers by size."""

    def __init__(self, request: ResidencyRequest, like: Problem | None = None) -> None:
        """Refuses what no choice can meet; takes over from a problem of the same model what does not differ.

        Raises:
            SpecError: no rank, more ranks than can map each other's memory, no step shape, nothing that may be sharded.
        """
        _check(request)
        self.request = request
        if like is None or not _has_equal_weights(request, like.request):
            model, facts = request.model, request.facts
            self.weights, self.kept = shardable_weights(model, facts, request.alignment_bytes)
            self.layers, self.kinds = layers_of(self.weights), segment_kinds(model, facts)
            like = None
        else:
            self.weights, self.kept, self.layers, self.kinds = like.weights, like.kept, like.layers, like.kinds
        _check_ranks(request, len(self.weights))
        times = [
            step_times(request.model, request.facts, shape, request.hardware, request.context_tokens, kinds=self.kinds)
            for shape in request.step_shapes
        ]
        self.times: tuple[StepTimes, ...] = tuple(times)
        self.profiles = [one.ends_us for one in times]
        given = request.shape_weights or (1.0,) * len(times)
        self.shares = [weight / sum(given) for weight in given]
        self._gathers: dict[tuple[int, int], float] = {}
        self._placed: dict[tuple[Setup, tuple[int, ...]], Placed] = {}
        if like is not None and _has_equal_gathers(request, like.request):
            self._gathers, self._placed = like._gathers, like._placed

    def gather(self, num_bytes: int, world_size: int) -> float:
        """Time to gather a unit of `num_bytes`, padding included."""
        key = (num_bytes, world_size)
        if key not in self._gathers:
            request = self.request
            self._gathers[key] = gather_us(
                num_bytes, world_size, request.transport, request.hardware, request.other_traffic
            )
        return self._gathers[key]

    def mean(self, by_shape: Sequence[float]) -> float:
        """The mean over step shapes, by weight."""
        return sum(share * us for share, us in zip(self.shares, by_shape, strict=True))

    def lay_out(self, chosen: Sequence[int], setup: Setup) -> Placed:
        """Units, slots and bytes of a choice; `chosen` in order. No time is spent on step shapes."""
        key = (setup, tuple(chosen))
        if key not in self._placed:
            self._placed[key] = self._lay_out(*key)
        return self._placed[key]

    def _lay_out(self, setup: Setup, chosen: tuple[int, ...]) -> Placed:
        begins, ends, sizes = self._units(chosen, setup.units)
        order = issue_order(list(zip(begins, ends, strict=True)), setup.prefetch_depth, "inside")
        slots = assign_slots(order, sizes)
        alignment = setup.world_size * self.request.alignment_bytes
        padded_of = {size: align_up(size, alignment) for size in set(sizes)}
        us_of = {size: self.gather(padded, setup.world_size) for size, padded in padded_of.items()}
        padded = [padded_of[size] for size in sizes]
        slot_sizes: dict[int, int] = {}
        for slot, size in zip(slots, padded, strict=True):
            if size > slot_sizes.get(slot, -1):
                slot_sizes[slot] = size
        gathers = [us_of[size] for size in sizes]
        slot_bytes = sum(slot_sizes.values())
        freed = sum(sizes) - sum(padded) // setup.world_size - slot_bytes
        return Placed(setup, chosen, begins, ends, slots, gathers, freed, sum(sizes), slot_bytes, len(slot_sizes))

    def judge(self, placed: Placed) -> Outcome:
        """The exposed time of a choice at every step shape."""
        gates = _gates(placed.begins, placed.ends, placed.slots)
        by_shape = tuple(_exposed_us(profile, placed.begins, placed.gathers, gates) for profile in self.profiles)
        return Outcome(
            setup=placed.setup,
            chosen=placed.chosen,
            freed_bytes=placed.freed_bytes,
            exposed_us=self.mean(by_shape),
            exposed_by_shape=by_shape,
            gather_us=sum(placed.gathers),
            sharded_bytes=placed.sharded_bytes,
            slot_bytes=placed.slot_bytes,
            num_slots=placed.num_slots,
            num_units=len(placed.begins),
        )

    def evaluate(self, chosen: Sequence[int], setup: Setup) -> Outcome:
        """Both."""
        return self.judge(self.lay_out(chosen, setup))

    def imbalance(self, placed: Placed) -> list[float]:
        """For each unit, us by which its gather is too long (above 0) or could be longer (below), over all shapes.

        Too long is what compute waits for it; could be longer is what the link idles after it, for the next gate.
        A step shape counts as far as it has both: where the link never idles, moving bytes between units helps nothing.
        """
        gates = _gates(placed.begins, placed.ends, placed.slots)
        found = [0.0] * len(placed.begins)
        for share, profile in zip(self.shares, self.profiles, strict=True):
            waits, idles = _waits_and_idles(profile, placed.begins, placed.gathers, gates)
            both = min(sum(waits), sum(idles))
            if both > 0:
                of_waits, of_idles = share * both / sum(waits), share * both / sum(idles)
                found = [
                    one + of_waits * wait - of_idles * idle for one, wait, idle in zip(found, waits, idles, strict=True)
                ]
        return found

    def _units(self, chosen: Sequence[int], policy: str) -> tuple[list[int], list[int], list[int]]:
        """(begin, end, bytes) of each unit, grouped as `schedule.units` groups them."""
        cap = unit_cap(policy)
        weights = [self.weights[index] for index in chosen]
        begins: list[int] = []
        ends: list[int] = []
        sizes: list[int] = []
        layer, filled, end = -1, 0.0, -1
        for weight in weights:
            if weight.layer == layer and filled + weight.own_bytes <= cap:
                if weight.end > end:
                    ends[-1] = end = weight.end
                sizes[-1] += weight.num_bytes
                filled += weight.own_bytes
            else:
                layer, filled, end = weight.layer, weight.own_bytes, weight.end
                begins.append(weight.begin)
                ends.append(end)
                sizes.append(weight.num_bytes)
        return begins, ends, sizes


@dataclass(frozen=True, slots=True)
class Placed:
    """Units of a choice in the order of their gathers, with their slots; bytes of one rank."""

    setup: Setup
    chosen: tuple[int, ...]
    begins: list[int]
    ends: list[int]
    slots: Sequence[int]
    gathers: list[float]
    freed_bytes: int
    sharded_bytes: int
    slot_bytes: int
    num_slots: int


def _gates(begins: Sequence[int], ends: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int]]:
    """For each unit the segment before which its slot's gate lies, and the last unit waited for before; -1: none."""
    freed: dict[int, int] = {}
    gates = []
    for index, slot in enumerate(slots):
        gate = freed.get(slot, -1)
        gates.append((gate, bisect_left(begins, gate) - 1 if gate >= 0 else -1))
        freed[slot] = ends[index]
    return gates


def _exposed_us(
    profile: Sequence[float], begins: Sequence[int], gathers: Sequence[float], gates: Sequence[tuple[int, int]]
) -> float:
    """How long compute stands still; `profile[s]` is when segment s begins if nothing waits."""
    late = 0.0  # compute, against the profile
    lates: list[float] = []
    gathered = 0.0
    for begin, us, (gate, waited) in zip(begins, gathers, gates, strict=True):
        if gate >= 0:
            passed = profile[gate] + (lates[waited] if waited >= 0 else 0.0)
            if passed > gathered:
                gathered = passed
        gathered += us
        over = gathered - profile[begin]
        if over > late:
            late = over
        lates.append(late)
    return late


def _waits_and_idles(
    profile: Sequence[float], begins: Sequence[int], gathers: Sequence[float], gates: Sequence[tuple[int, int]]
) -> tuple[list[float], list[float]]:
    """The same recursion: for each unit, what compute waits for it, and what the link idles between it and the next."""
    lates: list[float] = []
    waits: list[float] = []
    idles = [0.0] * (len(begins) + 1)
    late = gathered = 0.0
    for index, (begin, us, (gate, waited)) in enumerate(zip(begins, gathers, gates, strict=True)):
        if gate >= 0:
            passed = profile[gate] + (lates[waited] if waited >= 0 else 0.0)
            idles[index] = max(0.0, passed - gathered)
            gathered = max(gathered, passed)
        gathered += us
        now = max(late, gathered - profile[begin])
        waits.append(now - late)
        late = now
        lates.append(late)
    return waits, idles[1:]


def _has_equal_weights(one: ResidencyRequest, other: ResidencyRequest) -> bool:
    """Whether the same may be sharded."""
    is_same = one.model is other.model and one.facts is other.facts
    return is_same and one.alignment_bytes == other.alignment_bytes


def _has_equal_gathers(one: ResidencyRequest, other: ResidencyRequest) -> bool:
    """Whether a unit's gather takes as long."""
    is_same = one.hardware is other.hardware and one.transport == other.transport
    return is_same and one.other_traffic == other.other_traffic


def _check(request: ResidencyRequest) -> None:
    if not request.step_shapes:
        raise SpecError("no step shape to plan for: name at least one, such as 1x1")
    if request.shape_weights and len(request.shape_weights) != len(request.step_shapes):
        raise SpecError(
            f"{len(request.shape_weights)} shape_weights for {len(request.step_shapes)} step shapes: give one for each"
        )
    if request.shape_weights and (min(request.shape_weights) < 0 or sum(request.shape_weights) <= 0):
        raise SpecError("shape_weights are numbers from 0 on, one of them above 0")
    for size in (request.world_size, *request.group_sizes):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise SpecError(f"{size!r} ranks: there is at least 1, and from 2 on there is something to free")


def _check_ranks(request: ResidencyRequest, num_weights: int) -> None:
    most = min(request.hardware.max_domain, num_weights)
    for size in (request.world_size, *request.group_sizes):
        if size > request.hardware.max_domain:
            raise SpecError(
                f"{size} ranks cannot map each other's memory on {request.hardware.name}: the largest shard group is "
                f"{request.hardware.max_domain}, so use groups of {most}"
            )
        if size > num_weights:
            raise SpecError(
                f"{size} ranks for {num_weights} weights that may be sharded: use at most {max(most, 1)} ranks, since "
                "further ones would hold no weight's worth of bytes"
            )
