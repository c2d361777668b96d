"""The solver on small models, against every plan there is: each made, emitted, lowered and walked in time."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from small_models import CUDA, layered_model, machine, random_small_model

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.cost.bound import exposed_bound_us
from graphshard.cost.facts import ModelFacts
from graphshard.cost.frontier import frontier
from graphshard.cost.problem import Problem, ResidencyRequest
from graphshard.cost.residency import solve, solve_with
from graphshard.cost.search import Search
from graphshard.cost.segments import step_times
from graphshard.cost.timeline import predict
from graphshard.schedule.auto import make_plan
from graphshard.schedule.emit import emit
from graphshard.verify import verify

SHAPES = (StepShape(1), StepShape(400))
HARDWARE = machine()


UNITS = ("layer", "weight", "bytes:5KiB")


def request_of(model: ModelSpec, facts: ModelFacts, world_size: int = 2) -> ResidencyRequest:
    return ResidencyRequest(model, facts, HARDWARE, world_size, SHAPES, units=UNITS)


def kept_bytes(layout: Layout) -> int:
    return layout.shard_bytes + layout.slot_bytes + layout.resident_bytes


def walk(
    model: ModelSpec, facts: ModelFacts, options: dict[str, object], world_size: int = 2, is_verified: bool = False
) -> tuple[int, float]:
    """(bytes that a rank keeps, mean exposed us) of the plan that `options` make, op by op."""
    plan = make_plan(model, world_size, CUDA, **options)
    layout, program = build_layout(model, plan), emit(model, plan)
    if is_verified:
        verify(program, layout, model=model).raise_if_bad()
    exposed = [
        predict(program, layout, step_times(model, facts, shape, HARDWARE, share=1.0), HARDWARE).total_exposed_us
        for shape in SHAPES
    ]
    return kept_bytes(layout), sum(exposed) / len(exposed)


def every_plan(model: ModelSpec, facts: ModelFacts, world_size: int = 2) -> list[tuple[int, float]]:
    """(freed bytes, exposed us) of every subset under every setup, through the scheduler and the timeline."""
    names = [weight.name for weight in model.weights]
    resident, _ = walk(model, facts, {"replicated": True}, world_size)
    found = [(0, 0.0)]
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            for units in UNITS:
                for depth in (0, 1, 2):
                    options = {"units": units, "prefetch_depth": depth, "include": chosen}
                    kept, exposed = walk(model, facts, options, world_size)
                    found.append((resident - kept, exposed))
    return found


@pytest.mark.parametrize(("seed", "world_size"), [(0, 2), (1, 2), (2, 2), (3, 2), (4, 3), (5, 4)])
def test_no_plan_is_better(seed: int, world_size: int) -> None:
    model, facts = random_small_model(seed, 5)
    plans = every_plan(model, facts, world_size)
    search = Search(Problem(request_of(model, facts, world_size)))
    most = max(freed for freed, _ in plans)
    assert search.is_exhaustive and search.most_freed().freed_bytes == most
    for target in sorted({max(1, most * step // 5) for step in range(1, 6)} if most > 0 else ()):
        best = min(exposed for freed, exposed in plans if freed >= target)
        found = solve_with(search, target)
        assert found.outcome.exposed_us == pytest.approx(best, abs=1e-6)
        assert exposed_bound_us(search, target) <= best + 1e-6, "no plan is below the bound"
        # and the plan that it names is the one that was judged
        kept, exposed = walk(model, facts, found.options(), world_size, is_verified=True)
        assert exposed == pytest.approx(found.outcome.exposed_us, abs=1e-6)
        assert walk(model, facts, {"replicated": True}, world_size)[0] - kept == found.outcome.freed_bytes >= target


@pytest.mark.parametrize("seed", range(4))
def test_the_frontier_is_that_of_all_plans(seed: int) -> None:
    model, facts = random_small_model(100 + seed, 4)
    plans = every_plan(model, facts)
    points = frontier(request_of(model, facts)).points
    for before, after in pairwise(points):
        assert before.freed_bytes < after.freed_bytes and before.exposed_us < after.exposed_us + 1e-6
    for freed, exposed in plans:
        beaten_by = [one for one in points if one.freed_bytes >= freed and one.exposed_us <= exposed + 1e-6]
        assert beaten_by, f"nothing on the frontier is as good as {freed} B at {exposed} us"


@pytest.mark.parametrize("seed", range(12))
def test_spread_choices_are_near_the_exact_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method for large models, on small ones: it frees what was asked and is never better than exact."""
    model, facts = random_small_model(200 + seed, 8)
    exact = Search(Problem(request_of(model, facts)))
    monkeypatch.setattr("graphshard.cost.search.EXHAUSTIVE_CHOICES", 0)
    spread = Search(Problem(request_of(model, facts)))
    assert exact.is_exhaustive and not spread.is_exhaustive
    most = spread.most_freed().freed_bytes
    assert most <= exact.most_freed().freed_bytes
    longest = max(exact.problem.gather(weight.num_bytes, 2) for weight in exact.problem.weights)
    for target in (most // 3, most * 2 // 3) if most > 0 else ():
        best, found = solve_with(exact, target).outcome, solve_with(spread, target).outcome
        assert found.freed_bytes >= target
        # few weights and no two layers alike: two whole weights are the coarseness of any spread
        assert best.exposed_us - 1e-6 <= found.exposed_us <= best.exposed_us + 2 * longest


@pytest.mark.parametrize("seed", range(8))
def test_a_spread_choice_is_the_plan_that_is_made_of_it(seed: int) -> None:
    """More weights than can all be tried: what was judged is what the op list does, to the byte and the nanosecond."""
    model, facts = random_small_model(300 + seed, 24)
    search = Search(Problem(request_of(model, facts)))
    most = search.most_freed().freed_bytes
    assert not search.is_exhaustive and most > 0
    whole, _ = walk(model, facts, {"replicated": True})
    for target in (most // 4, most // 2, most):
        found = solve_with(search, target)
        kept, exposed = walk(model, facts, found.options(), is_verified=True)
        assert whole - kept == found.outcome.freed_bytes >= target
        assert exposed == pytest.approx(found.outcome.exposed_us, abs=1e-3)
        assert exposed_bound_us(search, target) <= exposed + 1e-6


def test_each_rejected_setup_says_why() -> None:
    model, facts = layered_model([[100, 40]] * 4)
    found = solve(request_of(model, facts), 6000)
    assert found.is_exact and len(found.rejected) == 8
    for one in found.rejected:
        assert str(one).startswith("units ")
        assert any(text in one.reason for text in ("us a step, ", "us more of the link", "frees at most", "is as good"))
    assert found.lines()[0].startswith(f"{len(found.weights)} weights (")


def test_an_unreachable_target_names_the_most() -> None:
    model, facts = layered_model([[100, 40]] * 4)
    search = Search(Problem(request_of(model, facts)))
    most = search.most_freed().freed_bytes
    with pytest.raises(SpecError, match=rf"frees .* net of slots \({most} B\), the most there is"):
        solve_with(search, most + 1)
    assert solve_with(search, most).outcome.freed_bytes == most
    with pytest.raises(SpecError, match="a target starts at 0 B"):
        solve_with(search, -1)


def test_one_weight_frees_nothing() -> None:
    model, facts = layered_model([[100], [100]])
    with pytest.raises(SpecError, match="nearest is 0 B"):
        solve(ResidencyRequest(model, facts, HARDWARE, 2, SHAPES, group_sizes=(1,)), 1)


def test_ranks_that_cannot_be() -> None:
    model, facts = layered_model([[100, 40]] * 4)
    for world_size, found in (
        (0, "0 ranks: there is at least 1"),
        (9, "9 ranks for 8 weights that may be sharded: use at most 8"),
        (65, "the largest shard group is 64, so use groups of 8"),
    ):
        with pytest.raises(SpecError, match=found):
            solve(ResidencyRequest(model, facts, HARDWARE, world_size, SHAPES), 1)


def test_targets_of_nothing_shard_nothing() -> None:
    model, facts = layered_model([[100, 40]] * 4)
    found = solve(request_of(model, facts), 0)
    assert found.weights == () and found.outcome.exposed_us == 0 and found.options()["replicated"] is True


def test_weights_outside_the_layers_stay() -> None:
    model, facts = layered_model([[100, 40]] * 2)
    last = model.segments[-1]
    segments = (*model.segments[:-1], type(last)(last.name, None, last.reads))
    problem = Problem(request_of(type(model)("outside", model.weights, segments), facts))
    assert problem.kept == ((last.reads[0], "it is not read in exactly one layer"),)
    assert [weight.name for weight in problem.weights] == [weight.name for weight in model.weights[:-1]]
