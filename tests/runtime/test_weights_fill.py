"""Chunks and resident weights hold the checkpoint's bytes, whatever the sizes, dtypes, world size and windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth, open_files
from hypothesis import given, settings
from hypothesis import strategies as st
from load_rig import compiled_of, load, model_of, tensors_of, write_checkpoint
from ranks import run_on_ranks, try_on_ranks
from torch import Tensor

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load.checkpoint import Checkpoint
from graphshard.runtime import memory
from graphshard.runtime.weights import fill
from graphshard.runtime.weights.report import LoadReport
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


def _load_both(group: Group, folder: str, model: ModelSpec, tensors: dict[str, Tensor]) -> tuple[list[str], int]:
    """What is wrong of loads from the folder and from tensors, and the bytes that this rank keeps."""
    compiled = compiled_of(model, group.world_size)
    checkpoint = Checkpoint(Path(folder))
    loaded = load(group, compiled, checkpoint)
    wrong = loaded.wrong(tensors) + load(group, compiled, TensorsInHand(tensors)).wrong(tensors)
    report = loaded.filler.report
    assert report.bytes_read == checkpoint.num_bytes_read == report.kept_bytes
    assert report.checkpoint_bytes == sum(weight.num_bytes for weight in model.weights)
    return wrong, report.kept_bytes


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["uint8", "bfloat16", "float32", "float8_e4m3fn", "float4_e2m1fn_x2"]),
    st.integers(1, 5),
    st.sampled_from([(1 << 23, 1 << 20), (512, 100), (1000, 4096)]),
)
def test_any_shapes_over_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[int]],
    dtype: str,
    world_size: int,
    windows: tuple[int, int],
) -> None:
    weights = [WeightSpec(f"w{i}", tuple(shape), dtype) for i, shape in enumerate(shapes)]
    sharded = [weight for weight in weights if weight.num_bytes] or [WeightSpec("w", (1,), dtype)]
    model = model_of(sharded, [WeightSpec("norm", (77,), "uint8"), WeightSpec("nothing", (0, 3), dtype)])
    tensors = tensors_of(model)
    folder = write_checkpoint(tmp_path_factory.mktemp("load"), model, tensors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "WINDOW_BYTES", windows[0])
        patch.setattr(fill, "PIECE_BYTES", windows[1])
        told = run_on_ranks(_load_both, world_size, str(folder), model, tensors)
    assert [wrong for wrong, _ in told] == [[]] * world_size
    # together the ranks read each sharded byte once, and each of them the resident ones
    assert sum(kept for _, kept in told) == sum(w.num_bytes for w in sharded) + world_size * 77


@pytest.mark.parametrize("world_size", range(2, 8))
def test_rows_that_no_number_of_ranks_divides(tmp_path: Path, world_size: int) -> None:
    model = model_of([WeightSpec(f"rows{rows}", (rows, 3), "bfloat16") for rows in (50257, 17, 1)])
    tensors = tensors_of(model)
    folder = write_checkpoint(tmp_path, model, tensors)
    for wrong, _ in run_on_ranks(_load_both, world_size, str(folder), model, tensors):
        assert wrong == []


def _tied(group: Group) -> tuple[list[str], int, int]:
    model = ByteModel([[151_937], [1000]], tied=True)
    with compile_bytes(group, model, include=["*"], units="weight") as runtime:
        wrong = wrong_after(runtime, model, lambda: runtime.run(1)) + wrong_after(
            runtime, model, runtime.graph(1).replay
        )
        shown = [view.weight for unit in runtime.layout.units for view in unit.views].count("bytes.0.w0")
        return wrong, shown, runtime.layout.shardable_bytes


def test_a_tied_head_has_one_storage_and_two_uses() -> None:
    for wrong, shown, shardable_bytes in run_on_ranks(_tied, 4):
        assert wrong == [] and shown == 1 and shardable_bytes == 151_937 + 1000


def test_tensors_that_are_not_contiguous_are_read_in_the_order_of_their_rows() -> None:
    weights = [
        WeightSpec("t", (31, 50), "float32"),
        WeightSpec("s", (20, 30), "bfloat16"),
        WeightSpec("z", (), "int16"),
    ]
    model = model_of(weights)
    tensors = tensors_of(model)
    stored = {
        "t": tensors["t"].t().contiguous().t(),
        "s": torch.zeros(40, 60, dtype=torch.bfloat16)[::2, ::2].copy_(tensors["s"]),
        "z": tensors["z"],
    }
    assert not stored["t"].is_contiguous() and not stored["s"].is_contiguous()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "PIECE_BYTES", 37)
        for wrong in run_on_ranks(
            lambda group: load(group, compiled_of(model, 3), TensorsInHand(stored)).wrong(tensors), 3
        ):
            assert wrong == []


@contextmanager
def _staged(tensor: Tensor, sizes: list[int]) -> Iterator[memoryview]:
    """What memory of a GPU does: bytes pass through the host, and all of them are written."""
    staging = torch.zeros(tensor.numel(), dtype=torch.uint8)
    sizes.append(tensor.numel())
    yield staging.numpy().data
    tensor.copy_(staging)


def test_memory_that_is_written_by_way_of_the_host_takes_one_window_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(
        [WeightSpec("a", (10_000,), "uint8"), WeightSpec("b", (3,), "uint8")], [WeightSpec("n", (5000,), "uint8")]
    )
    tensors, sizes = tensors_of(model), list[int]()
    monkeypatch.setattr(fill, "WINDOW_BYTES", 1024)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "writing_bytes", lambda tensor: _staged(tensor, sizes))
        loaded = run_on_ranks(lambda group: load(group, compiled_of(model, 2), TensorsInHand(tensors)), 2)
    assert [one.wrong(tensors) for one in loaded] == [[], []]
    assert max(sizes) == 1024 and len(sizes) > 2 * 9


def _telling(group: Group, folder: str, model: ModelSpec) -> tuple[list[tuple[int, int]], LoadReport]:
    told: list[tuple[int, int]] = []
    loaded = load(
        group, compiled_of(model, group.world_size), Checkpoint(Path(folder)), on_load=lambda *now: told.append(now)
    )
    return told, loaded.filler.report


def test_progress_grows_to_all_that_a_rank_loads(tmp_path: Path) -> None:
    model = model_of(
        [WeightSpec("a", (1001,), "uint8"), WeightSpec("b", (70_000,), "uint8")], [WeightSpec("n", (9,), "uint8")]
    )
    folder = write_checkpoint(tmp_path, model)
    reports = []
    for told, report in run_on_ranks(_telling, 2, str(folder), model):
        done = [now for now, _ in told]
        assert done == sorted(done) and told[-1] == (report.kept_bytes, report.kept_bytes)
        assert {total for _, total in told} == {report.kept_bytes}
        reports.append(report)
    assert [{w.name: w.way for w in report.weights} for report in reports] == [dict.fromkeys("abn", "bytes")] * 2
    assert [sum(report.weights[i].kept_bytes for report in reports) for i in range(3)] == [1001, 70_000, 18]
    text = reports[0].text()
    assert (
        "of 69.3 KiB in " in text and "at most 0 B beside" in text and "  bytes: 3 weights, 69.3 KiB (a, b, n)" in text
    )


def test_a_load_leaves_no_thread_and_no_descriptor_however_it_ends(tmp_path: Path) -> None:
    model = ByteModel([[4000], [5000]])
    folder = write_checkpoint(tmp_path, model.spec(), model.tensors())

    def rank(group: Group, **choices: Any) -> LoadReport:
        with compile_bytes(group, model, checkpoint=folder, capture_sizes=(), **choices) as runtime:
            return runtime.load_report

    run_on_ranks(rank, 2)
    with no_growth():
        assert sum(report.kept_bytes for report in run_on_ranks(rank, 2)) == 9000
        assert open_files(tmp_path) == []

        def fail(done: int, total: int) -> None:
            raise graphshard.SpecError("enough")

        for outcome in try_on_ranks(lambda group: rank(group, on_load=fail), 2):
            assert "load failed on rank 0 (and on rank 1): enough" in outcome.error
        assert open_files(tmp_path) == []
