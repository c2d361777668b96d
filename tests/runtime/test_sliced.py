"""Weights in slices, always gathered: whole weights bit for bit, under both transports, from load to update."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sliced_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st
from load_rig import write_checkpoint
from ranks import MODES, entry_of, rank_environment, run_on_ranks, try_on_ranks
from shard_programs import without_sync
from sliced_model import SlicedModel, sliced_units
from small_modules import Stack

import graphshard
from graphshard.comm.group import LocalGroup
from graphshard.comm.launch import failure_text, run_ranks
from graphshard.core.errors import SpecError
from graphshard.core.layout import build_layout
from graphshard.core.specs import DeviceSpec
from graphshard.device.as_libcuda import host_driver_environment, why_not_as_libcuda
from graphshard.load.reshard import reshard
from graphshard.load.shard_reader import ShardReader
from graphshard.schedule.auto import make_plan

LAYERS = [(24, [40, 40, 96]), (48, [16, 8]), (24, [1000, 20, 4, 8])]
"""Over 5 ranks no rows divide; over 4 ranks a slice of the last block has 120 bytes."""
PLANS: list[dict[str, Any]] = [
    {"prefetch_depth": 0},
    {"prefetch_depth": 1, "executor": "threaded"},
    {"prefetch_depth": 2, "head": "outside", "policy": "weight"},
    {"prefetch_depth": 1, "head": "tail"},
    {"prefetch_depth": 1, "num_copy_streams": 3, "policy": "weight"},
]
fixture = pytest.fixture(autouse=True)(without_sync)


def test_what_the_layers_become() -> None:
    spec = SlicedModel(LAYERS).spec()
    sliced = {n: [u.name for u in sliced_units(spec, n) if u.is_sliced] for n in range(1, 7)}
    assert sliced == {
        1: [],
        2: ["0.mlp", "1.mlp", "2.mlp"],
        3: ["0.mlp", "1.mlp", "2.mlp"],
        4: ["0.mlp", "1.mlp"],
        5: [],
        6: ["0.mlp", "1.mlp", "2.mlp"],
    }


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_every_step_reads_its_own_bytes(transport: str, world_size: int) -> None:
    plans = [plan for plan in PLANS if transport == "pull" or "num_copy_streams" not in plan]
    choices = [plan | {"transport": transport} for plan in plans]
    for wrong in run_on_ranks(programs.mixed_steps_of_each, world_size, LAYERS, choices):
        assert wrong == []


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_every_step_reads_its_own_bytes_in_processes(transport: str) -> None:
    choices = [{"transport": transport, "prefetch_depth": 1, "head": "tail", "progress": True}]
    for wrong in run_on_ranks(programs.mixed_steps_of_each, 3, LAYERS, choices, mode="processes"):
        assert wrong == []


@settings(max_examples=12, deadline=None)
@given(
    layers=st.lists(
        st.tuples(st.sampled_from([8, 16, 24, 48, 112]), st.lists(st.integers(1, 40), min_size=2, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    world_size=st.integers(1, 8),
    transport=st.sampled_from(["pull", "nccl"]),
    alignment=st.sampled_from([16, 256]),
    depth=st.integers(0, 2),
)
def test_any_blocks_over_any_number_of_ranks(
    layers: list[tuple[int, list[int]]], world_size: int, transport: str, alignment: int, depth: int
) -> None:
    choices = {"transport": transport, "alignment_bytes": alignment, "prefetch_depth": depth}
    for wrong in run_on_ranks(programs.mixed_steps, world_size, layers, choices):
        assert wrong == []


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_load_reads_exactly_the_slices_of_its_rank(world_size: int, tmp_path: Path) -> None:
    model = SlicedModel(LAYERS)
    folder = write_checkpoint(tmp_path, model.spec(), model.tensors())
    assert run_on_ranks(programs.reads_of_a_load, world_size, folder, LAYERS) == [[]] * world_size


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_updates_write_slices(transport: str, mode: str) -> None:
    for found in run_on_ranks(programs.updates, 3, LAYERS, transport, mode=mode):
        assert found == [0, 1, [], 0, [], 4]


def test_shard_files_are_saved_loaded_and_resharded(tmp_path: Path) -> None:
    """From 2 ranks to 3 in slices, to 5 flat, and to 4 in part; each loads what was made for it."""
    run_on_ranks(programs.save, 2, tmp_path / "2", LAYERS)
    for world_size in (3, 5, 4):
        with ShardReader(tmp_path / "2", lambda count: None) as reader:
            reshard(reader, tmp_path / f"{world_size}", world_size)
    for world_size in (2, 3, 4, 5):
        for choices in ({}, {"dual": "gather"}, {"dual": "gather", "units": "layer", "min_shard_bytes": 0}):
            transport = {"transport": "nccl" if world_size % 2 else "pull"}
            folder = tmp_path / f"{world_size}"
            found = run_on_ranks(programs.load_saved, world_size, folder, LAYERS, choices | transport)
            assert found == [[]] * world_size, (world_size, choices)


def test_files_of_slices_are_not_taken_for_flat_ones(tmp_path: Path) -> None:
    run_on_ranks(programs.save, 2, tmp_path / "2", LAYERS)
    flat = {"placed": [replace(unit, is_sliced=False) for unit in sliced_units(SlicedModel(LAYERS).spec(), 2)]}
    outcomes = try_on_ranks(programs.load_saved, 2, tmp_path / "2", LAYERS, flat)
    for outcome in outcomes:
        assert "unit 1 (0.mlp) lies in slices in the files, flat in the plan" in outcome.error


def test_flat_files_are_not_taken_where_slices_are_asked_for(tmp_path: Path) -> None:
    """They would be gathered at every step shape, and nobody asked for that."""
    run_on_ranks(programs.save, 2, tmp_path / "2", LAYERS, "off")
    for dual in ("gather", "tensor_parallel", "auto"):
        for outcome in try_on_ranks(programs.load_saved, 2, tmp_path / "2", LAYERS, {"dual": dual}):
            assert "do not have the weights of 0.mlp in slices, and dual asks for them" in outcome.error


@pytest.mark.parametrize("world_size", [1, 2])
def test_files_of_a_square_weight_are_not_taken_the_other_way_round(world_size: int, tmp_path: Path) -> None:
    for is_dual, ways in ((True, r"[in, out], and the model asks for [out, in]"), (False, r"[out, in], and the model")):
        folder = tmp_path / f"{is_dual}"
        run_on_ranks(programs.save_square, world_size, folder, is_dual)
        run_on_ranks(programs.load_square, world_size, folder, is_dual)
        for outcome in try_on_ranks(programs.load_square, world_size, folder, not is_dual):
            assert outcome.error_type == "LoadError"
            assert f"have weight model.layers.0.mlp.down_proj.weight {ways}" in outcome.error


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_updates_reach_steps_of_both_modes(transport: str, mode: str) -> None:
    for found in run_on_ranks(programs.updates_in_both_modes, 3, transport, mode=mode):
        assert found == [[], 4]


def test_files_serve_steps_of_both_modes(tmp_path: Path) -> None:
    """48 rows: over 5 ranks no block is sliced, and whoever asks for slices gets gathers, with the reason."""
    run_on_ranks(programs.save_in_both_modes, 2, tmp_path / "2")
    for world_size in (3, 5):
        with ShardReader(tmp_path / "2", lambda count: None) as reader:
            reshard(reader, tmp_path / f"{world_size}", world_size)
    for world_size, num_blocks in ((2, 3), (3, 3), (5, 0)):
        for transport, dual in (("pull", "auto"), ("nccl", "tensor_parallel"), ("pull", "gather")):
            due = [[], 0 if dual == "gather" else num_blocks]
            found = run_on_ranks(programs.load_in_both_modes, world_size, tmp_path / f"{world_size}", transport, dual)
            assert found == [due] * world_size, (world_size, dual)


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_a_slice_that_changed_after_the_load_is_named(transport: str) -> None:
    for rank, told in enumerate(run_on_ranks(programs.change_after_load, 3, LAYERS, transport)):
        assert told.startswith(f"CommError: rank {rank} gathered other bytes of unit 1 than their owners loaded")
        assert "from rank 1 instead of" in told and "from rank 0" not in told and "from rank 2" not in told


@pytest.mark.skipif(why_not_as_libcuda() is not None, reason=str(why_not_as_libcuda()))
@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_a_report_counts_the_pieces_of_a_gather(transport: str) -> None:
    environment = {**rank_environment(), **host_driver_environment()}
    results = run_ranks(
        entry_of(programs.report),
        2,
        arguments=(LAYERS, transport),
        timeout_s=120.0,
        group_timeout_s=60.0,
        env=environment,
    )
    assert not failure_text(results), failure_text(results)
    for told in (result.value for result in results):
        assert told["parts"] == [1, 3, 1, 2, 1, 4] and told["problems"] == []
        assert told["difference"] is None
        for gather, unit in zip(told["gathers"], told["units"], strict=True):
            parts = told["parts"][unit]
            assert (gather["num_copies"], gather["num_bytes"]) == (2 * parts, told["bytes"][unit])
            barriers = 4 * parts if transport == "nccl" else 0
            assert sum(gather["nodes"].values()) == 2 * parts + barriers, "and no kernel"


def test_slices_are_of_blocks_alone() -> None:
    """A module that was attached has no blocks: nothing of it can be asked to lie in slices."""
    spec = SlicedModel(LAYERS).spec()
    units = sliced_units(spec, 2)
    device = DeviceSpec("host", "any", 1 << 40)
    make_plan(spec, 2, device, placed=units)
    bare = type(spec)(spec.name, spec.weights, spec.segments)
    with pytest.raises(SpecError, match=r"unit 1 \(0.mlp\) is sliced, and bytes has no block of the weights"):
        make_plan(bare, 2, device, placed=units)
    with LocalGroup(1) as groups, pytest.raises(SpecError, match=r"dual is gather, and Stack declares no blocks"):
        graphshard.attach(Stack(), groups[0], dual="gather")
    with pytest.raises(SpecError, match=r"cannot be sliced over 5 ranks: 24 rows of bytes.0.w1 are no multiple"):
        build_layout(spec, make_plan(spec, 5, device, placed=units))
