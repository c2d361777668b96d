"""Resharding: N -> M equals a direct save at M file by file, whatever is sharded how; nothing corrupt comes through."""

from __future__ import annotations

import errno
import os
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_folders import DTYPES, ODD_DTYPES, all_kinds, content, contiguous, save_folder, self_naming

from graphshard.core.errors import DeviceError, LoadError, SpecError
from graphshard.core.specs import ModelSpec, SegmentSpec, WeightSpec
from graphshard.load import shard_reader
from graphshard.load.reshard import reshard
from graphshard.load.safetensors_file import SafetensorsFile
from graphshard.load.shard_manifest import MANIFEST_NAME, ShardManifest
from graphshard.load.shard_reader import ShardReader
from graphshard.load.unshard import unshard

KINDS = all_kinds()
ODD = all_kinds((*DTYPES, *ODD_DTYPES))
POLICIES = [
    {"units": "layer"},
    {"units": "weight", "outside_layers": True},
    {"units": "bytes:1KiB", "alignment_bytes": 16},
]


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a disk shows nothing here; that files are synced in time has a test of its own."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def resharded(source: Path, target: Path, world_size: int) -> ShardManifest:
    with ShardReader(source, lambda count: None) as reader:
        manifest = reshard(reader, target, world_size)
        assert reader.num_bytes_read == reader.num_bytes
    return manifest


@pytest.mark.parametrize("choices", POLICIES, ids=str)
def test_from_any_world_size_to_any_other_and_back(choices: dict[str, object], tmp_path: Path) -> None:
    """Files are equal byte by byte, names and manifests too, so N -> M -> N gives the first ones."""
    for world_size in range(1, 6):
        save_folder(tmp_path / f"direct-{world_size}", ODD, world_size, epoch=4, **choices)
    for begin in range(1, 6):
        for end in range(1, 6) if choices["units"] == "layer" else (1, 3, 4):
            target = tmp_path / f"{begin}-to-{end}"
            assert resharded(tmp_path / f"direct-{begin}", target, end).epoch == 4
            assert content(target) == content(tmp_path / f"direct-{end}")


@given(
    sizes=st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=4), min_size=1, max_size=3),
    begin=st.integers(1, 7),
    end=st.integers(1, 7),
    alignment=st.sampled_from([16, 256, 1024]),
    piece=st.sampled_from([1, 7, 64, 1000, 2**20]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sizes_in_pieces_of_any_size(
    sizes: list[list[int]], begin: int, end: int, alignment: int, piece: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The border of a piece may fall anywhere in a chunk of either side."""
    weights = [WeightSpec(f"{layer}.{i}", (n,), "uint8") for layer, row in enumerate(sizes) for i, n in enumerate(row)]
    segments = [SegmentSpec(f"s{i}", int(w.name[0]), (w.name,)) for i, w in enumerate(weights)]
    model = ModelSpec("any", tuple(weights), tuple(segments))
    folder = tmp_path_factory.mktemp("any")
    choices = {"units": "layer", "alignment_bytes": alignment}
    save_folder(folder / "source", model, begin, **choices)
    save_folder(folder / "direct", model, end, **choices)
    piece = max(piece, sum(map(sum, sizes)) // 300)  # keeps the number of reads small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reader, "PIECE_BYTES", piece)
        resharded(folder / "source", folder / "target", end)
    assert content(folder / "target") == content(folder / "direct")


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    weights = (WeightSpec("0.w", (24 << 20,), "uint8"), WeightSpec("embed", (11 << 20,), "uint8"))
    segments = (SegmentSpec("embed", None, ("embed",)), SegmentSpec("s", 0, ("0.w",)))
    save_folder(tmp_path / "s", ModelSpec("large", weights, segments), 2)
    tracemalloc.start()
    try:
        resharded(tmp_path / "s", tmp_path / "t", 3)
        with ShardReader(tmp_path / "s", lambda count: None) as reader:
            unshard(reader, tmp_path / "model.safetensors")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * shard_reader.PIECE_BYTES < 24 << 20


@pytest.mark.parametrize("choices", POLICIES, ids=str)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plain_checkpoint_has_every_weight_whole(choices: dict[str, object], world_size: int, tmp_path: Path) -> None:
    save_folder(tmp_path / "shards", KINDS, world_size, **choices)
    with ShardReader(tmp_path / "shards", lambda count: None) as reader:
        assert unshard(reader, tmp_path / "model.safetensors") == (tmp_path / "model.safetensors").stat().st_size
    file = SafetensorsFile(tmp_path / "model.safetensors")
    assert list(file.entries) == [spec.name for spec in KINDS.weights]
    for spec in KINDS.weights:
        entry = file.entries[spec.name]
        assert (entry.dtype, entry.shape) == (spec.dtype, spec.shape)
        data = bytearray(entry.num_bytes)
        file.read_into(entry.begin, memoryview(data))
        assert bytes(data) == contiguous(spec, self_naming(spec))


def test_a_dtype_without_a_name_in_checkpoints_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save_folder(tmp_path / "shards", ODD, 2)
    with (
        ShardReader(tmp_path / "shards", lambda count: None) as reader,
        pytest.raises(LoadError, match="no dtype uint4"),
    ):
        unshard(reader, tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_flipped_bit_anywhere_stops_it_and_leaves_nothing(rank: int, tmp_path: Path) -> None:
    manifest = save_folder(tmp_path / "shards", KINDS, 3)
    path = tmp_path / "shards" / manifest.file_name(rank)
    entries = SafetensorsFile(path).entries
    for at in (entries["shards"].begin, entries["shards"].end - 1):
        flip(path, at)
        with pytest.raises(LoadError, match=r"00-of-00003.*is corrupt|0002-of-00003.*is corrupt") as caught:
            resharded(tmp_path / "shards", tmp_path / "target", 2)
        assert path.name in str(caught.value) and "unit" in str(caught.value)
        assert list((tmp_path / "target").iterdir()) == []
        with ShardReader(tmp_path / "shards", lambda count: None) as reader, pytest.raises(LoadError, match="corrupt"):
            unshard(reader, tmp_path / "model.safetensors")
        assert [p.name for p in tmp_path.iterdir() if p.is_file()] == []
        flip(path, at)
    resharded(tmp_path / "shards", tmp_path / "target", 2)


def test_a_flipped_bit_of_a_resident_weight_stops_it(tmp_path: Path) -> None:
    manifest = save_folder(tmp_path / "shards", KINDS, 2)
    path = tmp_path / "shards" / manifest.file_name(0)
    view = next(view for view in manifest.layout.resident if view.weight == "norm")
    flip(path, SafetensorsFile(path).entries["resident"].begin + view.offset)
    with pytest.raises(LoadError, match="resident weight norm has checksum"):
        resharded(tmp_path / "shards", tmp_path / "target", 3)
    assert list((tmp_path / "target").iterdir()) == []


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    save_folder(tmp_path / "a", KINDS, 2)
    save_folder(tmp_path / "b", KINDS, 3, version=1)
    before = content(tmp_path / "b")
    for target in ("a", "b"):
        with pytest.raises(SpecError, match=r"holds shard files already.*give a new folder"):
            resharded(tmp_path / "a", tmp_path / target, 2)
    assert content(tmp_path / "b") == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SpecError, match="there is a file of that name"):
        resharded(tmp_path / "a", tmp_path / "file", 2)
    with ShardReader(tmp_path / "a", lambda count: None) as reader, pytest.raises(SpecError, match="would be lost"):
        unshard(reader, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("num_calls", [1, 5, 12])
def test_a_full_disk_leaves_nothing_and_says_so(
    num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "shards", KINDS, 2)
    real, calls = os.pwrite, []

    def full(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) >= num_calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(DeviceError, match=r"No space left on device .* are free there"):
        resharded(tmp_path / "shards", tmp_path / "target", 3)
    assert not (tmp_path / "target" / MANIFEST_NAME).exists() and list((tmp_path / "target").iterdir()) == []
