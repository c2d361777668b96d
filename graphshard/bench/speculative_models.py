"""The target and the draft that `bench speculative` steps: layers of one weight each, and a fold of a chosen length.

The fold is a delta rule's: it replays records of one key, one value and one decay a head into a state, one after the
other, on caches of its own. How many records is found by timing one, so that the fold takes as long as was asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from graphshard.bench.stats import quantile
from graphshard.comm.group import Group
from graphshard.core.errors import SpecError
from graphshard.core.sequence import COMMIT_FOLD
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.runtime.model import Segment, StepState

DTYPE = "float32"
HEADS = 8
HEAD_SIZE = 128
"""A state of 512 KiB: it stays in a core's cache, and leaves the memory's bandwidth to the gathers."""
DECAY = 0.95
MIN_UNIT_BYTES = 4096
_CALIBRATED_RECORDS = 16
_CALIBRATIONS = 40
_QUANTILE = 0.25
"""Of times of the same work: others only add to it."""


@dataclass(frozen=True)
class LayeredModel:
    """`num_layers` layers of one matrix of `unit_bytes`; with `num_records` a fold over as many. A `SegmentedModel`."""

    name: str
    num_layers: int
    unit_bytes: int
    num_records: int = 0

    def __post_init__(self) -> None:
        if self.unit_bytes < MIN_UNIT_BYTES:
            raise SpecError(f"a unit of {self.unit_bytes} bytes is too small to time: use {MIN_UNIT_BYTES} or more")

    @property
    def width(self) -> int:
        """Columns of a matrix: the largest power of two of which it has as many rows at least."""
        width = 32
        while 4 * (2 * width) ** 2 <= self.unit_bytes:
            width *= 2
        return width

    @property
    def rows(self) -> int:
        """Rows of a matrix."""
        return self.unit_bytes // (4 * self.width)

    @property
    def segments(self) -> Sequence[Segment]:
        """See `SegmentedModel`."""
        specs = self.spec().segments
        return tuple(
            Segment(one, partial(_layer, weight=one.reads[0], is_first=i == 0, is_last=i == len(specs) - 1))
            for i, one in enumerate(specs)
        )

    @property
    def folds(self) -> Sequence[Segment]:
        """See `folds_of`."""
        return tuple(Segment(one, _commit) for one in self.spec().folds)

    def spec(self) -> ModelSpec:
        """See `SegmentedModel`."""
        weights = tuple(WeightSpec(f"layers.{i}.proj", (self.rows, self.width), DTYPE) for i in range(self.num_layers))
        segments = tuple(SegmentSpec("proj", i, (weight.name,)) for i, weight in enumerate(weights))
        folds = (SegmentSpec(COMMIT_FOLD, None, ()),) if self.num_records else ()
        return ModelSpec(self.name, weights, segments, folds=folds)

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """See `SegmentedModel`."""
        tokens = shape.batch_size * shape.tokens_per_sequence
        steps = (
            BufferSpec("hidden", (tokens, self.width), DTYPE, "input"),
            BufferSpec("x", (tokens, self.width), DTYPE, "activation"),
            BufferSpec("y", (tokens, self.rows), DTYPE, "activation"),
            BufferSpec("result", (tokens, self.width), DTYPE, "output"),
        )
        if not self.num_records:
            return steps
        records = (1, self.num_records, HEADS, HEAD_SIZE)
        return (
            *steps,
            BufferSpec("state", (1, HEADS, HEAD_SIZE, HEAD_SIZE), DTYPE, "cache"),
            BufferSpec("keys", records, DTYPE, "cache"),
            BufferSpec("values", records, DTYPE, "cache"),
        )

    def weights(self) -> dict[str, Tensor]:
        """Every weight, equal on all ranks."""
        generator = torch.Generator().manual_seed(20)
        scale = self.width**-0.5
        return {
            weight.name: torch.randn(weight.shape, generator=generator).mul_(scale) for weight in self.spec().weights
        }


def _layer(state: StepState, weight: str, is_first: bool, is_last: bool) -> None:
    x, y = state.buffer("x"), state.buffer("y")
    if is_first:
        x.copy_(state.buffer("hidden"))
    torch.mm(x, state.weight(weight).t(), out=y)
    torch.tanh(y[:, : x.shape[1]], out=state.buffer("result") if is_last else x)


def _commit(state: StepState) -> None:
    replay_records(state.buffer("state")[0], state.buffer("keys")[0], state.buffer("values")[0])


def replay_records(state: Tensor, keys: Tensor, values: Tensor) -> None:
    """The delta rule over all records: `S = decay * S; S += k (v - k S)`.

    `state` is [heads, size, size], `keys` and `values` are [records, heads, size].
    """
    for key, value in zip(keys, values, strict=True):
        state.mul_(DECAY)
        seen = torch.bmm(key.unsqueeze(1), state)
        state.baddbmm_(key.unsqueeze(2), value.unsqueeze(1) - seen)


def fill_records(keys: Tensor, values: Tensor) -> None:
    """Keys of length 1 and values about 1, so that the state neither grows nor fades into denormal numbers."""
    generator = torch.Generator().manual_seed(7)
    keys.copy_(torch.nn.functional.normalize(torch.randn(keys.shape, generator=generator), dim=-1))
    values.copy_(torch.randn(values.shape, generator=generator))


def records_for(group: Group, fold_us: float) -> int:
    """How many records make a fold of about `fold_us`, by the median of all ranks, which time one at once."""
    records = (_CALIBRATED_RECORDS, HEADS, HEAD_SIZE)
    state, keys, values = torch.zeros(HEADS, HEAD_SIZE, HEAD_SIZE), torch.empty(records), torch.empty(records)
    fill_records(keys, values)
    times_us = []
    group.barrier("before a fold is calibrated")
    with torch.inference_mode():
        for _ in range(_CALIBRATIONS):
            begin = time.thread_time()
            replay_records(state, keys, values)
            times_us.append((time.thread_time() - begin) * 1e6 / _CALIBRATED_RECORDS)
    mine = quantile(sorted(times_us), _QUANTILE)
    found = sorted(float(str(value)) for value, _ in group.all_gather(mine, name="us of a fold's record"))
    return max(1, round(fold_us / quantile(found, 0.5)))
