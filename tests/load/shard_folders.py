"""Folders of shard files, written from whole weights by the layout's own pieces: what others' are compared with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphshard.comm.checksums import checksum_of
from graphshard.core.layout import chunk_pieces
from graphshard.core.plan import Plan
from graphshard.core.sizes import num_bytes
from graphshard.core.specs import DeviceSpec, ModelSpec, SegmentSpec, WeightSpec
from graphshard.load.shard_file import ShardFileWriter
from graphshard.load.shard_folder import commit_manifest, open_folder
from graphshard.load.shard_manifest import ShardManifest
from graphshard.schedule.auto import make_plan

HOST = DeviceSpec("host", "host", 2**34)

DTYPES = (
    *("float32", "float64", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "complex64"),
    *("int8", "uint8", "int16", "uint16", "int32", "int64", "bool", "float4_e2m1fn_x2"),
)
"""Dtypes that a checkpoint has names for."""
ODD_DTYPES = ("uint4", "complex128", "quint4x2")
"""Some that it has none for."""


def all_kinds(dtypes: tuple[str, ...] = DTYPES) -> ModelSpec:
    """Two layers with a weight of each dtype, odd sizes, strides, gaps; norms and an embedding outside."""
    weights = [WeightSpec("embed", (37, 5), "float32"), WeightSpec("nothing", (0, 4), "float32")]
    segments = [SegmentSpec("embed", None, ("embed", "nothing"))]
    for layer in range(2):
        of_layer = [WeightSpec(f"{layer}.{d}", (3 + i, 7 + layer), d) for i, d in enumerate(dtypes)]
        of_layer.append(WeightSpec(f"{layer}.turned", (9, 33), "bfloat16", (1, 9)))
        of_layer.append(WeightSpec(f"{layer}.gaps", (4, 6), "float32", (10, 1)))
        weights += of_layer
        segments += [SegmentSpec(f"s{i}", layer, (w.name,)) for i, w in enumerate(of_layer)]
    weights.append(WeightSpec("norm", (11,), "bfloat16"))
    segments.append(SegmentSpec("head", None, ("norm", "embed")))
    return ModelSpec("all kinds", tuple(weights), tuple(segments))


def self_naming(spec: WeightSpec, version: int = 0) -> bytes:
    """The bytes of a weight, as stored, that say whose they are."""
    return hashlib.shake_128(f"{spec.name}/{version}".encode()).digest(spec.num_bytes)


def save_folder(
    folder: Path,
    model: ModelSpec,
    world_size: int,
    *,
    version: int = 0,
    epoch: int = 0,
    plan: Plan | None = None,
    **choices: Any,
) -> ShardManifest:
    """Shard files of self-naming weights, every chunk put together byte by byte in memory."""
    plan = plan or make_plan(model, world_size, HOST, **{"min_shard_bytes": 0, **choices})
    bare = ShardManifest.of(model, plan, epoch)
    layout = bare.layout
    whole = {spec.name: self_naming(spec, version) for spec in model.weights}
    windows, chunks = [], []
    for rank in range(world_size):
        window = bytearray(layout.shard_bytes)
        for unit in layout.units:
            for piece in chunk_pieces(unit, rank):
                at = unit.chunk_offset + piece.chunk_offset
                data = whole[piece.weight][piece.weight_begin : piece.weight_end]
                window[at : at + len(data)] = data
        windows.append(window)
        ends = [(unit.chunk_offset, unit.chunk_offset + unit.chunk_bytes) for unit in layout.units]
        chunks.append(tuple(checksum_of(window[begin:end]) for begin, end in ends))
    resident = tuple(checksum_of(whole[view.weight]) for view in layout.resident)
    manifest = replace(bare, chunks=tuple(chunks), resident=resident)
    open_folder(folder)
    for rank, window in enumerate(windows):
        with ShardFileWriter(folder, bare, rank) as writer:
            writer.write("shards", 0, window)
            for view in layout.resident:
                writer.write("resident", view.offset, whole[view.weight])
            writer.end(manifest)
    commit_manifest(folder, manifest)
    return manifest


def content(folder: Path) -> Mapping[str, bytes]:
    """Every file's bytes, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def contiguous(spec: WeightSpec, stored: bytes) -> bytes:
    """The weight row by row, one element after the other: slow, and easy to believe."""
    if spec.strides is None:
        return stored
    item = num_bytes((1,), spec.dtype, None)
    rows, columns = spec.shape
    starts = [item * (r * spec.strides[0] + c * spec.strides[1]) for r in range(rows) for c in range(columns)]
    return b"".join(stored[start : start + item] for start in starts)
