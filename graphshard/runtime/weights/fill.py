"""Filling memory: this rank's chunks and the resident weights, and the checksums that peers compare."""

from __future__ import annotations

import time
from typing import Protocol

from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.core.layout import chunk_pieces
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.report import LoadedWeight, LoadReport
from graphshard.runtime.weights.source import WeightSource


class Filler(Protocol):
    """What brings weights into a runtime's memory. Used once."""

    def prepare(self, compiled: Compiled, group: Group) -> None:
        """Refuse what can be refused before a byte is reserved (collective; alone on a rank that came back).

        Raises:
            LoadError, SpecError: the same on every rank.
        """

    def fill(self, compiled: Compiled, group: Group, memory: RuntimeMemory) -> list[int]:
        """Write this rank's chunk of every unit, and every resident weight whole; padding stays zero.

        Collective: where one rank fails, all raise its error. On a rank that came back: alone.

        Returns:
            The checksum of this rank's chunk, by unit.
        """

    @property
    def report(self) -> LoadReport:
        """What `fill` did."""


class SourceFiller:
    """Fills from a source of weights, each rank its own part."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._report: LoadReport | None = None

    def prepare(self, compiled: Compiled, group: Group) -> None:
        """See Filler."""
        self._source.prepare(compiled.model, group)

    def fill(self, compiled: Compiled, group: Group, memory: RuntimeMemory) -> list[int]:
        """See Filler."""
        return group.agree("load", lambda: self._fill(compiled, group.rank, memory))

    @property
    def report(self) -> LoadReport:
        """See Filler."""
        assert self._report is not None, "nothing was filled"
        return self._report

    def _fill(self, compiled: Compiled, rank: int, memory: RuntimeMemory) -> list[int]:
        model, source, started = compiled.model, self._source, time.monotonic()
        kept = dict.fromkeys((weight.name for weight in model.weights), 0)
        checksums = []
        for unit in compiled.layout.units:
            with memory.writing_shard(unit.chunk_offset, unit.chunk_bytes) as chunk:
                for piece in chunk_pieces(unit, rank):
                    at, num_bytes = piece.chunk_offset, piece.weight_end - piece.weight_begin
                    source.read_into(model.weight(piece.weight), piece.weight_begin, chunk[at : at + num_bytes])
                    kept[piece.weight] += num_bytes
                checksums.append(checksum_of(chunk))
            source.release([view.weight for view in unit.views])
        for view in compiled.layout.resident:
            with memory.writing_resident(view) as resident:
                source.read_into(model.weight(view.weight), 0, resident)
            kept[view.weight] += view.num_bytes
            source.release([view.weight])
        source.identity()  # raises if what was read has changed meanwhile
        rows = tuple(LoadedWeight(w.name, source.way(w.name), w.num_bytes, kept[w.name]) for w in model.weights)
        self._report = LoadReport(rows, source.num_bytes_read, 0, 0, time.monotonic() - started)
        return checksums
