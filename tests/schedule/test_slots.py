"""Slots: the formula against brute force, and colourings that hold over replays."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.core.errors import SpecError
from graphshard.schedule.slots import IssueOrder, assign_slots, issue_order, slot_bytes, smallest_num_slots


def sequential(num: int) -> list[tuple[int, int]]:
    return [(i, i + 1) for i in range(num)]


def takes(order: IssueOrder, num: int) -> list[set[int]]:
    """Positions for which each residency has its slot, read off the definition; a cycle if there is a tail."""
    first = [index - order.depth if order.tail else max(index - order.depth, 0) for index in range(num)]
    spans = [range(begin, reach + 1) for begin, reach in zip(first, order.reach, strict=True)]
    return [{position % num if order.tail else position for position in span} for span in spans]


def chromatic_number(taken: list[set[int]]) -> int:
    """By trying: the fewest colours with no two alike that share a position."""

    def colour(index: int, colours: list[int], num: int) -> bool:
        if index == len(taken):
            return True
        banned = {colours[other] for other in range(index) if taken[other] & taken[index]}
        fresh = max(colours, default=-1) + 1
        return any(
            colour(index + 1, [*colours, choice], num) for choice in range(min(fresh + 1, num)) if choice not in banned
        )

    return next(num for num in itertools.count() if colour(0, [], num))


def check_colouring(order: IssueOrder, slots: tuple[int, ...]) -> None:
    taken = takes(order, len(slots))
    for first, second in itertools.combinations(range(len(slots)), 2):
        assert slots[first] != slots[second] or not taken[first] & taken[second], (first, second)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("num", range(1, 10))
def test_the_formula_is_the_fewest(num: int, depth: int) -> None:
    order = issue_order(sequential(num), depth, "tail")
    blocks, rest = divmod(num, depth + 1)
    formula = num if num < depth + 1 else depth + 1 + -(-rest // blocks)
    if order.tail:
        assert smallest_num_slots(order) == formula == chromatic_number(takes(order, num))
    else:
        assert depth == 0 or num == 1
        assert smallest_num_slots(order) == 1
    inside = issue_order(sequential(num), depth, "inside")
    assert smallest_num_slots(inside) == min(depth + 1, num) == chromatic_number(takes(inside, num))


spans = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=8).map(
    lambda found: sorted((begin, begin + length) for begin, length in found)
)


@given(spans, st.integers(0, 4), st.sampled_from(["inside", "outside"]))
def test_overlapping_stays_need_as_many_slots_as_overlap(found: list[tuple[int, int]], depth: int, head: str) -> None:
    order = issue_order(found, depth, head)  # type: ignore[arg-type]
    assert smallest_num_slots(order) == chromatic_number(takes(order, len(found)))


@given(
    spans=spans,
    depth=st.integers(0, 4),
    head=st.sampled_from(["inside", "outside", "tail"]),
    more=st.integers(0, 4),
    data=st.data(),
)
def test_no_two_stays_share_a_slot_at_once(
    spans: list[tuple[int, int]], depth: int, head: str, more: int, data: st.DataObject
) -> None:
    order = issue_order(spans, depth, head)  # type: ignore[arg-type]
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(spans), max_size=len(spans)))
    smallest = smallest_num_slots(order)
    fewest = assign_slots(order, sizes)
    assert len(set(fewest)) == smallest
    slots = assign_slots(order, sizes, smallest + more)
    for found in (fewest, slots):
        check_colouring(order, found)
        assert set(found) == set(range(len(set(found)))), "slots are numbered without gaps"
    if smallest > 1:
        with pytest.raises(
            SpecError, match=rf"num_slots {smallest - 1} is too few .* smallest that works is {smallest}"
        ):
            assign_slots(order, sizes, smallest - 1)


@pytest.mark.parametrize(("num", "depth"), [(5, 1), (93, 1), (61, 1), (7, 2), (11, 2), (94, 2), (9, 3)])
def test_the_extra_slot_takes_the_smallest_units(num: int, depth: int) -> None:
    sizes = [10 + (7 * index) % num for index in range(num)]
    order = issue_order(sequential(num), depth, "tail")
    slots = assign_slots(order, sizes)
    check_colouring(order, slots)
    extra = [size for slot, size in zip(slots, sizes, strict=True) if slot == depth + 1]
    assert len(set(slots)) == depth + 2
    assert min(extra) == min(sizes) and len(extra) == num % (depth + 1)


def test_a_short_cycle_is_turned_so_that_slots_are_small() -> None:
    # depth 2, 5 units: one block, five slots; depth 1 of 3: the smallest alone
    assert slot_bytes(assign_slots(issue_order(sequential(3), 1, "tail"), [9, 1, 9]), [9, 1, 9]) == 19
    sizes = [9, 1, 9, 1, 9, 9, 9, 9]  # depth 2: two blocks, both of 4
    slots = assign_slots(issue_order(sequential(8), 2, "tail"), sizes)
    turned = [[(i + turn) % 4 for i in range(8)] for turn in range(8)]
    assert slot_bytes(slots, sizes) == min(slot_bytes(t, sizes) for t in turned)


def test_i_mod_k_is_wrong_at_the_wrap() -> None:
    order = issue_order(sequential(5), 1, "tail")
    with pytest.raises(AssertionError, match=r"\(0, 4\)"):
        check_colouring(order, tuple(index % 2 for index in range(5)))


def test_with_more_slots_the_one_freed_first_is_taken() -> None:
    order = issue_order(sequential(7), 1, "inside")
    assert assign_slots(order, [1] * 7, 3) == (0, 1, 2, 0, 1, 2, 0)
    assert assign_slots(order, [1] * 7) == (0, 1, 0, 1, 0, 1, 0)


def test_with_the_fewest_slots_units_go_where_they_fit() -> None:
    # segment 0 reads a large and a small unit, then small ones alone
    order = issue_order([(0, 1), (0, 1), (1, 2), (2, 3), (3, 4), (3, 4)], 0, "inside")
    sizes = [100, 10, 10, 10, 10, 100]
    assert slot_bytes(assign_slots(order, sizes), sizes) == 110


def test_a_tail_runs_no_further_ahead_than_the_gate() -> None:
    assert issue_order(sequential(3), 5, "tail").depth == 2
    assert issue_order([(0, 1)] * 3, 1, "tail") == issue_order([(0, 1)] * 3, 0, "tail")
    assert issue_order(sequential(1), 1, "tail").tail is False
    assert issue_order([], 2, "tail").num_held == 0
