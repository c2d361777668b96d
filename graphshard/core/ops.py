"""The op list: one frozen dataclass per op, each with the text that `Program.text()` prints for it.

ag_launch    unit=84 slot=0 stream=copy          gather a unit into a slot, after the slot's gate
wait_once    unit=84 slot=0 stream=compute       the stream waits until the gather's bytes are there
gemm         layer=12 segment=q_proj units=84 stream=compute begin=109 end=110
record_gate  unit=84 slot=0 stream=compute       from here on the slot may be overwritten
record_outputs stream=compute                    the step's outputs may be read (before a tail prefetch joins)
act_gather   block=3 stream=compute              the tokens of all ranks come together, for block 3
reduce_scatter block=3 stream=compute            the ranks' partial sums are added; each rank gets its own tokens back

# Note [segment numbers]
A `Gemm` counts the model's segments from 0, then its folds, then three for each of its blocks: prepare, compute and
finish (`first_of_block`). In a program where a block is tensor-parallel (`Program.blocks`) these three stand in the
place of the segments that the block covers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from graphshard.core.text import name_text

StreamName = Literal["compute", "copy", "prefetch"]


@dataclass(frozen=True, slots=True)
class AgLaunch:
    """Gather every rank's chunk of `unit` into this rank's `slot`."""

    unit: int
    slot: int
    stream: StreamName = "copy"

    def __str__(self) -> str:
        return f"ag_launch unit={self.unit} slot={self.slot} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class WaitOnce:
    """`stream` waits for the latest `AgLaunch` of `unit` into `slot`: once per gather and stream."""

    unit: int
    slot: int
    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"wait_once unit={self.unit} slot={self.slot} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class Gemm:
    """Run the model's segments `begin` (included) to `end` (excluded); they read `units` (and resident weights)."""

    begin: int
    end: int
    layer: int | None
    segment: str
    units: tuple[int, ...]
    stream: StreamName = "compute"

    def __str__(self) -> str:
        layer = "-" if self.layer is None else str(self.layer)
        units = ",".join(map(str, self.units)) or "-"
        return (
            f"gemm layer={layer} segment={name_text(self.segment)} units={units} stream={self.stream} "
            f"begin={self.begin} end={self.end}"
        )


@dataclass(frozen=True, slots=True)
class RecordGate:
    """`unit` has been read for the last time in `slot`; a later gather may overwrite it."""

    unit: int
    slot: int
    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"record_gate unit={self.unit} slot={self.slot} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class RecordOutputs:
    """The step's outputs are complete here: `step.outputs_ready` (a tail prefetch may still run)."""

    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"record_outputs stream={self.stream}"


@dataclass(frozen=True, slots=True)
class ActGather:
    """Gather every rank's `tp.tokens` of block `block` into `tp.gathered`, in rank order. All ranks must take part."""

    block: int
    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"act_gather block={self.block} stream={self.stream}"


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Add all ranks' `tp.partial` of block `block`, in rank order, for this rank's tokens: `tp.summed`.

    All ranks must take part.
    """

    block: int
    stream: StreamName = "compute"

    def __str__(self) -> str:
        return f"reduce_scatter block={self.block} stream={self.stream}"


BlockPart = Literal["prepare", "compute", "finish"]
BLOCK_PARTS: tuple[BlockPart, ...] = get_args(BlockPart)
"""In the order in which they run; act_gather comes before compute, reduce_scatter after it."""


Op = AgLaunch | WaitOnce | Gemm | RecordGate | RecordOutputs | ActGather | ReduceScatter
