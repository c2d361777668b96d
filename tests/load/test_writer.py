from __future__ import annotations

from pathlib import Path

import pytest

from graphshard.core.errors import LoadError
from graphshard.core.specs import WeightSpec
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.store import tensor_bytes
from graphshard.load.writer import write_safetensors

SPECS = [WeightSpec("b", (3,), "uint8"), WeightSpec("a", (2, 2), "bfloat16"), WeightSpec("empty", (0, 4), "float32")]
DATA = [b"\1\2\3", bytes(range(8)), b""]


def test_written_tensors_are_read_back_by_us_and_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_safetensors(path, SPECS, iter(DATA), {"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    assert [tensor_bytes(checkpoint, spec.name) for spec in SPECS] == DATA
    assert checkpoint.entries["b"].begin % 64 == 0
    theirs = pytest.importorskip("safetensors.torch").load_file(path)
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {s.name: s.shape for s in SPECS}


def test_bytes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="tensor b needs 3 bytes, 2 were given"):
        write_safetensors(tmp_path / "x", SPECS[:1], [b"12"])
    with pytest.raises(LoadError, match="the format has no dtype int3"):
        write_safetensors(tmp_path / "x", [WeightSpec("a", (1,), "int3")], [b"1"])
