"""What is worked out once and used many times gives what working it out each time would."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from small_models import machine, random_small_model

from graphshard.core.specs import StepShape
from graphshard.cost import bound
from graphshard.cost.deployment import Deployment
from graphshard.cost.frontier import frontier
from graphshard.cost.hardware import Measured
from graphshard.cost.problem import Problem, ResidencyRequest, Setup
from graphshard.cost.search import Search
from graphshard.cost.segments import SegmentKinds, segment_kinds, step_times
from graphshard.models.specs.kimi_k3 import kimi_k3
from graphshard.schedule.slots import IssueOrder, assign_slots

SHAPES = (StepShape(1), StepShape(400))
HARDWARE = machine()


def request_of(seed: int, num_weights: int = 24, **changes: object) -> ResidencyRequest:
    model, facts = random_small_model(seed, num_weights)
    return replace(ResidencyRequest(model, facts, HARDWARE, 2, SHAPES), **changes)  # type: ignore[arg-type]


def test_segments_of_one_kind_cost_what_each_costs_alone() -> None:
    k3 = kimi_k3(Deployment(world_size=8, ep=32, weights="fp8"))
    kinds = segment_kinds(k3.spec, k3.facts)
    assert len(kinds.works) < len(kinds.of) / 10, "most layers of a large model are alike"
    for index in range(0, len(kinds.of), 97):
        one = replace(k3.spec, segments=(k3.spec.segments[index],))
        alone = SegmentKinds((0,), (kinds.works[kinds.of[index]],))
        found = step_times(one, k3.facts, SHAPES[1], machine(), kinds=alone).segments[0]
        assert found == step_times(k3.spec, k3.facts, SHAPES[1], machine(), kinds=kinds).segments[index]


def test_a_measured_segment_goes_before_its_kind() -> None:
    model, facts = random_small_model(1, 6)
    name, layer = model.segments[0].name, model.segments[0].layer
    shape = StepShape(3, 2)
    measured = machine(measured=(Measured("segment", (model.digest, name, 3, 2), 123.0),))
    found = step_times(model, facts, shape, measured).segments
    plain = step_times(model, facts, shape, HARDWARE).segments
    assert layer is not None and found[0].alone_us == 123.0
    for segment, one, other in zip(model.segments, found, plain, strict=True):
        assert one.alone_us == 123.0 if segment.name == name else one == other


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shape_weights": (0.0, 1.0)},
        {"step_shapes": (StepShape(7),), "context_tokens": 1},
        {"hardware": machine(memory_bytes_per_s=3e9)},
        {"transport": "nccl", "other_traffic": 0.5},
        {"alignment_bytes": 4096},
    ],
)
def test_a_problem_like_another_is_the_one_made_anew(changes: dict[str, object]) -> None:
    first = request_of(5)
    other = replace(first, **changes)  # type: ignore[arg-type]
    like = Problem(first)
    frontier(first, 9, like)  # fills what is shared
    alone, shared = frontier(other, 9), frontier(other, 9, like)
    assert shared.points == alone.points and len(alone.points) > 2
    assert shared.search.problem.times == alone.search.problem.times


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_ranges_that_the_bound_leaves_out_have_nothing_less(seed: int, depth: int) -> None:
    search = Search(Problem(request_of(400 + seed)))
    setup, target = Setup(2, "layer", depth), search.most_freed().freed_bytes * 2 // 3
    kinds = {layer.kind: layer for layer in search.problem.layers}
    patterns = {kind: [one.num_bytes for one in search.patterns(layer, None)] for kind, layer in kinds.items()}
    sizes = sorted({size for one in patterns.values() for size in one} - {0})
    sand = [bound._Sand(search, setup, patterns, sizes, share) for share in bound.SHARES]

    def least_us(largest: int, second: int, smallest: int, slots: int) -> float:
        return max(0.0, *(one.fill(2.0 * (target + slots), largest, second, smallest, smallest) for one in sand))

    least = float("inf")
    for smallest, largest in sorted(combinations_with_replacement(sizes, 2), key=lambda pair: pair[::-1]):
        us = least_us(largest, largest, smallest, largest + depth * smallest)
        if us < least and depth == 2:
            between = [size for size in sizes if smallest <= size <= largest]
            us = min(least_us(largest, second, smallest, largest + second + smallest) for second in between)
        least = min(least, us)
    found = [us for _, us in bound._by_layer(search, setup, target, float("inf"))]
    assert min(found) == least


@pytest.mark.parametrize("num", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_residencies_that_do_not_overlap_take_slots_in_turn(num: int, depth: int) -> None:
    """Whatever their sizes: only one slot of the fewest is ever free."""
    order = IssueOrder(depth, False, 0, tuple(range(num)))
    sizes = [(5 * i) % 7 + 1 for i in range(num)]
    assert assign_slots(order, sizes) == tuple(i % (depth + 1) for i in range(num))
