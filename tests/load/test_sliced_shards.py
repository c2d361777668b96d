"""Shard files with slices: N -> M equals a direct save at M, flat where M cannot slice; what is corrupt stops it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shard_folders import HOST, content, save_folder, self_naming

from graphshard.core.errors import LoadError
from graphshard.core.plan import Plan
from graphshard.core.specs import BlockSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.load import shard_reader
from graphshard.load.reshard import reshard
from graphshard.load.safetensors_file import SafetensorsFile
from graphshard.load.shard_manifest import MANIFEST_NAME, ShardManifest, read_manifest
from graphshard.load.shard_reader import ShardReader
from graphshard.load.unshard import unshard
from graphshard.schedule.auto import make_plan
from graphshard.schedule.units import UnitRules, choose_units


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a disk shows nothing here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def model_of(rows: int, widths: list[int], dtype: str = "float32") -> ModelSpec:
    """Two layers: a turned weight, a block of as many weights as there are widths, an odd one; a norm outside."""
    weights, segments, blocks = [WeightSpec("norm", (11,), "bfloat16")], [SegmentSpec("norm", None, ("norm",))], []
    for layer in range(2):
        names = tuple(f"{layer}.b{i}" for i in range(len(widths)))
        weights.append(WeightSpec(f"{layer}.turned", (9, 33), "bfloat16", (1, 9)))
        weights += [WeightSpec(name, (rows, width), dtype) for name, width in zip(names, widths, strict=True)]
        weights.append(WeightSpec(f"{layer}.odd", (7, 3), "int8"))
        begin = len(segments) + 1
        segments.append(SegmentSpec("turned", layer, (f"{layer}.turned",)))
        segments += [SegmentSpec("in", layer, names[:-1]), SegmentSpec("out", layer, names[-1:])]
        segments.append(SegmentSpec("odd", layer, (f"{layer}.odd",)))
        sliced = (
            SegmentSpec("prepare", layer, ()),
            SegmentSpec("compute", layer, names),
            SegmentSpec("finish", layer, ()),
        )
        blocks.append(BlockSpec(f"{layer}.mlp", layer, begin, begin + 2, names[:-1], names[-1:], 1, 1, dtype, *sliced))
    return ModelSpec("blocks", tuple(weights), tuple(segments), blocks=tuple(blocks))


def plan_of(model: ModelSpec, world_size: int, alignment: int = 256) -> Plan:
    """What is sliced where it can be, as a plan with blocks has it."""
    rules = UnitRules("layer", slice_blocks=True, world_size=world_size, min_shard_bytes=0)
    _, units = choose_units(model, rules)
    plan = make_plan(model, world_size, HOST, placed=units, alignment_bytes=alignment)
    return replace(plan, modes=tuple((shape, ("gather",) * len(model.blocks)) for shape in plan.step_shapes))


def resharded(source: Path, target: Path, world_size: int) -> ShardManifest:
    with ShardReader(source, lambda count: None) as reader:
        manifest = reshard(reader, target, world_size)
        assert reader.num_bytes_read == reader.num_bytes
    return manifest


def test_from_any_world_size_to_any_other_and_back(tmp_path: Path) -> None:
    """24 rows: sliced over 2, 3, 4 and 6 ranks, flat over 1 and 5; files are equal byte by byte."""
    model = model_of(24, [8, 8, 12])
    for world_size in range(1, 7):
        manifest = save_folder(tmp_path / f"{world_size}", model, world_size, plan=plan_of(model, world_size))
        assert manifest.blocks == (1, 3)
        assert [unit.is_sliced for unit in manifest.units] == [False, world_size not in (1, 5)] * 2
    for begin in range(1, 7):
        for end in range(1, 7):
            target = tmp_path / f"{begin}-to-{end}"
            resharded(tmp_path / f"{begin}", target, end)
            assert content(target) == content(tmp_path / f"{end}")


@given(
    rows=st.integers(1, 24),
    widths=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    dtype=st.sampled_from(["int8", "bfloat16", "float32", "float4_e2m1fn_x2"]),
    begin=st.integers(1, 8),
    end=st.integers(1, 8),
    alignment=st.sampled_from([16, 256, 1024]),
    piece=st.sampled_from([1, 7, 64, 1000, 2**20]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_block_in_pieces_of_any_size(
    rows: int,
    widths: list[int],
    dtype: str,
    begin: int,
    end: int,
    alignment: int,
    piece: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = model_of(rows, widths, dtype)
    folder = tmp_path_factory.mktemp("any")
    save_folder(folder / "source", model, begin, plan=plan_of(model, begin, alignment))
    save_folder(folder / "direct", model, end, plan=plan_of(model, end, alignment))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_reader, "PIECE_BYTES", max(piece, rows * sum(widths) // 50))
        resharded(folder / "source", folder / "target", end)
    assert content(folder / "target") == content(folder / "direct")


@pytest.mark.parametrize("world_size", [2, 5])
def test_a_plain_checkpoint_has_every_weight_whole(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_reader, "PIECE_BYTES", 100)
    model = model_of(24, [8, 8, 12])
    save_folder(tmp_path / "s", model, world_size, plan=plan_of(model, world_size))
    with ShardReader(tmp_path / "s", lambda count: None) as reader:
        unshard(reader, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    for spec in model.weights:
        if spec.strides is None:
            data = bytearray(file.entries[spec.name].num_bytes)
            file.read_into(file.entries[spec.name].begin, memoryview(data))
            assert bytes(data) == self_naming(spec)


def test_a_manifest_says_which_units_are_sliced(tmp_path: Path) -> None:
    model = model_of(24, [8, 8])
    manifest = save_folder(tmp_path / "s", model, 4, plan=plan_of(model, 4))
    assert read_manifest(tmp_path / "s") == manifest
    told = json.loads(manifest.text())
    assert (told["blocks"], told["sliced"]) == ([1, 3], [1, 3])
    assert told["rows"] == [name for block in model.blocks for name in block.rows]
    flat = replace(manifest, units=tuple(replace(unit, is_sliced=False) for unit in manifest.units))
    assert flat.digest != manifest.digest and flat.layout_digest != manifest.layout_digest
    bare = save_folder(tmp_path / "bare", replace(model, blocks=()), 4)
    assert not {"blocks", "sliced", "rows"} & json.loads(bare.text()).keys()
    for change in ({"sliced": []}, {"sliced": [1]}, {"sliced": [0, 1, 3]}, {"blocks": [1]}, {"blocks": [1, 9]}):
        (tmp_path / "s" / MANIFEST_NAME).write_text(json.dumps(told | change))
        with pytest.raises(LoadError, match=r"shards.json is damaged"):
            read_manifest(tmp_path / "s")


@pytest.mark.parametrize("end", [2, 5])
def test_a_flipped_bit_of_a_slice_stops_it_and_leaves_nothing(end: int, tmp_path: Path) -> None:
    model = model_of(24, [8, 8])
    manifest = save_folder(tmp_path / "s", model, 3, plan=plan_of(model, 3))
    path = tmp_path / "s" / manifest.file_name(2)
    block = manifest.layout.units[1]
    data = bytearray(path.read_bytes())
    # the last byte of a slice, and one of the padding behind it
    for at in (block.slices[0].num_bytes - 1, block.chunk_bytes - 1):
        begin = SafetensorsFile(path).entries["shards"].begin + block.chunk_offset
        data[begin + at] ^= 1
        path.write_bytes(data)
        with pytest.raises(LoadError, match=r"is corrupt: this rank's chunk of unit 1 \(0.mlp\) has checksum"):
            resharded(tmp_path / "s", tmp_path / "t", end)
        assert list((tmp_path / "t").iterdir()) == []
        data[begin + at] ^= 1
