"""What an update did on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from graphshard.core.counts import counted
from graphshard.core.sizes import format_bytes
from graphshard.runtime.update.selection import Selection
from graphshard.runtime.update.staging import Staging


@dataclass(frozen=True)
class UpdateReport:
    """One rank's part of an update that all ranks have ended well."""

    epoch: int
    """The version of the weights from now on."""
    updated: tuple[str, ...]
    """The weights that were written, each once."""
    kept: tuple[str, ...]
    """The weights that keep their bytes: not in `only`, or in `keep`."""
    num_tensors: int
    """Tensors that were given, and used."""
    staged_bytes: int
    """Host memory that held what this rank has written: pieces of its chunks, and resident weights."""
    peak_bytes: int
    """The most that was held at one time: staged bytes, and tensors of recipes that still waited for others."""
    seconds: Mapping[str, float]
    """How long each stage took: `staging` beside steps, the others while none runs."""

    @property
    def pause_s(self) -> float:
        """How long no step could run."""
        return sum(seconds for stage, seconds in self.seconds.items() if stage != "staging")

    def text(self) -> str:
        """`epoch 4: 12 weights of 14 tensors ...`, one line."""
        made = f"{counted(len(self.updated), 'weight')} of {counted(self.num_tensors, 'tensor')}"
        return (
            f"epoch {self.epoch}: {made}, {len(self.kept)} kept; "
            f"staged {format_bytes(self.staged_bytes)}, at most {format_bytes(self.peak_bytes)} at one time, "
            f"in {self.seconds.get('staging', 0.0):.2f} s beside steps; paused {self.pause_s:.3f} s\n"
        )


def report_of(epoch: int, selection: Selection, staging: Staging, seconds: Mapping[str, float]) -> UpdateReport:
    """Of an update that has ended well."""
    return UpdateReport(
        epoch,
        selection.updated,
        selection.kept,
        len(staging.checksums),
        staging.staged_bytes,
        staging.peak_bytes,
        dict(seconds),
    )
