"""A damaged checkpoint, on one rank or on all: one clear error, the same on every rank, before anything is reserved."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes
from census import open_files
from load_rig import compiled_of, load, tensors_of, write_checkpoint
from ranks import Outcome, try_on_ranks
from torch import Tensor

import graphshard
from graphshard.comm.group import Group
from graphshard.load.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint
from graphshard.runtime import build

MODEL = ByteModel([[5000], [6000], [7]])
FIRST, SECOND, LAST = (weight.name for weight in MODEL.weights)


def _truncated(folder: Path) -> None:
    os.truncate(folder / SINGLE_NAME, (folder / SINGLE_NAME).stat().st_size - 1)


def _cut_to_nothing(folder: Path) -> None:
    os.truncate(folder / SINGLE_NAME, 0)


def _garbage(folder: Path) -> None:
    (folder / SINGLE_NAME).write_bytes(os.urandom(6) + b"\0\0" + os.urandom(5000))


def _gone(folder: Path) -> None:
    (folder / SINGLE_NAME).unlink()


def _header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another header over the same bytes."""
    path = folder / SINGLE_NAME
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def _too_long(folder: Path) -> None:
    _header(folder, lambda header: header[FIRST].update(shape=[5001]))


def _overlapping(folder: Path) -> None:
    _header(folder, lambda header: header[SECOND].update(data_offsets=[4999, 10999]))


def _with(**changed: Tensor | None) -> Callable[[Path], None]:
    """Other tensors than the model's: None leaves one out. `__` stands for a dot."""

    def damage(folder: Path) -> None:
        tensors = MODEL.tensors()
        for key, tensor in changed.items():
            name = key.replace("__", ".")
            tensors.pop(name, None)
            if tensor is not None:
                tensors[name] = tensor
        write_checkpoint(folder, MODEL.spec(), tensors)

    return damage


def _indexed(folder: Path, weight_map: dict[str, str], second: str) -> None:
    """Two files and an index: the first holds FIRST and LAST, the second SECOND and `second`."""
    tensors = MODEL.tensors()
    (folder / SINGLE_NAME).unlink()
    for file, names in (("1.safetensors", [FIRST, LAST]), ("2.safetensors", [SECOND, second])):
        write_checkpoint(folder, MODEL.spec(), {name: tensors.get(name, torch.zeros(3)) for name in names})
        (folder / SINGLE_NAME).rename(folder / file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


PLACES = {FIRST: "1.safetensors", LAST: "1.safetensors", SECOND: "2.safetensors"}


def _twice(folder: Path) -> None:
    _indexed(folder, PLACES, FIRST)


def _unnamed(folder: Path) -> None:
    _indexed(folder, PLACES, "stray")


def _file_missing(folder: Path) -> None:
    _indexed(folder, PLACES, SECOND)
    (folder / "2.safetensors").unlink()


BYTES = torch.zeros(5000, dtype=torch.uint8)
DAMAGES: list[tuple[Callable[[Path], None], list[str]]] = [
    (_truncated, ["is truncated by 1 bytes"]),
    (_cut_to_nothing, ["is truncated: 0 bytes"]),
    (_garbage, ["is not a safetensors file"]),
    (_gone, ["it holds neither model.safetensors nor"]),
    (_too_long, [f"tensor {FIRST} is U8[5001], 5001 bytes, but its data_offsets span 5000"]),
    (_overlapping, [f"tensor {SECOND} at byte", "overlaps the tensor before it"]),
    (_with(bytes__0__w0=None), ["1 tensor of", f"missing  {FIRST}: near it are"]),
    (_with(bytes__0__w0=None, bytes__0__w1=BYTES), [f"missing        {FIRST}: near it are bytes.0.w1", "ignore=("]),
    (_with(lm_head__weight=BYTES), ["not asked for  lm_head.weight", 'ignore=("lm_head.weight",)']),
    (_with(bytes__0__w0=BYTES.view(torch.int8)), [f"another dtype  {FIRST} is int8[5000], the model asks for uint8["]),
    (_with(bytes__0__w0=BYTES[:-1]), [f"another shape  {FIRST} is uint8[4999]"]),
    (
        _with(bytes__0__w0=BYTES[:-1], bytes__1__w0=None, stray=BYTES),
        ["3 tensors of", f"another shape  {FIRST}", f"missing        {SECOND}", "not asked for  stray"],
    ),
    (_twice, ["its files disagree: held by two files: bytes.0.w0 in 1.safetensors and 2.safetensors"]),
    (_unnamed, ["held, not named by the index: stray in 2.safetensors"]),
    (_file_missing, ["names 2 files, of which 1 are not beside it: 2.safetensors"]),
]


def _compile(group: Group, root: str) -> None:
    compile_bytes(group, MODEL, checkpoint=Path(root) / str(group.rank), capture_sizes=()).close()


def _one_error(outcomes: list[Outcome], damaged: list[int]) -> str:
    """What all ranks raised, which names the first damaged one."""
    assert {(outcome.error_type, outcome.error) for outcome in outcomes} == {("LoadError", outcomes[0].error)}
    assert f"on rank {damaged[0]}" in outcomes[0].error
    return outcomes[0].error


@pytest.mark.parametrize(("damage", "messages"), DAMAGES, ids=[str(i) for i in range(len(DAMAGES))])
@pytest.mark.parametrize(("world_size", "damaged"), [(2, [1]), (3, [1]), (3, [0, 1, 2])])
def test_damage_is_the_same_error_everywhere_before_a_byte_is_reserved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    damaged: list[int],
    damage: Callable[[Path], None],
    messages: list[str],
) -> None:
    for rank in range(world_size):
        write_checkpoint(tmp_path / str(rank), MODEL.spec(), MODEL.tensors())
        if rank in damaged:
            damage(tmp_path / str(rank))
    reserved = []
    monkeypatch.setattr(build, "RuntimeMemory", lambda *arguments: reserved.append(arguments))
    error = _one_error(try_on_ranks(_compile, world_size, str(tmp_path)), damaged)
    assert all(message in error for message in messages), error
    assert str(tmp_path / str(damaged[0])) in error and reserved == [] and open_files(tmp_path) == []


def _compile_ignoring(group: Group, folder: str, ignore: str) -> None:
    compile_bytes(group, MODEL, checkpoint=Path(folder) / str(group.rank), ignore=ignore, capture_sizes=()).close()


def test_what_is_allowed_may_be_there(tmp_path: Path) -> None:
    for rank in range(2):
        _with(lm_head__weight=BYTES, layers__0__rotary__inv_freq=BYTES)(tmp_path / str(rank))

    def rank_of(group: Group, *ignore: str) -> None:
        folder = tmp_path / str(group.rank)
        compile_bytes(group, MODEL, checkpoint=folder, ignore=ignore, capture_sizes=()).close()

    assert [outcome.error for outcome in try_on_ranks(rank_of, 2, "lm_head.weight", "*.inv_freq")] == ["", ""]
    for outcome in try_on_ranks(_compile_ignoring, 2, str(tmp_path), "*"):  # a text is a pattern, not its letters
        assert outcome.error == ""
    for outcome in try_on_ranks(_compile_ignoring, 2, str(tmp_path), "lm_head.*"):  # `*` among them
        assert "1 tensor of" in outcome.error and "not asked for  layers.0.rotary.inv_freq" in outcome.error
    for outcome in try_on_ranks(rank_of, 2, "lm_head.weight"):
        assert "1 tensor of" in outcome.error and "not asked for  layers.0.rotary.inv_freq" in outcome.error


def test_copies_that_differ_in_one_byte_are_no_replicas(tmp_path: Path) -> None:
    for rank in range(3):
        tensors = MODEL.tensors()
        tensors[SECOND][17] ^= rank == 2
        write_checkpoint(tmp_path / str(rank), MODEL.spec(), tensors)
    for outcome in try_on_ranks(_compile, 3, str(tmp_path)):
        assert outcome.error_type == "SpecError" and f"weight {SECOND} is not replicated" in outcome.error
        assert "on ranks 0 1, " in outcome.error and "on rank 2 (1 of 3 weights differ)" in outcome.error


def _replaced(folder: Path) -> None:
    write_checkpoint(folder / "new", MODEL.spec(), MODEL.tensors(version=1))
    (folder / "new" / SINGLE_NAME).rename(folder / SINGLE_NAME)


def _overwritten(folder: Path) -> None:
    path = folder / SINGLE_NAME
    before = path.stat().st_mtime_ns
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    os.utime(path, ns=(before + 1, before + 1))  # the clock of the file system may not have gone on yet


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _truncated,
            "it was opened",
        ),  # by a byte that rank 0 reads
        (_cut_to_nothing, "was truncated after it was opened"),
        (_replaced, "was replaced by another file since it was opened"),
        (_overwritten, "was written to since it was opened"),
        (_gone, "is gone since it was opened"),
    ],
)
@pytest.mark.parametrize("changed", [[1], [0, 1]])
def test_what_happens_to_files_during_a_load_is_an_error_on_every_rank(
    tmp_path: Path, changed: list[int], change: Callable[[Path], None], message: str
) -> None:
    model = MODEL.spec()
    for rank in range(2):
        write_checkpoint(tmp_path / str(rank), model, MODEL.tensors())

    def rank_of(group: Group) -> None:
        folder = tmp_path / str(group.rank)
        before_fill = (lambda: change(folder)) if group.rank in changed else (lambda: None)
        load(group, compiled_of(model, 2), Checkpoint(folder), before_fill=before_fill)

    error = _one_error(try_on_ranks(rank_of, 2), changed)
    assert f"load failed on rank {changed[0]}" in error and message in error


def test_a_later_load_reads_what_lies_there_then(tmp_path: Path) -> None:
    model = MODEL.spec()
    folder = write_checkpoint(tmp_path, model, tensors_of(model))
    compiled = compiled_of(model, 1)
    group = graphshard.LocalGroup(1)[0]
    assert load(group, compiled, Checkpoint(folder)).wrong(tensors_of(model)) == []
    write_checkpoint(folder, model, tensors_of(model, version=1))
    assert load(group, compiled, Checkpoint(folder)).wrong(tensors_of(model, version=1)) == []
