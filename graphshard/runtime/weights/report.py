"""What a load did: how each weight came about, what was read, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.counts import counted, some_of
from graphshard.core.layout import Layout, chunk_pieces
from graphshard.core.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class LoadedWeight:
    """One weight: its `way` (see `WeightSource.way`), its bytes, and how many of them this rank keeps."""

    name: str
    way: str
    num_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class LoadReport:
    """One rank's load."""

    weights: tuple[LoadedWeight, ...]
    bytes_read: int
    """Of what lies behind the weights, by this rank."""
    checkpoint_bytes: int
    """What all weights together are made of; 0 if that is not known."""
    temporary_bytes: int
    """The most that lay in memory beside what is kept, at one time."""
    seconds: float

    @property
    def kept_bytes(self) -> int:
        """This rank's chunks and resident weights, without padding."""
        return sum(weight.kept_bytes for weight in self.weights)

    @property
    def bytes_per_s(self) -> float:
        """Bytes kept a second."""
        return self.kept_bytes / self.seconds if self.seconds > 0 else 0.0

    def text(self) -> str:
        """One line of sums, and one a way with its weights."""
        sums = (
            f"kept {format_bytes(self.kept_bytes)}, read {format_bytes(self.bytes_read)} of "
            f"{format_bytes(self.checkpoint_bytes)} in {self.seconds:.2f} s ({self.bytes_per_s / 1e9:.2f} GB/s), "
            f"at most {format_bytes(self.temporary_bytes)} beside"
        )
        ways: dict[str, list[LoadedWeight]] = {}
        for weight in self.weights:
            ways.setdefault(weight.way, []).append(weight)
        return "\n".join([sums, *(_way_line(way, which) for way, which in ways.items())]) + "\n"


def kept_bytes_of(layout: Layout, rank: int) -> dict[str, int]:
    """Bytes that `rank` keeps of each weight in `layout`: whole if it is resident, else what lies in its chunks."""
    kept = {view.weight: view.num_bytes for view in layout.resident}
    for unit in layout.units:
        kept |= dict.fromkeys((view.weight for view in unit.views), 0)
        kept |= {piece.weight: piece.weight_end - piece.weight_begin for piece in chunk_pieces(unit, rank)}
    return kept


def _way_line(way: str, weights: Sequence[LoadedWeight]) -> str:
    total = format_bytes(sum(weight.num_bytes for weight in weights))
    return f"  {way}: {counted(len(weights), 'weight')}, {total} ({some_of([weight.name for weight in weights], 3)})"
