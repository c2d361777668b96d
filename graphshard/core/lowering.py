"""Lowering: each op of a program as the driver calls that carry it out. Pure data; verifier, digest and runtime share it.

Streams are names: `compute` is the origin (it begins and ends the list, as a capture demands), `copy`, `copy1`, ...
`copy{k-1}` carry gathers, `prefetch` those issued by the host. An event is an int, recorded exactly once in a list.

    ag_launch   wait(gate of the slot's last reader) on copy; with k > 1 copy streams or a branch for the own chunk:
                record(fork) on copy, wait(fork) on each; copies; record(join) on each, wait(join) on copy; record(ready)
    wait_once   wait(ready) on compute
    gemm        compute
    record_gate record(gate) on compute
The list begins with a fork of every other stream from `compute` and ends with a join of every stream that is not yet
an ancestor of `compute`'s last op. So a list run twice is ordered by `compute` alone, eager or captured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Record:
    """Record `event` on `stream`. `op` is the index of the program's op it comes from; -1 in prologue and epilogue."""

    event: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class Wait:
    """`stream` waits for `event`."""

    event: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Copies `begin` to `end` of the gather of `unit` into `slot`, in this rank's order (rank + 1 first, own last)."""

    unit: int
    slot: int
    begin: int
    end: int
    stream: str
    op: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Segments `begin` to `end`; they read `(unit, slot)` pairs."""

    begin: int
    end: int
    reads: tuple[tuple[int, int], ...]
    stream: str
    op: int


LoweredOp = Record | Wait | CopyRun | Compute


@dataclass(frozen=True, slots=True)
class Lowered:
    """A program lowered for `num_copies` copies a gather (the world size) over `streams`, the origin first."""

    ops: tuple[LoweredOp, ...]
    streams: tuple[str, ...]
    num_events: int
    outputs_event: int
    """Recorded by `record_outputs`, or the last record on compute before the final join."""
