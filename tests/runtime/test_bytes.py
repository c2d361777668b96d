"""Every segment sees its own weights' bytes: eager and captured, whatever the depth, slots, units and world size."""

from __future__ import annotations

from typing import Any

import pytest
from byte_steps import mixed_steps, mixed_steps_of_each
from ranks import run_on_ranks

SIZES = [70_001, 4096, 1, 66_000]
HEADS = ("inside", "outside", "tail")
TRANSPORTS = ("pull", "nccl")


def check(
    world_size: int, layers: list[list[int]], *, mode: str = "threads", tied: bool = False, **choices: Any
) -> None:
    for wrong in run_on_ranks(mixed_steps, world_size, layers, choices, tied, mode=mode):
        assert wrong == []


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("depth", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("units", ["layer", "weight", "bytes:100000"])
def test_depths_units_and_heads(units: str, depth: int, head: str, transport: str) -> None:
    check(2, [SIZES] * 5, units=units, prefetch_depth=depth, head=head, executor="cooperative", transport=transport)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 7, pytest.param(61, marks=pytest.mark.slow)])
def test_slots_that_do_not_divide_the_layers(num_layers: int, num_slots: int, head: str, transport: str) -> None:
    """`slot = i mod k` goes wrong at the wrap-around when k does not divide the number of units."""
    check(
        2,
        [[1000 + layer] for layer in range(num_layers)],
        units="layer",
        prefetch_depth=1,
        head=head,
        transport=transport,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("executor", ["cooperative", "threaded"])
def test_world_sizes_and_executors(world_size: int, executor: str, transport: str) -> None:
    check(world_size, [SIZES] * 3, units="weight", prefetch_depth=1, executor=executor, transport=transport)


@pytest.mark.parametrize("num_copy_streams", [2, 4])
def test_several_copy_streams(num_copy_streams: int) -> None:
    check(3, [SIZES] * 3, units="layer", prefetch_depth=1, num_copy_streams=num_copy_streams, executor="threaded")


def test_processes() -> None:
    choice = {"units": "weight", "prefetch_depth": 2, "executor": "threaded"}
    choices = [choice | {"head": head, "transport": transport} for transport in TRANSPORTS for head in HEADS]
    for wrong in run_on_ranks(mixed_steps_of_each, 3, [SIZES] * 3, choices, mode="processes"):
        assert wrong == []


def test_a_weight_read_at_two_far_ends(transport: str) -> None:
    """The same unit in two residencies, the first of one step after the last of another."""
    check(2, [[5000], [6000], [7000]], tied=True, units="weight", prefetch_depth=1, include=["*"], transport=transport)


@pytest.mark.parametrize("layers", [[[100], [100]], [[100]], [[64], [64], [64]]])
def test_equal_neighbours(layers: list[list[int]], transport: str) -> None:
    """Neighbours of equal size have slots of their own."""
    check(2, layers, units="weight", prefetch_depth=1, head="tail", transport=transport)
