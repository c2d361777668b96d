"""One all-reduce in the place of a block's reduce-scatter and the next block's all-gather: where, and for how much.

Two blocks that follow each other in slices exchange their activations twice between them: a reduce-scatter gives each
rank its own tokens' sums, and an all-gather hands all of them to everybody again. An all-reduce does both at once. What
lies between must then be done by every rank for the tokens of all, so it must be maths on single tokens, and small; and
nothing may read other tokens or weights in slots there. Attention does.

The link carries 2 (N-1)/N of the bytes either way; a start of a collective is saved, and N times as many tokens go
through what lies between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graphshard.core.sizes import num_bytes
from graphshard.core.specs import BlockSpec, ModelSpec
from graphshard.cost.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class MergeTimes:
    """Between two blocks, in us, at `tokens_per_rank`."""

    tokens_per_rank: int
    separate_us: float
    """Reduce-scatter, all-gather, and a norm of one rank's tokens between them."""
    merged_us: float
    """All-reduce, and the norm of all ranks' tokens."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What collectives of activations go by."""

    t0_us: float
    """To start one."""
    bytes_per_s: float
    memory_bytes_per_s: float


def merge_pairs(model: ModelSpec) -> tuple[tuple[BlockSpec, BlockSpec], ...]:
    """Blocks of `model` with no segment between them: the first one's `finish` meets the next one's `prepare`."""
    return tuple((one, other) for one, other in _neighbours(model) if one.end == other.begin)


def why_no_pair(model: ModelSpec) -> str:
    """Why `merge_pairs` finds none, one sentence; empty if it finds some."""
    if merge_pairs(model):
        return ""
    between = [(one, other, model.segments[one.end : other.begin]) for one, other in _neighbours(model)]
    if not between:
        return f"no such pair in this model: it has {len(model.blocks)} block{'' if len(model.blocks) == 1 else 's'}"
    one, other, segments = min(between, key=lambda found: len(found[2]))
    paths = ", ".join(segment.path for segment in segments[:_MOST_PATHS])
    more = f" and {len(segments) - _MOST_PATHS} more" if len(segments) > _MOST_PATHS else ""
    return f"no such pair in this model: even between {one.name} and {other.name} run {paths}{more}"


def merge_times(block: BlockSpec, tokens_per_rank: int, world_size: int, rates: Rates) -> MergeTimes:
    """Both ways behind `block`, by formula: what a pair would take if a model had one."""
    own = num_bytes((tokens_per_rank, block.width_out), block.dtype, None)
    remote_us = 2 * own * (world_size - 1) / rates.bytes_per_s * 1e6
    norm_us = 2 * own / rates.memory_bytes_per_s * 1e6  # read and written once
    return MergeTimes(
        tokens_per_rank,
        separate_us=2 * rates.t0_us + remote_us + norm_us,
        merged_us=rates.t0_us + remote_us + world_size * norm_us,
    )


def rates_of(hardware: HardwareSpec) -> Rates:
    """Of activations on a machine."""
    memory = hardware.memory_bytes_per_s * hardware.memory_efficiency
    return Rates(hardware.activation_t0_us, hardware.activation_bytes_per_s, memory)


def rates_between(few: tuple[int, float], many: tuple[int, float]) -> Rates:
    """Of two copies (bytes, us) on a host, where what goes to a peer goes through memory as all else does."""
    (few_bytes, few_us), (many_bytes, many_us) = few, many
    bytes_per_s = (many_bytes - few_bytes) / max(many_us - few_us, 1e-3) * 1e6
    return Rates(max(0.0, few_us - few_bytes / bytes_per_s * 1e6), bytes_per_s, bytes_per_s)


_MOST_PATHS = 4


def _neighbours(model: ModelSpec) -> Iterator[tuple[BlockSpec, BlockSpec]]:
    yield from zip(model.blocks, model.blocks[1:], strict=False)
