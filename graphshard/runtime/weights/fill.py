"""Filling memory: this rank's chunks and the resident weights, and the checksums that peers compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Protocol

from graphshard.comm.checksums import checksum_of_pieces
from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.layout import UnitLayout, WeightView, chunk_pieces
from graphshard.core.specs import WeightSpec
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.coverage import exchange_coverage
from graphshard.runtime.weights.report import LoadedWeight, LoadReport
from graphshard.runtime.weights.source import WeightSource
from graphshard.runtime.weights.watch import LoadWatch, OnLoad
from graphshard.runtime.weights.workers import Workers

NUM_THREADS = 4
"""Readers of a rank: what one waits for from a disk, or copies from the page cache, another hashes."""

WINDOW_BYTES = 8 << 20
"""What is written at a time, and made at a time of weights that are made by rows."""

PIECE_BYTES = 1 << 20
"""What is read at a time where bytes only move: hashed while it is in the cache."""


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


def windows_of(view: WeightView) -> Iterator[WeightView]:
    """The bytes of a resident weight, in order, in parts that are written at a time; their shape means nothing."""
    for begin in range(0, view.num_bytes, WINDOW_BYTES):
        yield replace(view, offset=view.offset + begin, num_bytes=min(WINDOW_BYTES, view.num_bytes - begin))


class SourceFiller:
    """Fills from a source of weights, each rank its own part."""

    def __init__(self, source: WeightSource, on_load: OnLoad | None = None) -> None:
        """`on_load` is called a few times a second, and at the end, in the thread that fills."""
        self._source = source
        self._on_load = on_load
        self._report: LoadReport | None = None

    def prepare(self, compiled: Compiled, group: Group) -> None:
        """See Filler."""
        self._source.prepare(compiled.model, group)

    def fill(self, compiled: Compiled, group: Group, memory: RuntimeMemory) -> list[int]:
        """See Filler. Other ranks wait for one that is slow, as long as bytes still come; see `Group.agree`."""
        loading = _Loading(compiled, group, memory, self._source, self._on_load)
        started = time.monotonic()
        checksums = group.agree("load", loading.run, progress=loading.progress)
        self._report = loading.report(time.monotonic() - started)
        if not isinstance(group, Newcomer):
            exchange_coverage(group, compiled.layout, loading.loaded)
        return checksums

    @property
    def report(self) -> LoadReport:
        """See Filler."""
        assert self._report is not None, "nothing was filled"
        return self._report


class _Loading:
    """One rank's load: its tasks, and how far they are."""

    def __init__(
        self, compiled: Compiled, group: Group, memory: RuntimeMemory, source: WeightSource, on_load: OnLoad | None
    ) -> None:
        self._model, self._layout, self._rank = compiled.model, compiled.layout, group.rank
        self._memory, self._source = memory, source
        self._workers: Workers[int] = Workers(NUM_THREADS)
        self._lock = threading.Lock()
        self.loaded: dict[str, list[tuple[int, int]]] = {}
        """Ranges of bytes that this rank has, by weight."""
        pieces = [piece for unit in self._layout.units for piece in chunk_pieces(unit, group.rank)]
        total_bytes = sum(piece.weight_end - piece.weight_begin for piece in pieces)
        self._watch = LoadWatch(group, total_bytes + sum(view.num_bytes for view in self._layout.resident), on_load)

    def progress(self) -> int:
        """A number that grows while bytes come."""
        return self._watch.num_bytes + self._source.num_bytes_read

    def run(self) -> list[int]:
        """Load everything; the checksum of each chunk, by unit."""
        units, resident = self._layout.units, self._layout.resident
        weights = [[view.weight for view in unit.views] for unit in units] + [[view.weight] for view in resident]
        tasks = [partial(self._fill_unit, unit) for unit in units] + [partial(self._fill_resident, v) for v in resident]
        checksums = self._workers.run(
            tasks, lambda index: self._source.release(weights[index]), lambda: self._watch.look(self.progress())
        )
        self._source.identity()  # raises if what was read has changed meanwhile
        self._watch.tell()
        return checksums[: len(units)]

    def report(self, seconds: float) -> LoadReport:
        """What was done, in `seconds`."""
        source = self._source
        kept = {name: sum(end - begin for begin, end in ranges) for name, ranges in self.loaded.items()}
        return LoadReport(
            tuple(
                LoadedWeight(w.name, source.way(w.name), w.num_bytes, kept.get(w.name, 0)) for w in self._model.owned
            ),
            bytes_read=source.num_bytes_read,
            checkpoint_bytes=source.checkpoint_bytes,
            temporary_bytes=source.temporary_bytes + (NUM_THREADS * WINDOW_BYTES if self._memory.is_staged else 0),
            seconds=seconds,
        )

    def _fill_unit(self, unit: UnitLayout) -> int:
        return checksum_of_pieces(self._written(unit))

    def _fill_resident(self, view: WeightView) -> int:
        spec = self._model.weight(view.weight)
        for part in windows_of(view):
            with self._memory.writing_resident(part) as out:
                for _ in self._read(spec, part.offset - view.offset, out):
                    pass
        return 0

    def _written(self, unit: UnitLayout) -> Iterator[memoryview]:
        """This rank's chunk of `unit`, in order, each part as soon as it is written; padding stays zero."""
        pieces = chunk_pieces(unit, self._rank)
        current = 0
        for begin in range(0, unit.chunk_bytes, WINDOW_BYTES):
            end = min(begin + WINDOW_BYTES, unit.chunk_bytes)
            with self._memory.writing_shard(unit.chunk_offset + begin, end - begin) as out:
                at = begin
                while at < end and current < len(pieces):
                    piece = pieces[current]
                    piece_end = piece.chunk_offset + piece.weight_end - piece.weight_begin
                    first, last = max(at, piece.chunk_offset), min(end, piece_end)
                    if first >= end:
                        break
                    if at < first:
                        yield out[at - begin : first - begin]
                    weight_begin = piece.weight_begin + first - piece.chunk_offset
                    yield from self._read(
                        self._model.weight(piece.weight), weight_begin, out[first - begin : last - begin]
                    )
                    at = last
                    current += last == piece_end
                if at < end:
                    yield out[at - begin :]

    def _read(self, spec: WeightSpec, begin: int, out: memoryview) -> Iterator[memoryview]:
        """Bytes of a weight from `begin` on into `out`, and each part of it once it is there."""
        step = PIECE_BYTES if self._source.way(spec.name) == "bytes" else WINDOW_BYTES
        for at in range(0, len(out), step):
            self._workers.check()
            part = out[at : at + step]
            self._source.read_into(spec, begin + at, part)
            self._note(spec.name, begin + at, begin + at + len(part))
            yield part

    def _note(self, weight: str, begin: int, end: int) -> None:
        self._watch.add(end - begin)
        with self._lock:
            ranges = self.loaded.setdefault(weight, [])
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
