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
    checksums = []
    for unit in layout.units:
        with memory.writing_shard(unit.chunk_offset, unit.chunk_bytes) as chunk:
            for piece in chunk_pieces(unit, rank):
                data = source.read(model.weight(piece.weight))
                at = piece.chunk_offset
                chunk[at : at + piece.weight_end - piece.weight_begin] = data[piece.weight_begin : piece.weight_end]
            checksums.append(zlib.crc32(chunk))
        source.release([view.weight for view in unit.views])
    return checksums


def fill_resident(model: ModelSpec, layout: Layout, memory: RuntimeMemory, source: WeightSource) -> None:
    """Write every resident weight whole."""
    for view in layout.resident:
        with memory.writing_resident(view) as resident:
            resident[:] = source.read(model.weight(view.weight))
        source.release([view.weight])
