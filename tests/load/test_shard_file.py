"""Shard files and their folder: written whole or not at all, and nothing that was not written passes for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from shard_folders import DTYPES, ODD_DTYPES, all_kinds, content, save_folder, self_naming

from graphshard.core.errors import DeviceError, LoadError, SpecError
from graphshard.core.layout import chunk_pieces
from graphshard.load.atomic_file import AtomicFile
from graphshard.load.safetensors_file import SafetensorsFile
from graphshard.load.shard_file import DATA_ALIGNMENT_BYTES, ShardFile
from graphshard.load.shard_folder import ShardFolder, find_shards, open_folder, remove_strays
from graphshard.load.shard_manifest import MANIFEST_NAME, ShardManifest, read_manifest
from graphshard.load.shard_reader import ShardReader
from graphshard.load.writer import write_safetensors

MODEL = all_kinds((*DTYPES, *ODD_DTYPES))


def all_weights(folder: Path) -> dict[str, bytes]:
    """Every weight as stored, each chunk verified."""
    found = {}
    with ShardReader(folder, lambda count: None) as reader:
        layout = reader.manifest.layout
        for unit in layout.units:
            whole = b"".join(bytes(piece) for _, piece in reader.unit(unit.unit))
            found |= {view.weight: whole[view.offset : view.offset + view.num_bytes] for view in unit.views}
        for index, view in enumerate(layout.resident):
            found[view.weight] = b"".join(bytes(piece) for _, piece in reader.resident(index))
    return found


def truth(version: int = 0) -> dict[str, bytes]:
    return {spec.name: self_naming(spec, version) for spec in MODEL.weights}


@pytest.mark.parametrize("units", ["layer", "weight", "bytes:1KiB"])
def test_every_byte_comes_back_whatever_its_dtype_and_strides(units: str, tmp_path: Path) -> None:
    for world_size in (1, 2, 5):
        folder = tmp_path / f"{world_size}"
        save_folder(folder, MODEL, world_size, units=units)
        assert all_weights(folder) == truth()


def test_a_file_is_two_tensors_of_bytes_that_other_tools_read(tmp_path: Path) -> None:
    manifest = save_folder(tmp_path, MODEL, 3, epoch=6)
    numpy = pytest.importorskip("safetensors.numpy")
    for rank in range(3):
        path = tmp_path / manifest.file_name(rank)
        assert path.name.startswith(f"shard-0000{rank}-of-00003.") and SafetensorsFile(path).metadata["epoch"] == "6"
        assert SafetensorsFile(path).entries["shards"].begin % DATA_ALIGNMENT_BYTES == 0
        tensors = numpy.load_file(path)
        assert {name: t.nbytes for name, t in tensors.items()} == {
            "shards": manifest.layout.shard_bytes,
            "resident": manifest.layout.resident_bytes,
        }
        for unit in manifest.layout.units:
            for piece in chunk_pieces(unit, rank):
                at = unit.chunk_offset + piece.chunk_offset
                found = tensors["shards"][at : at + piece.weight_end - piece.weight_begin].tobytes()
                assert found == truth()[piece.weight][piece.weight_begin : piece.weight_end]


def test_the_manifest_is_a_round_trip_and_its_digest_covers_all(tmp_path: Path) -> None:
    manifest = save_folder(tmp_path, MODEL, 2)
    assert read_manifest(tmp_path) == manifest
    others = [save_folder(tmp_path / "e", MODEL, 2, epoch=2), save_folder(tmp_path / "v", MODEL, 2, version=1)]
    others.append(save_folder(tmp_path / "u", MODEL, 2, alignment_bytes=512))
    assert len({one.digest for one in (manifest, *others)}) == 4
    assert len({one.file_name(0) for one in (manifest, *others)}) == 4


def test_what_a_path_means(tmp_path: Path) -> None:
    """Shard files, by folder or manifest; something else; or an error where a guess could be wrong."""
    manifest = save_folder(tmp_path / "s", MODEL, 1)
    for path in (tmp_path / "s", tmp_path / "s" / MANIFEST_NAME):
        assert find_shards(path) == ShardFolder(tmp_path / "s", manifest)
    (tmp_path / "model").mkdir()
    write_safetensors(tmp_path / "model" / "model.safetensors", (), ())
    with pytest.raises(LoadError, match="it cannot be looked at"):
        find_shards(tmp_path / ("x" * 5000))
    for other in ("model", "model/model.safetensors", "none", f"none/{MANIFEST_NAME}", "."):
        assert find_shards(tmp_path / other) is None
    with pytest.raises(LoadError, match=rf"the shard file of one rank: give its folder, {tmp_path / 's'},"):
        find_shards(tmp_path / "s" / manifest.file_name(0))
    os.link(tmp_path / "model" / "model.safetensors", tmp_path / "s" / "model.safetensors")
    with pytest.raises(LoadError, match=rf"give {tmp_path / 's' / MANIFEST_NAME} or .*model.safetensors, whichever"):
        find_shards(tmp_path / "s")
    assert find_shards(tmp_path / "s" / MANIFEST_NAME) == ShardFolder(tmp_path / "s", manifest)
    (tmp_path / "s" / "model.safetensors").unlink()
    (tmp_path / "s" / MANIFEST_NAME).unlink()
    with pytest.raises(LoadError, match=r"there is no shards.json, which is written last"):
        find_shards(tmp_path / "s")


# --- manifests that are refused ---


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / MANIFEST_NAME
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def test_a_manifest_with_one_value_changed_is_damaged(tmp_path: Path) -> None:
    """Whatever the value: what a digest covers cannot be edited into something that loads wrong."""
    save_folder(tmp_path, MODEL, 2)
    text = (tmp_path / MANIFEST_NAME).read_text()
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda told: told.update(world_size=1),
        lambda told: told.update(world_size="2"),
        lambda told: told.update(epoch=1),
        lambda told: told.update(alignment_bytes=512),
        lambda told: told.update(alignment_bytes=3),
        lambda told: told.update(model="another"),
        lambda told: told.pop("units"),
        lambda told: told["units"].pop(),
        lambda told: told["units"].append(["stranger", ["none"]]),
        lambda told: told["weights"].reverse(),
        lambda told: told["weights"][0].__setitem__(1, "float31"),
        lambda told: told["weights"][0].__setitem__(2, [37, -5]),
        lambda told: told["weights"].append(told["weights"][0]),
        lambda told: told["chunks"].pop(),
        lambda told: told["chunks"][1].pop(),
        lambda told: told["chunks"][1].__setitem__(0, "x"),
        lambda told: told["resident"].__setitem__(0, f"{0:016x}"),
        lambda told: told["resident"].pop(),
        lambda told: told.update(digest="0" * 64),
        lambda told: told.pop("digest"),
    ]
    for number, change in enumerate(changes):
        (tmp_path / MANIFEST_NAME).write_text(text)
        edit(tmp_path, change)
        with pytest.raises(LoadError, match=r"shards.json is damaged: .*; copy the folder again"):
            raise AssertionError(f"change {number} was read as {read_manifest(tmp_path)}")


def test_a_manifest_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"there is no shards.json, which is written last"):
        read_manifest(tmp_path)
    save_folder(tmp_path, MODEL, 2)
    data = (tmp_path / MANIFEST_NAME).read_bytes()
    for size in range(0, len(data) - 3, 997):
        (tmp_path / MANIFEST_NAME).write_bytes(data[:size])
        with pytest.raises(LoadError, match="is damaged"):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    os.mkfifo(tmp_path / MANIFEST_NAME)
    with pytest.raises(LoadError, match="it is a pipe, not a file; copy the folder again"):  # and is not waited for
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_NAME).unlink()
    for text, found in (("[]", "list"), ('{"format": "graphshard-shards-9"}', "graphshard-shards-9"), ("{}", "None")):
        (tmp_path / MANIFEST_NAME).write_text(text)
        with pytest.raises(LoadError, match=f"has format '?{found}'?, this version reads graphshard-shards-1"):
            read_manifest(tmp_path)


# --- files that are refused ---


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, ShardManifest]:
    return tmp_path / "s", save_folder(tmp_path / "s", MODEL, 2, epoch=2)


def refused(folder: Path, manifest: ShardManifest, rank: int) -> str:
    with pytest.raises(LoadError) as caught:
        ShardFile(folder, manifest, rank)
    text = str(caught.value)
    assert str(folder) in text and "copy the folder again" in text
    return text


def test_a_missing_or_renamed_file_is_named_with_what_is_there(two: tuple[Path, ShardManifest]) -> None:
    folder, manifest = two
    (folder / manifest.file_name(1)).rename(folder / "shard-00001-of-00002.safetensors")
    text = refused(folder, manifest, 1)
    assert "the shard file of rank 1 is missing" in text and "shard-00001-of-00002.safetensors" in text
    for path in folder.glob("shard-*"):
        path.unlink()
    assert "no shard file at all" in refused(folder, manifest, 0)


def test_swapped_and_duplicated_files_are_another_ranks(two: tuple[Path, ShardManifest]) -> None:
    folder, manifest = two
    paths = [folder / manifest.file_name(rank) for rank in range(2)]
    data = [path.read_bytes() for path in paths]
    paths[1].write_bytes(data[0])
    assert "holds the chunks of rank 0, not those of rank 1" in refused(folder, manifest, 1)
    paths[0].write_bytes(data[1])
    assert "holds the chunks of rank 1, not those of rank 0" in refused(folder, manifest, 0)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"epoch": 4}, "epoch 4 instead of 2"),
        ({"epoch": 2, "version": 1}, "manifest "),
        ({"epoch": 2, "alignment_bytes": 512}, "layout "),
        ({"epoch": 2, "units": "layer"}, "layout "),
    ],
    ids=str,
)
def test_a_file_of_another_save_is_foreign(
    two: tuple[Path, ShardManifest], other: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder, manifest = two
    foreign = save_folder(tmp_path / "t", MODEL, 2, **other)
    os.replace(tmp_path / "t" / foreign.file_name(1), folder / manifest.file_name(1))
    text = refused(folder, manifest, 1)
    assert "is a file of another save" in text and says in text
    ShardFile(folder, manifest, 0).close()


def test_a_file_for_another_world_size_is_foreign(two: tuple[Path, ShardManifest], tmp_path: Path) -> None:
    folder, manifest = two
    foreign = save_folder(tmp_path / "t", MODEL, 3, epoch=2)
    os.replace(tmp_path / "t" / foreign.file_name(1), folder / manifest.file_name(1))
    assert "world_size 3 instead of 2" in refused(folder, manifest, 1)


def test_a_truncated_or_longer_file_is_refused_when_it_is_opened(two: tuple[Path, ShardManifest]) -> None:
    folder, manifest = two
    path = folder / manifest.file_name(0)
    data = path.read_bytes()
    for size in (0, 7, 100, 4095, 4096, len(data) - 1):
        path.write_bytes(data[:size])
        assert "truncated" in refused(folder, manifest, 0)
    path.write_bytes(data + b"\0")
    with pytest.raises(LoadError, match="1 bytes after the last tensor"):
        ShardFile(folder, manifest, 0)


def test_another_safetensors_file_is_no_shard_file(two: tuple[Path, ShardManifest]) -> None:
    folder, manifest = two
    path = folder / manifest.file_name(0)
    write_safetensors(path, MODEL.weights[:1], [self_naming(MODEL.weights[0])])
    assert "is no shard file: its format is None" in refused(folder, manifest, 0)
    write_safetensors(path, MODEL.weights[:1], [self_naming(MODEL.weights[0])], manifest.metadata(0))
    assert "its layout asks for" in refused(folder, manifest, 0)


# --- saves that do not end ---


class Killed(BaseException):
    """What a process that is killed does not survive; no cleanup runs in it either."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Arrange that the n-th call that changes the disk is the last one that is not made."""
    counts = {"left": -1}

    def watched(name: str) -> None:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            counts["left"] -= 1
            if counts["left"] == 0:
                raise Killed(name)
            return None if name == "fsync" else real(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("pwrite", "fsync", "replace", "ftruncate"):
        watched(name)
    monkeypatch.setattr(AtomicFile, "discard", AtomicFile._close)
    return lambda number: counts.update(left=number)


def test_a_save_that_is_killed_anywhere_leaves_the_old_folder_or_the_new_one(
    tmp_path: Path, kill_at: Callable[[int], None]
) -> None:
    outcomes = []
    for number in range(1, 1000):
        folder = tmp_path / str(number)
        kill_at(-1)
        old = save_folder(folder, MODEL, 2, epoch=0)
        kill_at(number)
        try:
            save_folder(folder, MODEL, 3, version=1, epoch=2)
        except Killed:
            outcomes.append(read_manifest(folder).epoch)
            assert all_weights(folder) == truth(outcomes[-1] // 2)
            kill_at(-1)
            assert remove_strays(folder) == []
            assert all_weights(folder) == truth(outcomes[-1] // 2)
            if outcomes[-1] == 0:
                assert sorted(content(folder)) == sorted([MANIFEST_NAME, old.file_name(0), old.file_name(1)])
        else:
            break
    assert outcomes == sorted(outcomes) and outcomes.count(0) > 10
    assert outcomes.count(2) == 1  # the last call of all syncs the folder that has the new manifest already


KILLED_IN_A_SAVE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from shard_folders import save_folder
from test_shard_file import MODEL
left, pwrite = int(sys.argv[3]), os.pwrite
def write(fd, data, offset):
    global left
    left -= 1
    if left == 0:
        pwrite(fd, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return pwrite(fd, data, offset)
os.pwrite = write
save_folder(Path(sys.argv[2]), MODEL, 2, version=1, epoch=2)
"""


@pytest.mark.parametrize("number", [1, 9])
def test_a_process_that_is_killed_in_a_save_leaves_the_old_folder(number: int, tmp_path: Path) -> None:
    save_folder(tmp_path, MODEL, 2)
    before = content(tmp_path)
    arguments = [str(Path(__file__).parent), str(tmp_path), str(number)]
    done = subprocess.run([sys.executable, "-c", KILLED_IN_A_SAVE, *arguments], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert before.items() < content(tmp_path).items() and all_weights(tmp_path) == truth()
    assert remove_strays(tmp_path) == [] and content(tmp_path) == before


def test_nothing_is_named_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is synced before it is renamed, and its folder before the manifest is."""
    log: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        log.append("folder" if path == tmp_path else path.name)
        fsync(fd)

    def rename(source: Path, target: Path) -> None:
        assert log[-1] == Path(source).name, f"{source} was renamed after {log}"
        log.append(f"named {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    save_folder(tmp_path, MODEL, 2)
    assert [line for line in log if line.startswith("named") or line == "folder"][1::2] == ["folder"] * 3
    assert log[-2:] == [f"named {MANIFEST_NAME}", "folder"]


def test_only_stray_shard_files_are_removed(tmp_path: Path) -> None:
    old = save_folder(tmp_path, MODEL, 3)
    new = save_folder(tmp_path, MODEL, 2, epoch=2)
    mine = ["notes.txt", "shard-00001-of-00002.safetensors", "shard-x.part", "config.json"]
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / f"{old.file_name(1)}.0123abcd.part").write_text("left")
    assert remove_strays(tmp_path) == []
    assert sorted(content(tmp_path)) == sorted([*mine, MANIFEST_NAME, new.file_name(0), new.file_name(1)])


def test_strays_beside_a_damaged_manifest_stay(tmp_path: Path) -> None:
    """It may be all that tells which files are whole."""
    save_folder(tmp_path, MODEL, 2)
    edit(tmp_path, lambda told: told.pop("digest"))
    before = content(tmp_path)
    assert remove_strays(tmp_path) == [] and content(tmp_path) == before


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_folder_with_a_checkpoint_is_no_place_for_shard_files(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(SpecError, match=rf"{name} lies there.*give a folder of its own"):
        open_folder(tmp_path)


def test_a_place_that_cannot_be_written_is_a_named_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"no/such/folder/x cannot be written: No such file"):
        AtomicFile(tmp_path / "no/such/folder/x")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="give a folder"):
        open_folder(tmp_path / "file" / "below")
