"""What an update leaves: the very bytes of a load, at the addresses that there were, and nothing of what slots held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes
from ranks import run_on_ranks
from torch import Tensor
from update_programs import LAYERS, in_a_loop, is_padding_zero, stored, updating, version_of, version_seen

from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.update.places import places_of

HEADS = ("inside", "outside", "tail")


def is_equal(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_five_identical_updates_change_no_byte(world_size: int, transport: str) -> None:
    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS, tied=True)
        runtime, _ = updating(group, model, transport=transport, head="tail")
        with runtime:
            before, table, nodes = stored(runtime), runtime.buffer_table(), runtime.graph(1).num_nodes()
            seen = []
            for number in range(1, 6):
                report = runtime.update(model.tensors().items())
                assert (report.epoch, runtime.epoch) == (2 * number, 2 * number)
                assert (len(report.updated), report.num_tensors, report.kept) == (5, 5, ())
                assert is_equal(stored(runtime), before) and is_padding_zero(runtime)
                assert (runtime.buffer_table(), runtime.graph(1).num_nodes()) == (table, nodes)
                seen.append(version_of(runtime, model, (0, 1)))
            return [seen, runtime.num_primes]

    found = run_on_ranks(go, world_size)
    assert [seen for seen, _ in found] == [[0] * 5] * world_size
    assert len({primes for _, primes in found}) == 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_there_and_back_is_a_load(world_size: int, transport: str) -> None:
    """A, B, A again: each time every byte of shards and resident weights is that of a load; sizes divide by nothing."""

    def go(group: Group) -> list[int]:
        model = ByteModel([[10_007, 64], [3001], [5], [997]], tied=True)
        choices: dict[str, Any] = {
            "units": "layer",
            "prefetch_depth": 1,
            "min_shard_bytes": 100,
            "transport": transport,
        }
        loads = {}
        for version in (0, 1):
            with compile_bytes(group, model, checkpoint=model.tensors(version), **choices) as runtime:
                assert runtime.layout.resident and runtime.layout.units
                loads[version] = stored(runtime)
        with compile_bytes(group, model, **choices) as runtime:
            seen = []
            for version in (1, 0, 1):
                report = runtime.update(model.tensors(version))
                assert is_equal(stored(runtime), loads[version])
                assert report.staged_bytes == report.peak_bytes == kept_bytes(runtime)
                seen.append(version_of(runtime, model, (0, 1)))
            return seen

    assert run_on_ranks(go, world_size) == [[1, 0, 1]] * world_size


def kept_bytes(runtime: Runtime) -> int:
    """Bytes of weights in this rank's memory."""
    places = places_of(runtime.layout, runtime.rank).values()
    return sum(place.num_bytes for of_weight in places for place in of_weight)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_what_slots_held_is_never_used(head: str, depth: int, transport: str) -> None:
    """Prefetched before the update, by `prefetch` or as the tail of a step; every kind of step follows every update."""

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, transport=transport, head=head, prefetch_depth=depth, capture_sizes=[1, 2])
        acts = {
            "replay": runtime.graph(1).replay,
            "eager": lambda: runtime.run(1),
            "loop": lambda: in_a_loop(runtime, model),
            "larger": runtime.graph(2).replay,
        }
        seen = []
        with runtime:
            for version, act in enumerate(acts.values(), 1):
                act()
                runtime.prefetch(1)
                runtime.update(model.tensors(version))
                assert runtime.held == (None,) * len(runtime.held)
                seen.append(version_seen(runtime, model, act, range(version + 1)))
            return [*seen, runtime.num_primes]

    found = run_on_ranks(go, 2)
    assert found[0] == found[1] and found[0][:-1] == [1, 2, 3, 4]


def test_a_runtime_without_graphs_and_one_that_shards_nothing() -> None:
    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        seen = []
        for choices in ({"capture_sizes": []}, {"plan": "replicated", "min_shard_bytes": 1 << 20}):
            with compile_bytes(group, model, **choices) as runtime:
                runtime.update(model.tensors(1))
                seen.append(version_seen(runtime, model, lambda: runtime.run(1), (0, 1)))
        return seen

    assert run_on_ranks(go, 2) == [[1, 1]] * 2


def test_graphs_are_not_captured_again() -> None:
    """The very same graph objects, with the same driver graphs behind them, replay right after."""

    def go(group: Group) -> list[Any]:
        model = ByteModel(LAYERS)
        runtime, _ = updating(group, model, head="tail")
        with runtime:
            graph = runtime.graph(1)
            captured = graph._captured
            runtime.update(model.tensors(1))
            assert runtime.graph(1) is graph and graph._captured is captured
            return [version_seen(runtime, model, graph.replay, (0, 1)), str(min(runtime.programs))]

    assert run_on_ranks(go, 2) == [[1, str(StepShape(1))]] * 2


def test_shard_files_keep_the_version(tmp_path: Path) -> None:
    """Saved after an update and loaded again: the new weights, and the epoch goes on from there."""

    def go(group: Group) -> list[int]:
        model = ByteModel(LAYERS)
        choices: dict[str, Any] = {"units": "layer", "prefetch_depth": 1}
        with compile_bytes(group, model, **choices) as runtime:
            runtime.update(model.tensors(1))
            runtime.save_shards(tmp_path / "shards")
        with compile_bytes(group, model, checkpoint=tmp_path / "shards", **choices) as runtime:
            seen = [runtime.epoch, version_of(runtime, model, (0, 1, 2))]
            runtime.update(model.tensors(2))
            return [*seen, runtime.epoch, version_of(runtime, model, (0, 1, 2))]

    assert run_on_ranks(go, 2) == [[2, 1, 4, 2]] * 2
