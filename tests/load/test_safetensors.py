from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.checkpoint import INDEX_NAME, Checkpoint
from graphshard.load.safetensors_file import TORCH_DTYPES, SafetensorsFile
from graphshard.load.store import tensor_bytes

safetensors_torch = pytest.importorskip("safetensors.torch")


def _write(path: Path, header: Any, data: bytes = b"", *, header_bytes: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)
    return path


def _read(file: SafetensorsFile, name: str) -> bytearray:
    entry = file.entries[name]
    data = bytearray(entry.num_bytes)
    file.read_into(entry.begin, memoryview(data))
    return data


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DTYPES = sorted(
    {name for name in TORCH_DTYPES.values() if hasattr(torch, name)} - {"uint16", "uint32", "uint64", "complex64"}
)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=6))
def test_reads_what_safetensors_writes(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("st") / "a.safetensors"
    made = {}
    for i, (dtype, shape) in enumerate(tensors):
        wanted = getattr(torch, dtype)
        if dtype == "float4_e2m1fn_x2" and not shape:
            shape = [1]  # the library writes no packed pair without a dimension
        numel = int(torch.tensor(shape).prod()) if shape else 1
        raw = torch.randint(0, 2 if dtype == "bool" else 256, (numel * wanted.itemsize,), dtype=torch.uint8)
        made[f"t{i}"] = raw.view(wanted).view(shape)
    safetensors_torch.save_file(made, path)
    checkpoint = Checkpoint(path)
    assert checkpoint.entries.keys() == made.keys()
    for name, tensor in made.items():
        spec = WeightSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert checkpoint.entries[name].shape == spec.shape and checkpoint.entries[name].dtype == spec.dtype
        assert tensor_bytes(checkpoint, name) == tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def test_odd_offsets_and_a_padded_header_are_fine(tmp_path: Path) -> None:
    header = json.dumps({"a": _entry("U8", [3], 0, 3), "b": _entry("F32", [1], 3, 7), "__metadata__": {"k": "v"}})
    file = SafetensorsFile(_write(tmp_path / "x", header.encode() + b"   ", b"\1\2\3" + struct.pack("<f", 1.5)))
    assert _read(file, "a") == b"\1\2\3" and struct.unpack("<f", _read(file, "b")) == (1.5,)
    assert file.metadata == {"k": "v"}


GOOD = {"a": _entry("F32", [2], 0, 8), "b": _entry("U8", [4], 8, 12)}
MALFORMED: list[tuple[str, Callable[[Path], object]]] = [
    (r"truncated: 3 bytes, a safetensors file has at least 8", lambda p: p.write_bytes(b"abc")),
    (r"is truncated by 5 bytes: \d+ found, \d+ expected", lambda p: _write(p, GOOD, b"x" * 7)),
    (r"is truncated by 988 bytes: 20 found, 1008 expected", lambda p: _write(p, b" " * 12, header_bytes=1000)),
    (r"would have a header of 7\d+ bytes", lambda p: p.write_bytes(b"PK\3\4abcdefgh" * 4)),
    (r"header is not valid JSON", lambda p: _write(p, b"{nope")),
    (r"header is not valid JSON", lambda p: _write(p, b"\xff\xfe{}")),
    (r"header is not valid JSON", lambda p: _write(p, json.dumps(GOOD).encode("utf-16"), b"x" * 12)),
    (r"__metadata__ is no JSON object of texts", lambda p: _write(p, {"__metadata__": [1]})),
    (r"__metadata__ is no JSON object of texts", lambda p: _write(p, {"__metadata__": {"a": 1}})),
    (r"cannot be read: it is a pipe, not a file", lambda p: os.mkfifo(p)),
    (r"a stands there twice", lambda p: _write(p, b'{"a": 1, "a": 2}')),
    (r"header is a JSON list", lambda p: _write(p, [])),
    (r"3 bytes after the last tensor belong to none", lambda p: _write(p, GOOD, b"x" * 15)),
    (r"tensor a lacks one of", lambda p: _write(p, {"a": {"dtype": "F32"}})),
    (r"tensor a has dtype 'F33'; known are BOOL, U8", lambda p: _write(p, {"a": _entry("F33", [1], 0, 4)})),
    (
        r"tensor a is F4\[2, 3\], two values a byte: its last dimension",
        lambda p: _write(p, {"a": _entry("F4", [2, 3], 0, 3)}),
    ),
    (r"tensor a is F4\[\], two values a byte", lambda p: _write(p, {"a": _entry("F4", [], 0, 1)})),
    (r"tensor a has dtype F6_E2M3, 6 bits .* as U8", lambda p: _write(p, {"a": _entry("F6_E2M3", [4], 0, 3)})),
    (r"tensor a has dtype \['F32'\]; known", lambda p: _write(p, {"a": _entry(["F32"], [1], 0, 4)})),  # type: ignore[arg-type]
    (r"header is nested deeper", lambda p: _write(p, b'{"a": ' + b"[" * 200_000)),
    (r"tensor a has shape \[-1\]", lambda p: _write(p, {"a": _entry("F32", [-1], 0, 4)})),
    (r"tensor a has shape \[1.5\]", lambda p: _write(p, {"a": _entry("F32", [1.5], 0, 4)})),  # type: ignore[list-item]
    (
        r"tensor a is F32\[2\], 8 bytes, but its data_offsets span 4",
        lambda p: _write(p, {"a": _entry("F32", [2], 0, 4)}),
    ),
    (
        r"tensor b at byte \d+ overlaps the tensor before it",
        lambda p: _write(p, {"a": _entry("U8", [4], 0, 4), "b": _entry("U8", [4], 2, 6)}, b"x" * 6),
    ),
    (
        r"tensor b at byte \d+ is preceded by bytes of no tensor",
        lambda p: _write(p, {"a": _entry("U8", [4], 0, 4), "b": _entry("U8", [4], 5, 9)}, b"x" * 9),
    ),
]


@pytest.mark.parametrize(("message", "write"), MALFORMED, ids=[str(i) for i in range(len(MALFORMED))])
def test_malformed_files_are_named_in_one_sentence(
    tmp_path: Path, message: str, write: Callable[[Path], object]
) -> None:
    path = tmp_path / "model.safetensors"
    write(path)
    with pytest.raises(LoadError, match=message) as raised:
        Checkpoint(tmp_path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_or_read_within_its_bounds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = _write(tmp_path_factory.mktemp("st") / "x", GOOD, b"x" * 12)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    written = path.read_bytes()
    try:
        file = SafetensorsFile(path)
    except LoadError as error:
        assert str(path) in str(error)
    else:
        for name, entry in file.entries.items():
            read = _read(file, name)
            assert len(read) == entry.num_bytes and bytes(read) in written


def _indexed(folder: Path, weight_map: dict[str, str]) -> Path:
    _write(folder / "1.safetensors", {"a": _entry("U8", [2], 0, 2)}, b"aa")
    _write(folder / "2.safetensors", {"b": _entry("U8", [2], 0, 2), "c": _entry("U8", [1], 2, 3)}, b"bbc")
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_an_index_finds_each_tensor_in_its_file(tmp_path: Path) -> None:
    checkpoint = Checkpoint(_indexed(tmp_path, {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}))
    assert tensor_bytes(checkpoint, "b") == b"bb"
    assert checkpoint.entries.keys() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "3.safetensors"}, r"names 1 files, of which 1 are not beside it: 3\.safetensors; download"),
        ({"b": "1.safetensors"}, r"named by the index, not held: b in 1\.safetensors; held, not named .*: a in 1\."),
        ({"a": "../1.safetensors"}, r"does not lie beside it"),
        ([], r"is not an index"),
    ],
)
def test_a_wrong_index_is_refused(tmp_path: Path, weight_map: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Checkpoint(_indexed(tmp_path, weight_map))


def test_an_index_that_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    index = _indexed(tmp_path, {"a": "1.safetensors"}) / INDEX_NAME
    index.write_text("[" * 200_000)
    with pytest.raises(LoadError, match="is not an index"):
        Checkpoint(index)


def test_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="there is no such file or folder"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(LoadError, match=r"it holds neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    with pytest.raises(LoadError, match="it cannot be looked at"):
        Checkpoint(tmp_path / ("x" * 5000))
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match=r"no checkpoint at .*x\.safetensors: it is a pipe"):
        Checkpoint(tmp_path / "x.safetensors")
    with pytest.raises(LoadError, match="it is a pipe, not a file"):  # and is not waited for
        Checkpoint(tmp_path)
    (tmp_path / "x.safetensors").unlink()
    for name in ("x", "y"):
        _write(tmp_path / f"{name}.safetensors", {})
    with pytest.raises(LoadError, match=r"it holds 2 safetensors files and no model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)
