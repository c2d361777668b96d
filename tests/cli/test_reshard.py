"""`graphshard reshard`: shard files of other numbers of ranks, a plain checkpoint; refusals by exit code."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from cli_runner import apart, here

sys.path.append(str(Path(__file__).parents[1] / "load"))

from shard_folders import all_kinds, content, save_folder

from graphshard.cli.common import EXIT_BAD_REQUEST, EXIT_CANNOT
from graphshard.load.reshard import reshard_command
from graphshard.load.safetensors_file import SafetensorsFile
from graphshard.load.shard_manifest import MANIFEST_NAME

KINDS = all_kinds()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    save_folder(tmp_path / "s", KINDS, 2, epoch=6)
    return tmp_path / "s"


def test_files_for_another_number_of_ranks(shards: Path, tmp_path: Path) -> None:
    """The command line that a refused load prints is the one that helps."""
    line = shlex.split(reshard_command(shards, 3))
    assert line[0] == "graphshard"
    answer = here(*line[1:], "--json", "-")
    assert answer.code == 0 and "shard files for 3 ranks" in answer.err and "epoch 6" in answer.err
    save_folder(tmp_path / "direct", KINDS, 3, epoch=6)
    made = content(tmp_path / "s-3-ranks")
    assert made == content(tmp_path / "direct")
    told = answer.json
    assert (told["world_size"], told["from_world_size"], told["epoch"]) == (3, 2, 6)
    assert {Path(row["file"]).name: row["num_bytes"] for row in told["rows"]} == {n: len(d) for n, d in made.items()}
    assert told["bytes_written"] == sum(map(len, made.values())) and told["bytes_read"] > 0 and told["seconds"] > 0


def test_a_plain_checkpoint(shards: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    answer = here("reshard", shards, path, "--to-checkpoint", "--json", tmp_path / "a.json")
    assert answer.code == 0 and "a checkpoint" in answer.out
    assert list(SafetensorsFile(path).entries) == [weight.name for weight in KINDS.weights]


@pytest.mark.parametrize("options", [[], ["--world-size", 2, "--to-checkpoint"], ["--world-size", 0]], ids=str)
def test_one_of_the_two_is_asked_for(options: list[object], shards: Path, tmp_path: Path) -> None:
    answer = here("reshard", shards, tmp_path / "t", *options)
    assert answer.code == EXIT_BAD_REQUEST and "--world-size" in answer.err and not (tmp_path / "t").exists()


def test_bad_requests_are_one_sentence(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cases = [
        ((tmp_path / "empty", tmp_path / "t"), "no shard files in"),
        ((shards, shards), "holds shard files already"),
        ((tmp_path / "none", tmp_path / "t"), "does not exist"),
    ]
    for (source, target), says in cases:
        answer = here("reshard", source, target, "--world-size", 3)
        assert answer.code == EXIT_BAD_REQUEST and says in answer.err and "Traceback" not in answer.err
    damaged = next(shards.glob("shard-00001-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    answer = here("reshard", shards, tmp_path / "t", "--world-size", 3)
    assert answer.code == EXIT_BAD_REQUEST and answer.err.startswith("LoadError") and answer.err.count("\n") == 1
    assert "truncated by 1 bytes" in answer.err and not (tmp_path / "t" / MANIFEST_NAME).exists()


def test_a_place_that_cannot_be_written_is_this_machines_fault(shards: Path, tmp_path: Path) -> None:
    os.symlink("/proc", tmp_path / "t")  # where not even root makes a folder
    for options in (["--world-size", 3], ["--to-checkpoint"]):
        answer = here("reshard", shards, tmp_path / "t" / "v", *options)
        assert answer.code == EXIT_CANNOT and answer.err.startswith("DeviceError") and answer.err.count("\n") == 1
        assert f"{tmp_path / 't' / 'v'} cannot be written" in answer.err


def test_a_checkpoint_in_no_folder_is_a_bad_request(shards: Path, tmp_path: Path) -> None:
    answer = here("reshard", shards, tmp_path / "none" / "t.safetensors", "--to-checkpoint")
    assert answer.code == EXIT_BAD_REQUEST and "give a file in a folder that exists" in answer.err


def test_it_needs_no_torch(shards: Path, tmp_path: Path) -> None:
    """A machine that only moves files starts at once, and has no need of one."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / "torch.py").write_text("raise ImportError('torch was imported')")
    old = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(blocked), old]))
    try:
        answer = apart("reshard", shards, tmp_path / "t", "--world-size", 3)
    finally:
        os.environ["PYTHONPATH"] = old
    assert answer.code == 0, answer.err
