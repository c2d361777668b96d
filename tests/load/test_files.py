"""Files that change while they are read, and indexes that say other than their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from census import open_files

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from graphshard.load.store import tensor_bytes
from graphshard.load.writer import write_safetensors

SIZE = 5000


def write(folder: Path, value: int, names: str = "ab", file: str = SINGLE_NAME) -> Path:
    """A file of tensors of `SIZE` bytes, all `value`."""
    path = folder / file
    write_safetensors(
        path, [WeightSpec(name, (SIZE,), "uint8") for name in names], [bytes([value]) * SIZE] * len(names)
    )
    return path


def index(folder: Path, weight_map: dict[str, str]) -> Path:
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_ranges_are_read_and_counted(tmp_path: Path) -> None:
    data = [os.urandom(SIZE), os.urandom(7)]
    write_safetensors(tmp_path / SINGLE_NAME, [WeightSpec("a", (SIZE,), "uint8"), WeightSpec("b", (7,), "uint8")], data)
    checkpoint = Checkpoint(tmp_path)
    out = bytearray(100)
    checkpoint.read_into("a", 4900, memoryview(out))
    checkpoint.read_into("b", 7, memoryview(b""))
    assert out == data[0][4900:] and checkpoint.num_bytes_read == 100
    assert tensor_bytes(checkpoint, "b") == data[1] and checkpoint.num_bytes_read == 107
    assert checkpoint.where == str(tmp_path)


@pytest.mark.parametrize("cut", [1, SIZE, 2 * SIZE + 1])
def test_a_file_that_is_cut_short_after_it_was_opened_is_an_error_and_no_signal(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, 1)
    checkpoint = Checkpoint(tmp_path)
    size = path.stat().st_size
    os.truncate(path, size - cut)
    with pytest.raises(LoadError, match=rf"{path} was truncated after it was opened: it had {size} bytes, now none at"):
        tensor_bytes(checkpoint, "b")


def overwrite(path: Path) -> None:
    """In place, and as large as before; the time of change is the file system's own."""
    before = path.stat().st_mtime_ns
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[: -2 * SIZE] + b"\2" * 2 * SIZE)
    if path.stat().st_mtime_ns == before:  # file systems' clocks tick a few times in a hundredth of a second
        os.utime(path, ns=(before + 1, before + 1))


def replace(path: Path) -> None:
    """By rename, with the very same size and times."""
    times = path.stat()
    other = write(path.parent, 2, file="other.safetensors")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize(
    ("change", "message", "later"),
    [
        (overwrite, r"was written to since it was opened", 2),
        (replace, r"was replaced by another file since it was opened", 2),
        (Path.unlink, r"is gone since it was opened", None),
    ],
)
def test_changes_are_noticed_and_never_a_mixture(
    tmp_path: Path, change: Callable[[Path], object], message: str, later: int | None
) -> None:
    path = write(tmp_path, 1)
    checkpoint = Checkpoint(tmp_path)
    before = checkpoint.identity()
    assert tensor_bytes(checkpoint, "a") == b"\1" * SIZE and checkpoint.identity() == before
    change(path)
    with pytest.raises(LoadError, match=message):
        checkpoint.identity()
    if later is not None:  # nothing is kept by path: who opens it now reads what is there now
        fresh = Checkpoint(tmp_path)
        assert tensor_bytes(fresh, "b") == bytes([later]) * SIZE and fresh.identity() != before


def test_descriptors_go_when_a_checkpoint_is_closed_forgotten_or_refused(tmp_path: Path) -> None:
    write(tmp_path, 1, "a", "1.safetensors")
    write(tmp_path, 1, "b", "2.safetensors")
    folder = index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    checkpoint = Checkpoint(folder)
    assert len(open_files(tmp_path)) == 2
    checkpoint.close()
    checkpoint.close()
    assert open_files(tmp_path) == []
    with pytest.raises(LoadError, match="is closed: open the checkpoint again"):
        tensor_bytes(checkpoint, "a")
    checkpoint = Checkpoint(folder)
    del checkpoint
    assert open_files(tmp_path) == []
    os.truncate(tmp_path / "2.safetensors", 100)
    with pytest.raises(LoadError, match="is truncated"):
        Checkpoint(folder)
    assert open_files(tmp_path) == []


@pytest.mark.parametrize(
    ("weight_map", "messages"),
    [
        ({"a": "1.safetensors", "c": "3.safetensors"}, ["names 2 files, of which 1 are not beside it: 3.safetensors"]),
        ({"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}, ["held by two files: b in 1.safe"]),
        (
            {"a": "2.safetensors", "b": "1.safetensors"},
            [
                "named by the index, not held: a in 2.safetensors",
                "held by two files: b in 1.safetensors and 2.safetensors",
                "not named by the index: c in 2",
            ],
        ),
    ],
)
def test_all_that_index_and_files_disagree_about_is_one_error(
    tmp_path: Path, weight_map: dict[str, str], messages: list[str]
) -> None:
    write(tmp_path, 1, "ab", "1.safetensors")
    write(tmp_path, 1, "bc", "2.safetensors")
    with pytest.raises(LoadError) as raised:
        Checkpoint(index(tmp_path, weight_map))
    assert all(message in str(raised.value) for message in messages), raised.value


def test_a_name_that_stands_twice_in_an_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    with pytest.raises(LoadError, match="a stands there twice"):
        Checkpoint(tmp_path)


def test_a_folder_in_a_files_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "1.safetensors").mkdir()
    with pytest.raises(LoadError, match=r"1 are not beside it: 1\.safetensors"):
        Checkpoint(index(tmp_path, {"a": "1.safetensors"}))
