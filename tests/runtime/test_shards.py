"""Saving and loading shards: what is saved is what is loaded, under the plan that it was saved under."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from ranks import run_on_ranks, start_processes, try_on_ranks
from shard_folders import content, save_folder
from shard_programs import (
    KINDS,
    LAYERS,
    die_in_a_save,
    load,
    save,
    serve_shards,
    the_error,
    without_sync,
    wrong_weights,
)

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import ProgramError
from graphshard.load.reshard import reshard
from graphshard.load.shard_manifest import MANIFEST_NAME, read_manifest
from graphshard.load.shard_reader import ShardReader
from graphshard.runtime import saving
from graphshard.runtime.weights import shard_filler

POLICIES = [
    {"units": "layer"},
    {"units": "weight", "outside_layers": True},
    {"units": "bytes:1KiB", "alignment_bytes": 16},
    {"replicated": True},
]
fixture = pytest.fixture(autouse=True)(without_sync)


def resharded(source: Path, target: Path, world_size: int) -> None:
    with ShardReader(source, lambda count: None) as reader:
        reshard(reader, target, world_size)


@pytest.mark.parametrize("choices", POLICIES, ids=str)
def test_what_is_saved_is_what_is_loaded(choices: dict[str, Any], tmp_path: Path) -> None:
    """Files are those that are put together by hand, byte by byte; weights come back whole, with their strides."""
    for world_size in (1, 2, 3):
        folder, by_hand = tmp_path / f"{world_size}", tmp_path / f"by hand {world_size}"
        run_on_ranks(save, world_size, folder, choices)
        save_folder(by_hand, KINDS.spec(), world_size, **choices)
        assert content(folder) == content(by_hand)
        assert run_on_ranks(load, world_size, folder) == [[]] * world_size


def test_resharded_files_are_what_a_save_by_as_many_ranks_writes(tmp_path: Path) -> None:
    choices = {"units": "bytes:2KiB", "outside_layers": True}
    for world_size in (1, 2, 4):
        run_on_ranks(save, world_size, tmp_path / f"direct {world_size}", choices)
    for begin, end in ((2, 4), (4, 1), (1, 2), (4, 2)):
        target = tmp_path / f"{begin} to {end}"
        resharded(tmp_path / f"direct {begin}", target, end)
        assert content(target) == content(tmp_path / f"direct {end}")
        assert run_on_ranks(load, end, target) == [[]] * end


def test_steps_over_loaded_shards_see_the_right_bytes(tmp_path: Path, transport: str) -> None:
    model = ByteModel(LAYERS)

    def program(group: Group) -> list[str]:
        with compile_bytes(group, model, transport=transport, units="layer") as runtime:
            wrong = wrong_after(runtime, model, runtime.graph(1).replay)
            runtime.save_shards(tmp_path / "s")
            wrong += wrong_after(runtime, model, runtime.graph(1).replay)  # a save changes nothing
        with compile_bytes(group, model, transport=transport, checkpoint=tmp_path / "s", units="layer") as runtime:
            wrong += wrong_after(runtime, model, lambda: runtime.run(1))
            wrong += wrong_after(runtime, model, runtime.graph(1).replay)
            report = runtime.load_report
            assert report is not None and {row.way for row in report.weights} == {"shard file"}
            assert report.bytes_read == runtime.layout.shard_bytes + runtime.layout.resident_bytes
            return wrong

    assert run_on_ranks(program, 3) == [[]] * 3


def test_reads_and_writes_of_any_size_bring_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "PIECE_BYTES", 500)
    monkeypatch.setattr(saving, "SYNC_BYTES", 1500)
    monkeypatch.setattr(shard_filler, "WINDOW_BYTES", 700)
    monkeypatch.setattr(shard_filler, "PIECE_BYTES", 300)
    run_on_ranks(save, 2, tmp_path / "s", {"units": "weight"})
    save_folder(tmp_path / "by hand", KINDS.spec(), 2, units="weight")
    assert content(tmp_path / "s") == content(tmp_path / "by hand")
    assert run_on_ranks(load, 2, tmp_path / "s") == [[], []]


def test_the_caller_is_told_how_far_a_load_is(tmp_path: Path) -> None:
    run_on_ranks(save, 2, tmp_path / "s")

    def program(group: Group) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        load(group, tmp_path / "s", {"on_load": lambda done, total: told.append((done, total))})
        return told

    for told in run_on_ranks(program, 2):
        assert told == sorted(told) and len({total for _, total in told}) == 1
        assert told[-1][0] == told[-1][1] > 0


# --- the plan ---


@pytest.mark.parametrize("choices", [*POLICIES, {"include": "*float32", "units": "layer"}], ids=str)
def test_auto_takes_the_units_of_the_files(choices: dict[str, Any], tmp_path: Path) -> None:
    """Also where auto alone would shard something else, or, on one rank, nothing at all."""
    for world_size in (1, 2):
        save_folder(tmp_path / f"{world_size}", KINDS.spec(), world_size, **choices)

        def program(group: Group, folder: Path) -> list[tuple[str, ...]]:
            with graphshard.compile(KINDS, group, checkpoint=folder, capture_sizes=(), prefetch_depth=1) as runtime:
                assert wrong_weights(runtime) == []
                assert not runtime.plan.units or runtime.plan.prefetch_depth == 1  # all else is chosen as ever
                if runtime.plan.unit_policy == "placed":
                    assert "as the shard files have them" in runtime.plan.reasons[0]
                return [unit.weights for unit in runtime.plan.units]

        units = [unit.weights for unit in read_manifest(tmp_path / f"{world_size}").units]
        assert run_on_ranks(program, world_size, tmp_path / f"{world_size}") == [units] * world_size


def test_the_same_plan_or_choices_as_at_the_save_are_no_contradiction(tmp_path: Path) -> None:
    choices = {"units": "bytes:1KiB", "alignment_bytes": 512}
    run_on_ranks(save, 2, tmp_path / "s", choices)

    def program(group: Group) -> list[str]:
        with graphshard.compile(KINDS, group, checkpoint=tmp_path / "s", min_shard_bytes=0, **choices) as runtime:
            wrong, plan = wrong_weights(runtime), runtime.plan
        with graphshard.compile(KINDS, group, checkpoint=tmp_path / "s", plan=plan) as runtime:
            return wrong + wrong_weights(runtime)

    assert run_on_ranks(program, 2) == [[], []]


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (
            {"units": "weight", "min_shard_bytes": 0},
            "0.float32 to 0.gaps (18 weights) in the files, 0.float32",
        ),
        ({"alignment_bytes": 1024}, "alignment_bytes is 256 in the files, 1024 in the plan"),
        ({"plan": "replicated"}, "2 units in the files, 0 in the plan"),
        ({"exclude": "0.int8", "units": "layer", "min_shard_bytes": 0}, "(17 weights) in the plan"),
    ],
    ids=str,
)
def test_a_choice_that_contradicts_the_files_is_refused(choices: dict[str, Any], says: str, tmp_path: Path) -> None:
    save_folder(tmp_path / "s", KINDS.spec(), 2, units="layer")
    error = the_error(try_on_ranks(load, 2, tmp_path / "s", choices))
    assert "LoadError" in error and "another layout than this plan" in error and says in error
    assert "Leave out the plan" in error and str(tmp_path / "s") in error


# --- versions ---


def test_the_version_of_the_weights_is_saved_and_comes_back(tmp_path: Path) -> None:
    model = ByteModel(LAYERS)

    def program(group: Group) -> list[str]:
        with compile_bytes(group, model) as runtime:
            assert runtime.save_shards(tmp_path / "old").epoch == 0
            runtime.update(model.tensors(1))
            runtime.update(model.tensors(2))
            assert runtime.save_shards(tmp_path / "new").epoch == 4
        wrong = []
        for name, version, epoch in (("old", 0, 0), ("new", 2, 4)):
            with compile_bytes(group, model, checkpoint=tmp_path / name) as runtime:
                assert runtime.epoch == epoch
                outputs = runtime.graph(1)
                outputs.replay()
                wrong += model.wrong(runtime.buffers(min(runtime.programs), "output"), version)
                runtime.update(model.tensors(5))
                assert runtime.epoch == epoch + 2
                outputs.replay()
                wrong += model.wrong(runtime.buffers(min(runtime.programs), "output"), 5)
        return wrong

    assert run_on_ranks(program, 2) == [[], []]
    resharded(tmp_path / "new", tmp_path / "one", 1)
    assert read_manifest(tmp_path / "one").epoch == 4


def test_a_save_replaces_what_was_there_and_leaves_no_old_file(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    run_on_ranks(save, 3, folder)
    (folder / "notes.txt").write_text("mine")
    run_on_ranks(save, 2, folder, {"units": "layer"}, 1)
    manifest = read_manifest(folder)
    assert sorted(content(folder)) == sorted([MANIFEST_NAME, "notes.txt", *map(manifest.file_name, range(2))])
    assert run_on_ranks(load, 2, folder, {}, 1) == [[], []]
    run_on_ranks(save, 2, folder, {"units": "layer"}, 1)  # the very same again
    assert read_manifest(folder) == manifest and run_on_ranks(load, 2, folder, {}, 1) == [[], []]


# --- turns ---


def test_a_save_waits_for_the_step_of_another_thread_and_refuses_its_own(tmp_path: Path) -> None:
    model = ByteModel(LAYERS)

    def program(group: Group) -> None:
        with compile_bytes(group, model, units="layer") as runtime:
            step = runtime.begin_step(1)
            with pytest.raises(ProgramError, match="a step of this thread is open"):
                runtime.save_shards(tmp_path / "s")
            done: list[int] = []
            thread = threading.Thread(target=lambda: done.append(runtime.save_shards(tmp_path / "s").world_size))
            thread.start()
            assert done == [] and not (tmp_path / "s" / MANIFEST_NAME).exists()
            step.abort()
            thread.join(30)
            assert done == [1]
        with pytest.raises(ProgramError, match="this runtime is closed"):
            runtime.save_shards(tmp_path / "s")

    run_on_ranks(program, 1)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    run_on_ranks(save, 2, tmp_path / "s")  # what is made once in a process
    with no_growth():
        run_on_ranks(save, 2, tmp_path / "s")
        assert run_on_ranks(load, 2, tmp_path / "s") == [[], []]
        (tmp_path / "s" / read_manifest(tmp_path / "s").file_name(1)).unlink()
        assert "is missing" in the_error(try_on_ranks(load, 2, tmp_path / "s"))


# --- processes ---


@pytest.mark.slow  # its short sibling is with the files: a process without torch that is killed in a save
def test_a_rank_that_is_killed_in_a_save_leaves_the_old_folder(tmp_path: Path) -> None:
    model, folder = ByteModel(LAYERS), tmp_path / "s"

    def first(group: Group) -> None:
        with compile_bytes(group, model, capture_sizes=()) as runtime:
            runtime.save_shards(folder)

    run_on_ranks(first, 2)
    before = content(folder)
    with start_processes(die_in_a_save, 2, str(folder), 1) as processes:
        results = processes.wait(240.0)
    assert "rank 1" in results[0].value and results[1].error == "was killed by SIGKILL"
    after = content(folder)
    assert {name: after.pop(name) for name in before} == before
    assert all(name.endswith(".part") for name in after)

    def again(group: Group) -> list[str]:
        with compile_bytes(group, model, checkpoint=folder) as runtime:
            wrong = wrong_after(runtime, model, runtime.graph(1).replay)
            runtime.save_shards(folder)
            return wrong

    assert run_on_ranks(again, 2) == [[], []]
    assert content(folder) == before  # what was left of the save that did not end is gone


@pytest.mark.slow
def test_a_rank_that_comes_back_loads_the_file_of_its_predecessor(tmp_path: Path) -> None:
    from signs import Signs

    with Signs(tmp_path) as signs, start_processes(serve_shards, 2, str(tmp_path), group_timeout_s=60.0) as ranks:
        signs.wait_for("ready", range(2))
        ranks.signal(1, 9)
        assert ranks.restart(1).error == "was killed by SIGKILL"
        assert signs.wait_for("ready", [1]) == {1: ranks.pids[1]}
        signs.stop(range(2))
        results = ranks.wait(240.0)
    assert [result.error for result in results] == ["", ""]
    assert [result.value["wrong"] for result in results] == [[], []]
    assert results[1].value["is_newcomer"] and results[1].value["units"] == len(LAYERS)
    assert "came back" in results[1].value["refused"]
