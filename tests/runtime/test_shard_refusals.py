"""What cannot be loaded or saved is refused on every rank alike, in seconds, and costs nothing that was there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes
from census import no_growth
from ranks import run_on_ranks, try_on_ranks
from shard_folders import content, save_folder
from shard_programs import KINDS, LAYERS, KindsModel, load, save, the_error, without_sync
from small_modules import Stack

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import CommError, GraphshardError, SpecError
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load import shard_file, shard_folder
from graphshard.load.safetensors_file import SafetensorsFile
from graphshard.load.shard_manifest import MANIFEST_NAME, ShardManifest, read_manifest
from graphshard.runtime import saving
from graphshard.runtime.memory import RuntimeMemory

fixture = pytest.fixture(autouse=True)(without_sync)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_folder(tmp_path / "s", KINDS.spec(), 2, units="layer", epoch=2)
    return tmp_path / "s"


def refusal(folder: Path, world_size: int = 2, **choices: Any) -> str:
    """The one error of a load by all ranks."""
    return the_error(try_on_ranks(load, world_size, folder, choices, timeout_s=30.0))


# --- files ---


def test_another_number_of_ranks_is_told_the_command(saved: Path) -> None:
    error = refusal(saved, 3)
    target = f"{saved}-3-ranks"
    assert error.startswith("LoadError") and "are for 2 ranks, this group has 3" in error
    assert f"graphshard reshard {saved} {target} --world-size 3" in error


def truncate(path: Path, num_bytes: int) -> None:
    os.truncate(path, path.stat().st_size - num_bytes)


def flip(path: Path, area: str, at: int) -> None:
    data = bytearray(path.read_bytes())
    entry = SafetensorsFile(path).entries[area]
    data[(entry.begin if at >= 0 else entry.end) + at] ^= 0x10
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def foreign(one: Path, **other: Any) -> None:
    elsewhere = one.parent.parent / "elsewhere"
    manifest = save_folder(elsewhere, KINDS.spec(), 2, **{"units": "layer", **other})
    os.replace(elsewhere / manifest.file_name(1), one)


HARMS: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing": (lambda first, second: second.unlink(), "the shard file of rank 1 is missing"),
    "a pipe": (lambda first, second: (second.unlink(), os.mkfifo(second)), "cannot be read: it is a pipe, not a file"),
    "a folder": (lambda first, second: (second.unlink(), second.mkdir()), "cannot be read: "),
    "a link to itself": (lambda first, second: (second.unlink(), second.symlink_to(second)), "cannot be read: "),
    "renamed": (lambda first, second: second.rename(second.with_name("x.safetensors")), "the shard file of rank 1 is"),
    "truncated by a byte": (lambda first, second: truncate(second, 1), "is truncated by 1 bytes"),
    "truncated to nothing": (lambda first, second: os.truncate(second, 0), "is truncated"),
    "swapped": (swap, "holds the chunks of rank 1, not those of rank 0"),
    "copied": (lambda first, second: second.write_bytes(first.read_bytes()), "chunks of rank 0, not those of rank 1"),
    "first byte": (lambda first, second: flip(second, "shards", 0), "chunk of unit 0 (layers.0) has checksum"),
    "last byte": (lambda first, second: flip(second, "shards", -1), "chunk of unit 1 (layers.1) has checksum"),
    "resident": (lambda first, second: flip(second, "resident", 0), "resident weight embed has checksum"),
    "another epoch": (lambda first, second: foreign(second, epoch=4), "epoch 4 instead of 2"),
    "another save": (lambda first, second: foreign(second, epoch=2, version=1), "a file of another save"),
    "another layout": (lambda first, second: foreign(second, epoch=2, units="weight"), "layout "),
    "no manifest": (lambda first, second: (first.parent / MANIFEST_NAME).unlink(), "which is written last"),
    "half a manifest": (lambda first, second: os.truncate(first.parent / MANIFEST_NAME, 900), "is damaged"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_folder_that_is_not_what_was_saved_is_refused(harm: str, saved: Path) -> None:
    """Rank 1's file is the one that is harmed; rank 0, whose own is right, raises the same."""
    act, says = HARMS[harm]
    manifest = read_manifest(saved)
    act(saved / manifest.file_name(0), saved / manifest.file_name(1))
    error = refusal(saved)
    assert error.startswith("LoadError") and says in error and str(saved) in error, error
    assert "again" in error  # what to do: copy, load, save


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda path: os.utime(path), "was written to since it was opened"),
        (lambda path: os.replace(path.with_name("copy"), path), "was replaced by another file since it was opened"),
        (lambda path: os.truncate(path, 5000), "was truncated after it was opened"),
    ],
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    change: Callable[[Path], None], says: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its bytes are right: what else was read of it may be a mixture."""
    path = saved / read_manifest(saved).file_name(1)
    shutil.copy(path, path.with_name("copy"))
    real, once = shard_file.ShardFile.read_into, [change]

    def read(file: shard_file.ShardFile, area: str, begin: int, out: memoryview) -> None:
        if file.rank == 1 and once:
            once.pop()(path)
        real(file, area, begin, out)

    monkeypatch.setattr(shard_file.ShardFile, "read_into", read)
    error = refusal(saved)
    assert error.startswith("LoadError: load failed on rank 1") and says in error and path.name in error


# --- models ---


def changed(name: str, **what: Any) -> KindsModel:
    spec = KINDS.spec()
    weights = tuple(replace(w, **what) if w.name == name else w for w in spec.weights)
    return KindsModel(ModelSpec(spec.name, weights, spec.segments))


def without(name: str) -> KindsModel:
    spec = KINDS.spec()
    segments = tuple(segment for segment in spec.segments if name not in segment.reads)
    return KindsModel(ModelSpec(spec.name, tuple(w for w in spec.weights if w.name != name), segments))


MODELS: dict[str, tuple[KindsModel, str]] = {
    "dtype": (
        changed("0.bfloat16", dtype="float16"),
        "is bfloat16[5, 7] in the files, and the model asks for float16[5, 7]",
    ),
    "shape": (
        changed("1.int8", shape=(4, 9)),
        "is int8[11, 8] in the files, and the model asks for int8[4, 9]",
    ),
    "strides": (
        changed("0.turned", strides=None),
        "with strides [1, 9] in the files, and the model asks for bfloat16[9, 33]",
    ),
    "missing": (without("1.gaps"), "weight 1.gaps is float32[4, 6] with strides [10, 1] in the files, and the model"),
    "more": (
        KindsModel(replace(KINDS.spec(), weights=(*KINDS.spec().weights, WeightSpec("new", (3,), "uint8")))),
        "weight new is nothing in the files",
    ),
    "order": (
        KindsModel(replace(KINDS.spec(), weights=tuple(reversed(KINDS.spec().weights)))),
        "in another order, embed first instead of norm",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_another_model_is_refused_with_the_first_weight_that_differs(kind: str, saved: Path) -> None:
    model, says = MODELS[kind]

    def program(group: Group) -> None:
        graphshard.compile(model, group, checkpoint=saved).close()

    error = the_error(try_on_ranks(program, 2))
    assert error.startswith("LoadError") and "are of another model" in error and says in error, error


# --- ranks that disagree ---


def test_ranks_that_load_unlike_things_are_refused(saved: Path, tmp_path: Path) -> None:
    save_folder(tmp_path / "t", KINDS.spec(), 2, units="layer", epoch=4)
    others: list[tuple[Any, str]] = [
        (tmp_path / "t", "(epoch 2) on rank 0, shard files "),
        (KINDS.tensors(), "(epoch 2) on rank 0, something else than shard files on rank 1"),
    ]
    for other, says in others:
        error = the_error(try_on_ranks(lambda group, other=other: load(group, (saved, other)[group.rank]), 2))
        assert error.startswith("LoadError: ranks load unlike checkpoints") and says in error, error
    error = the_error(try_on_ranks(lambda group: load(group, (saved, tmp_path / "none")[group.rank]), 2))
    assert "LoadError" in error and ("no checkpoint at" in error or "unlike checkpoints" in error)


# --- saves ---


def saving_fails(folder: Path, world_size: int = 2) -> str:
    """The one error of a save by all ranks; their runtimes go on and are closed."""
    return the_error(try_on_ranks(save, world_size, folder, {"units": "layer"}, 1, timeout_s=30.0))


def fail_on(
    patch: pytest.MonkeyPatch, where: Any, name: str, rank_of: Callable[..., int], victim: int, before: bool = True
) -> None:
    """Make `where.name` fail on one rank as it does where the disk is full."""
    real = getattr(where, name)

    def failing(*arguments: Any, **more: Any) -> Any:
        if rank_of(*arguments) != victim:
            return real(*arguments, **more)
        if not before:
            real(*arguments, **more)
        raise shard_folder.cannot_write(Path("/a/file"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    patch.setattr(where, name, failing)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("stage", ["__init__", "write", "sync", "end", "ended"])
def test_a_full_disk_on_any_rank_costs_nothing_that_was_there(
    stage: str, victim: int, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(saved)
    name = "end" if stage == "ended" else stage
    with monkeypatch.context() as patch:
        if stage == "__init__":
            fail_on(patch, shard_file.ShardFileWriter, name, lambda _, folder, manifest, rank: rank, victim)
        else:
            fail_on(patch, shard_file.ShardFileWriter, name, lambda writer, *_: writer.rank, victim, stage != "ended")
        with no_growth():
            error = saving_fails(saved)
    assert error.startswith("DeviceError") and f"rank {victim}" in error and "No space left on device" in error
    assert content(saved) == before
    assert run_on_ranks(load, 2, saved) == [[], []]


def test_a_full_disk_at_the_manifest_costs_nothing_that_was_there(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = content(saved)
    with monkeypatch.context() as patch:
        fail_on(patch, saving, "commit_manifest", lambda *_: 0, 0)
        assert "DeviceError" in saving_fails(saved)
    assert content(saved) == before


def test_a_save_that_fails_leaves_the_runtime_in_use(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ByteModel(LAYERS)

    def program(group: Group) -> list[str]:
        with compile_bytes(group, model) as runtime:
            with pytest.raises(GraphshardError, match=r"is a file of that name|lies there"):
                runtime.save_shards(saved / MANIFEST_NAME)
            runtime.save_shards(saved)
            runtime.graph(1).replay()
            return model.wrong(runtime.buffers(min(runtime.programs), "output"))

    assert run_on_ranks(program, 2) == [[], []]


def test_places_where_nothing_is_saved(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.safetensors").write_bytes(b"")
    assert "SpecError" in saving_fails(tmp_path / "c") and content(tmp_path / "c") == {"model.safetensors": b""}

    for where in (None, 3, "a\0b"):  # on one rank: the other does not wait for it
        error = the_error(try_on_ranks(lambda group, given=where: save(group, given if group.rank else tmp_path), 2))
        assert error.startswith("SpecError: save_shards failed on rank 1") and "give " in error, error

    def apart(group: Group) -> None:
        save(group, tmp_path / f"rank {group.rank}")

    error = the_error(try_on_ranks(apart, 2))
    assert error.startswith("SpecError: save_shards: ranks were given different folders") and "rank 0" in error


def test_an_attached_module_is_saved_by_its_state_dict(tmp_path: Path) -> None:
    def program(group: Group) -> None:
        attached = graphshard.attach(Stack(), group)
        with pytest.raises(SpecError, match=r"state_dict\(\) instead"):
            attached.runtime.save_shards(tmp_path / "s")
        attached.detach()

    run_on_ranks(program, 1)
    assert list(tmp_path.iterdir()) == []


def test_resident_weights_that_ranks_do_not_share_are_not_saved(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file for each rank with other bytes of one weight would load, and ranks would compute unlike results."""
    before = content(saved)
    real = RuntimeMemory.resident_bytes
    seen: list[int] = []

    def scribbled(memory: RuntimeMemory, view: Any) -> memoryview:
        data = real(memory, view)
        if view.weight == "norm":
            seen.append(1)
            if len(seen) == 2:
                data = memoryview(bytearray(data))
                data[0] ^= 1
        return data

    with monkeypatch.context() as patch:
        patch.setattr(RuntimeMemory, "resident_bytes", scribbled)
        error = saving_fails(saved)
    assert error.startswith(CommError.__name__) and "resident weight norm is not the same on all ranks" in error
    assert content(saved) == before


def test_two_jobs_that_save_to_one_folder_do_not_mix(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever writes the manifest last has it; the other is told."""
    real, other = saving.commit_manifest, read_manifest(saved)

    def commit(folder: Path, manifest: ShardManifest) -> None:
        real(folder, manifest)
        real(folder, other)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "commit_manifest", commit)
        assert "somebody else saves there" in saving_fails(saved)
    assert run_on_ranks(load, 2, saved) == [[], []]
