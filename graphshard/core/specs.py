"""What exists: weights, segments and buffers as plain data, with no tensor and no device behind them.

A *weight* is bytes with a shape. A *segment* is a piece of compute between two waits, and names the weights it
reads. A *model* is weights in a canonical order and segments in the order in which they run. A *fold* is a segment that
runs between steps. A *block* is segments with a second way to run: on a slice of their weights, by all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from graphshard.core.errors import SpecError
from graphshard.core.sizes import dtype_bits, num_bytes
from graphshard.core.text import OMIT_EMPTY, digest_of, text_of

BufferHome = Literal["private", "window"]
BufferRole = Literal["input", "output", "cache", "activation"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight: `shape` in elements of `dtype` (torch's name for it, without `torch.`).

    `strides` (elements) are None for a contiguous weight. Bytes are opaque to everything above this class.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        dtype_bits(self.dtype)  # raises SpecError with the known names
        _check_sizes(f"weight {self.name}: shape", self.shape)
        if self.strides is not None:
            _check_sizes(f"weight {self.name}: strides", self.strides)
            if len(self.strides) != len(self.shape):
                raise SpecError(f"weight {self.name}: {len(self.strides)} strides for {len(self.shape)} dimensions")

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last element, as stored (strided weights keep their gaps)."""
        return num_bytes(self.shape, self.dtype, self.strides)


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A piece of compute: `name` is unique inside its `layer` (None outside the layers), `reads` are weight names."""

    name: str
    layer: int | None
    reads: tuple[str, ...]

    @property
    def path(self) -> str:
        """The name that errors print: `layers.3.q_proj`, or `name` alone outside the layers."""
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """A tensor that outlives one segment. All are reserved at bind; a captured graph sees no others.

    A `cache` is declared for the largest step shape; smaller shapes see its first rows (dimension 0).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: BufferRole
    home: BufferHome = "private"

    def __post_init__(self) -> None:
        where = f"buffer {self.name}"
        dtype_bits(self.dtype)
        _check_sizes(f"{where}: shape", self.shape)
        if self.role not in get_args(BufferRole):
            raise SpecError(f"{where}: unknown role {self.role!r}; known are {', '.join(get_args(BufferRole))}")
        if self.home not in get_args(BufferHome):
            raise SpecError(f"{where}: unknown home {self.home!r}; known are {', '.join(get_args(BufferHome))}")
        if self.home == "window":
            raise SpecError(f'{where}: home "window" (memory that other ranks may map) is not there yet: use "private"')

    @property
    def num_bytes(self) -> int:
        """Bytes of the contiguous buffer."""
        return num_bytes(self.shape, self.dtype, None)


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight that its model keeps whole on every rank, and why, in one sentence."""

    weight: str
    reason: str


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Segments `[begin, end)`, and what stands in their place where every rank computes on its slice of the weights.

    `columns` are weights that make features of tokens, `rows` those that bring them back; both lie [features, ...] in
    memory, so rank r's slice of each is a range of its rows. `prepare` writes a rank's own tokens to the buffer
    `tp.tokens` [t, width_in]; `compute` reads the tokens of all ranks, `tp.gathered` [world_size * t, width_in] in the
    order of ranks, and the slices, and writes `tp.partial` [world_size * t, width_out]; `finish` reads `tp.summed`
    [t, width_out], the ranks' partial results of this rank's tokens, added in the order of ranks. The buffers are
    the runtime's, of `dtype`; t is a step shape's batch_size * tokens_per_sequence.
    """

    name: str
    layer: int | None
    begin: int
    end: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    width_in: int
    width_out: int
    dtype: str
    prepare: SegmentSpec
    compute: SegmentSpec
    finish: SegmentSpec

    def __post_init__(self) -> None:
        dtype_bits(self.dtype)
        if not 0 <= self.begin < self.end:
            raise SpecError(f"block {self.name}: segments [{self.begin}, {self.end}) are none")
        if not self.columns or not self.rows or len(set(self.weights)) != len(self.weights):
            raise SpecError(f"block {self.name}: give weights as columns and others as rows, each once")
        if self.width_in < 1 or self.width_out < 1:
            raise SpecError(f"block {self.name}: {self.width_in} features in and {self.width_out} out; both start at 1")

    @property
    def weights(self) -> tuple[str, ...]:
        """Those that are sliced, in the order in which they lie in a unit."""
        return (*self.columns, *self.rows)

    @property
    def sliced_segments(self) -> tuple[SegmentSpec, SegmentSpec, SegmentSpec]:
        """What runs in the place of `[begin, end)`, in order."""
        return (self.prepare, self.compute, self.finish)


@dataclass(frozen=True)
class ModelSpec:
    """Weights in a canonical order, and segments in the order in which a step runs them."""

    name: str
    weights: tuple[WeightSpec, ...]
    segments: tuple[SegmentSpec, ...]
    kept: tuple[KeptWeight, ...] = ()
    """Weights that stay resident by the model's own rules, unless a plan's `include` names them. A model that has such
    rules wants all others inside its layers sharded, however small."""
    folds: tuple[SegmentSpec, ...] = field(default=(), metadata={OMIT_EMPTY: True})
    """Segments that run between steps, each for all layers at once: no slot has what they read, it stays resident."""
    borrowed: tuple[str, ...] = field(default=(), metadata={OMIT_EMPTY: True})
    """Weights that another runtime of the same rank keeps resident, and owns: no memory is reserved for them here."""
    blocks: tuple[BlockSpec, ...] = field(default=(), metadata={OMIT_EMPTY: True})
    """Segments that may also run on slices of their weights, in the order of the segments, none inside another."""

    def __post_init__(self) -> None:
        names = [weight.name for weight in self.weights]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise SpecError(f"model {self.name}: weights named twice: {', '.join(twice)}")
        known = set(names)
        paths: set[str] = set()
        sliced = [segment for block in self.blocks for segment in block.sliced_segments]
        for segment in (*self.segments, *self.folds, *sliced):
            if segment.path in paths:
                raise SpecError(f"model {self.name}: two segments are called {segment.path}; give each its own name")
            paths.add(segment.path)
            missing = [name for name in segment.reads if name not in known]
            if missing:
                raise SpecError(f"model {self.name}: segment {segment.path} reads unknown weights {missing}")
        for fold in self.folds:
            if fold.layer is not None:
                raise SpecError(f"model {self.name}: fold {fold.path} runs for all layers at once: give it layer None")
        unknown = [kept.weight for kept in self.kept if kept.weight not in known]
        if unknown:
            raise SpecError(f"model {self.name}: keeps unknown weights {unknown}")
        unknown = [name for name in self.borrowed if name not in known]
        if unknown:
            raise SpecError(f"model {self.name}: borrows weights that it does not declare: {unknown}")
        if len(set(self.borrowed)) != len(self.borrowed):
            raise SpecError(f"model {self.name}: borrows a weight twice: {list(self.borrowed)}")
        _check_blocks(self)

    def weight(self, name: str) -> WeightSpec:
        """The weight called `name`; SpecError if there is none."""
        weight = self._weights_by_name.get(name)
        if weight is None:
            raise SpecError(f"model {self.name} has no weight {name!r}")
        return weight

    @cached_property
    def why_kept(self) -> dict[str, str]:
        """The reasons of `kept`, by weight."""
        return {kept.weight: kept.reason for kept in self.kept}

    @cached_property
    def why_whole(self) -> dict[str, str]:
        """Weights that no plan may shard, whatever it is asked for, and why."""
        reasons = {name: f"read by {fold.path}, for all layers at once" for fold in self.folds for name in fold.reads}
        return reasons | dict.fromkeys(self.borrowed, "borrowed from the target")

    @cached_property
    def owned(self) -> tuple[WeightSpec, ...]:
        """The weights that are not borrowed, in order: those that are loaded, updated and saved."""
        borrowed = set(self.borrowed)
        return tuple(weight for weight in self.weights if weight.name not in borrowed)

    @cached_property
    def _weights_by_name(self) -> dict[str, WeightSpec]:
        return {weight.name: weight for weight in self.weights}

    def text(self) -> str:
        """Stable text, the base of `digest`."""
        return text_of(self)

    @cached_property
    def digest(self) -> str:
        """The sha256 of `text()`."""
        return digest_of(self.text())


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """The key of a captured graph: `batch_size` sequences, `tokens_per_sequence` tokens each."""

    batch_size: int
    tokens_per_sequence: int = 1

    def __post_init__(self) -> None:
        for value in (self.batch_size, self.tokens_per_sequence):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(
                    f"step shape {self}: batch_size and tokens_per_sequence are whole numbers that start at 1, "
                    f"not {value!r}"
                )

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.tokens_per_sequence}"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """What a plan may know of a device. Agreed over the group, so that no rank's own number chooses an op."""

    kind: Literal["host", "cuda"]
    name: str
    memory_bytes: int
    granularity_bytes: int = 4096
    spare_cores: int = 0
    """Cores that no rank computes on; with none there is no free copy engine on `host`."""


def _check_blocks(model: ModelSpec) -> None:
    """SpecError unless blocks follow one another, and have their weights and their segments for themselves."""
    names, end = [block.name for block in model.blocks], 0
    if len(set(names)) != len(names):
        raise SpecError(f"model {model.name}: two blocks have one name: {names}")
    for block in model.blocks:
        if block.begin < end or block.end > len(model.segments):
            raise SpecError(
                f"model {model.name}: block {block.name} is segments {block.begin} to {block.end}: the block before "
                f"ends at {end}, and the model has {len(model.segments)} segments"
            )
        end = block.end
    for block in model.blocks:
        _check_block(model, block)


def _check_block(model: ModelSpec, block: BlockSpec) -> None:
    where, mine = f"model {model.name}: block {block.name}", set(block.weights)
    if any(segment.layer != block.layer for segment in block.sliced_segments):
        raise SpecError(f"{where}: prepare, compute and finish are not of its layer {block.layer}")
    lacking = [name for name in block.weights if name not in block.compute.reads]
    if lacking:
        raise SpecError(f"{where}: {block.compute.path} does not read its weights {lacking}")
    around = [*model.segments[: block.begin], *model.segments[block.end :], *model.folds]
    sliced = [one for other in model.blocks for one in other.sliced_segments if one != block.compute]
    for segment in (*around, *sliced):
        shared = mine.intersection(segment.reads)
        if shared:
            raise SpecError(
                f"{where} slices {sorted(shared)}, which {segment.path} reads as a whole: a block's weights are "
                "read by its own segments alone"
            )


def _check_sizes(what: str, values: object) -> None:
    """SpecError unless `values` is a sequence of whole numbers from 0 on."""
    if not isinstance(values, Sequence) or not all(isinstance(n, int) and not isinstance(n, bool) for n in values):
        raise SpecError(f"{what} {values!r} is not made of whole numbers")
    if any(n < 0 for n in values):
        raise SpecError(f"{what} {values!r} has a negative size")
