"""What each segment of a model costs at a step shape: alone, beside a gather, and with its weights in a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from graphshard.core.errors import SpecError
from graphshard.core.lowering import ActCollective, ActCopies, ActOp
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.cost.facts import LayerFact, ModelFacts, WeightFact
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.kernels import (
    ACTIVATION_BITS,
    cached_gemm_us,
    collective_us,
    gemm_us,
    gemms_us,
    memory_share,
    stream_us,
)

DEFAULT_CONTEXT_TOKENS = 4096
"""Cached tokens of a sequence, where nobody says how many."""


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """Microseconds of one segment."""

    alone_us: float
    shared_us: float
    """While a gather runs: the memory is shared, clocks drop."""
    cached_us: float
    """Alone, its weights in a cache that their gather has just filled."""


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Microseconds of one block in slices: prepare and finish are elementwise, and counted with the exchanges."""

    gather_us: float
    compute_us: float
    scatter_us: float


@dataclass(frozen=True)
class StepTimes:
    """Every segment of a model at one step shape, in order. Gathers are not in it: it is the replicated step."""

    shape: StepShape
    segments: tuple[SegmentTime, ...]
    blocks: tuple[BlockTime, ...] = ()
    """By block of the model; empty if none is to be predicted in slices."""

    @cached_property
    def ends_us(self) -> tuple[float, ...]:
        """`ends_us[i]`: when segment i begins if nothing waits; the last entry is the whole step."""
        return tuple(accumulate((one.alone_us for one in self.segments), initial=0.0))

    @property
    def total_us(self) -> float:
        """The replicated step."""
        return self.ends_us[-1]

    def of_parts(self, program: Program, numbers: Sequence[int]) -> float:
        """The segments of tensor-parallel blocks that have these numbers."""
        parts = [(block.index, block.part_of(number)) for block in program.blocks for number in numbers]
        return sum(self.block(index).compute_us for index, part in parts if part == "compute")

    def of_exchange(self, op: ActOp) -> float:
        """A part of an exchange: its copies or its collective; flags and the sum are counted with them."""
        block = self.block(op.block)
        if isinstance(op, ActCopies):
            return block.gather_us if op.what == "tokens" else block.scatter_us
        if isinstance(op, ActCollective):
            return block.gather_us if op.kind == "all_gather" else block.scatter_us
        return 0.0

    def block(self, index: int) -> BlockTime:
        """Of block `index`; SpecError if nothing is known of it."""
        if index >= len(self.blocks):
            raise SpecError(f"block {index} is tensor-parallel, and its times are not known: give StepTimes.blocks")
        return self.blocks[index]


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """What a segment computes, at any step shape."""

    reads: tuple[WeightFact | None, ...]
    """None: an embedding that is looked up."""
    attention: LayerFact | None = None
    exchange: tuple[LayerFact, WeightFact] | None = None
    """Of a layer and its routed experts: with the first segment that reads one."""

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for what costs the same."""
        reads = tuple(fact if fact is None else (_key(fact), fact.top_k, fact.num_experts) for fact in self.reads)
        attention = None if self.attention is None else replace(self.attention, layer=0, segment="")
        exchange = None if self.exchange is None else (self.exchange[0].routed_bytes_per_token, self.exchange[1].top_k)
        return reads, attention, exchange


@dataclass(frozen=True, slots=True)
class SegmentKinds:
    """Segments of a model that cost the same at any step shape: segment i is of kind `of[i]`."""

    of: tuple[int, ...]
    works: tuple[SegmentWork, ...]
    """By kind."""


def segment_kinds(model: ModelSpec, facts: ModelFacts) -> SegmentKinds:
    """The kinds of `model`'s segments; SpecError if the facts are not this model's."""
    layer_of = {layer.segment: layer for layer in facts.layers}
    last_reader = {name: segment.path for segment in model.segments for name in segment.reads}
    exchanged: set[int] = set()
    kinds: dict[tuple[object, ...], int] = {}
    works: list[SegmentWork] = []
    of = []
    for segment in model.segments:
        path, layer = segment.path, segment.layer
        read = [facts.weight(name) for name in segment.reads]
        routed = next((fact for fact in read if fact.rows == "routed"), None)
        exchange = None
        if routed is not None and layer is not None and layer not in exchanged:
            exchanged.add(layer)
            exchange = facts.layer(layer), routed
        # a tied head is looked up by its first readers, multiplied by the last
        reads = tuple(None if fact.role == "head" and last_reader[fact.weight] != path else fact for fact in read)
        work = SegmentWork(reads, layer_of.get(path), exchange)
        kind = kinds.setdefault(work.key, len(works))
        if kind == len(works):
            works.append(work)
        of.append(kind)
    return SegmentKinds(tuple(of), tuple(works))


def step_times(
    model: ModelSpec,
    facts: ModelFacts,
    shape: StepShape,
    hardware: HardwareSpec,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
    share: float | None = None,
    kinds: SegmentKinds | None = None,
) -> StepTimes:
    """Cost every segment: the gemms of the weights it reads, its layer's attention, what its experts send.

    Args:
        model: its segments.
        facts: what each weight and layer computes.
        shape: sequences, and tokens of each; all of one rank.
        hardware: rates; measured times of exactly these operations or segments go first.
        context_tokens: cached tokens of each sequence.
        share: what a running gather leaves of the memory's rate; None: `kernels.memory_share`.
        kinds: of these segments, for many step shapes; None: worked out.

    Raises:
        SpecError: the hardware has no rate for a gemm's dtype, or the facts are not this model's.
    """
    share = memory_share(hardware) if share is None else share
    kinds = segment_kinds(model, facts) if kinds is None else kinds
    coster = _Coster(facts, shape, hardware, context_tokens, share)
    digest = model.digest if hardware.measured else ""
    by_kind: dict[int, SegmentTime] = {}
    times = []
    for segment, kind in zip(model.segments, kinds.of, strict=True):
        one = coster.measured(digest, segment.name) if digest else None
        if one is None:
            if kind not in by_kind:
                by_kind[kind] = coster.work(kinds.works[kind])
            one = by_kind[kind]
        times.append(one)
    return StepTimes(shape, tuple(times))


def _key(fact: WeightFact) -> tuple[object, ...]:
    """Equal for weights that cost the same in one model."""
    return (fact.n, fact.k, fact.dtype, fact.rows, fact.role, fact.split, fact.is_replicated, fact.num_matrices)


class _Coster:
    """Costs of one step shape; equal weights are computed once."""

    def __init__(
        self, facts: ModelFacts, shape: StepShape, hardware: HardwareSpec, context_tokens: int, share: float
    ) -> None:
        self.facts, self.shape, self.hardware = facts, shape, hardware
        self.context_tokens, self.share = context_tokens, share
        self.tokens = shape.batch_size * shape.tokens_per_sequence
        self.done: dict[tuple[object, ...], SegmentTime] = {}

    def measured(self, digest: str, segment: str) -> SegmentTime | None:
        """A whole segment that was measured goes before what it does."""
        shape = (self.shape.batch_size, self.shape.tokens_per_sequence)
        us = self.hardware.look_up("segment", digest, segment, *shape)
        if us is None:
            return None
        cached = self.hardware.look_up("segment_cached", digest, segment, *shape)
        return SegmentTime(us, us * self.hardware.overlap_compute, us if cached is None else cached)

    def work(self, work: SegmentWork) -> SegmentTime:
        """The sum of what a segment does."""
        parts = [self._elementwise() if fact is None else self.weight(fact) for fact in work.reads]
        if work.attention is not None:
            parts.append(self.attention(work.attention))
        if work.exchange is not None:
            parts.append(self.exchange(*work.exchange))
        return SegmentTime(
            sum(part.alone_us for part in parts),
            sum(part.shared_us for part in parts),
            sum(part.cached_us for part in parts),
        )

    def weight(self, fact: WeightFact) -> SegmentTime:
        """Its gemms, and the sum over ranks that tensor parallelism needs after them."""
        key = _key(fact)
        if key not in self.done:
            self.done[key] = self._weight(fact)
        return self.done[key]

    def _weight(self, fact: WeightFact) -> SegmentTime:
        m, hardware = fact.num_rows(self.tokens), self.hardware
        if fact.n == 0 or m == 0:
            return self._elementwise() if fact.role in ("norm", "embedding") else SegmentTime(0.0, 0.0, 0.0)
        deployment = self.facts.deployment
        read = fact.matrices_read(self.tokens, deployment.expert_ranks if fact.rows == "routed" else 1)
        if fact.rows == "rank" and fact.num_matrices == 1:
            alone = gemm_us(m, fact.n, fact.k, fact.dtype, hardware)
            shared = gemm_us(m, fact.n, fact.k, fact.dtype, hardware, self.share)
            cached = cached_gemm_us(m, fact.n, fact.k, fact.dtype, hardware)
        else:
            rows = m if fact.rows == "routed" else m * fact.num_matrices
            alone = cached = gemms_us(rows, fact.n, fact.k, fact.dtype, read, hardware)
            shared = gemms_us(rows, fact.n, fact.k, fact.dtype, read, hardware, self.share)
        sums = 0.0
        if deployment.tp > 1 and fact.split == "row" and fact.rows == "rank" and not fact.is_replicated:
            sums = 2 * collective_us(m * fact.n * ACTIVATION_BITS / 8, deployment.tp, hardware)
        return SegmentTime(alone + sums, shared * hardware.overlap_compute + sums, cached + sums)

    def attention(self, layer: LayerFact) -> SegmentTime:
        """Reads keys and values (or reads and writes the state) of every sequence once."""
        batch = self.shape.batch_size
        kept = self.context_tokens if layer.window_tokens is None else min(layer.window_tokens, self.context_tokens)
        num_bytes = batch * (kept * layer.kv_bytes_per_token + 2 * layer.state_bytes_per_request)
        flops = self.tokens * (kept * layer.attention_flops + layer.state_flops_per_token)
        return self._stream(num_bytes, flops) if num_bytes or flops else SegmentTime(0.0, 0.0, 0.0)

    def exchange(self, layer: LayerFact, fact: WeightFact) -> SegmentTime:
        """Tokens go to their experts' ranks, once to each rank, and come back."""
        ranks = self.facts.deployment.expert_ranks
        distinct = ranks * (1 - (1 - 1 / ranks) ** fact.top_k) / max(fact.top_k, 1)
        num_bytes = self.tokens * layer.routed_bytes_per_token * distinct
        us = 2 * collective_us(num_bytes, ranks, self.hardware)
        return SegmentTime(us, us, us)

    def _elementwise(self) -> SegmentTime:
        return self._stream(2 * self.tokens * self.facts.hidden_size * ACTIVATION_BITS / 8, 0.0)

    def _stream(self, num_bytes: float, flops: float) -> SegmentTime:
        alone = stream_us(num_bytes, flops, self.hardware)
        shared = stream_us(num_bytes, flops, self.hardware, self.share) * self.hardware.overlap_compute
        return SegmentTime(alone, shared, alone)
