"""Filling memory from a source: this rank's chunks and the resident weights, and the checksums that peers compare."""

from __future__ import annotations

import zlib

from graphshard.core.layout import Layout, chunk_pieces
from graphshard.core.specs import ModelSpec
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.source import WeightSource


def fill_chunks(model: ModelSpec, layout: Layout, rank: int, memory: RuntimeMemory, source: WeightSource) -> list[int]:
    """Write rank `rank`'s chunk of every unit; padding stays zero. Returns a crc32 for each chunk, by unit.

    Each weight is opened once for each unit it belongs to, and only the bytes of this rank's chunk are touched.
    """
    shard = memory.shard_bytes()
    checksums = []
    for unit in layout.units:
        begin = unit.chunk_offset
        for piece in chunk_pieces(unit, rank):
            data = source.read(model.weight(piece.weight))
            at = begin + piece.chunk_offset
            shard[at : at + piece.weight_end - piece.weight_begin] = data[piece.weight_begin : piece.weight_end]
        checksums.append(zlib.crc32(shard[begin : begin + unit.chunk_bytes]))
        source.release([view.weight for view in unit.views])
    return checksums


def fill_resident(model: ModelSpec, layout: Layout, memory: RuntimeMemory, source: WeightSource) -> None:
    """Write every resident weight whole."""
    for view in layout.resident:
        memory.resident_bytes(view)[:] = source.read(model.weight(view.weight))
        source.release([view.weight])
