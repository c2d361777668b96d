"""One block of weights, three ways: replicated, gathered, or computed in slices; by tokens, and where they cross.

- *replicated*: each rank streams the whole block for its own tokens.
- *gather*: the same compute, and what of the gather the layer before cannot hide; right after a gather of its own core
  the weights are read from the cache, where they fit.
- *tensor_parallel*: the group's tokens are all-gathered, each rank computes its slice for all of them (columns, then
  rows), and a reduce-scatter sums and gives every rank its own tokens back.

`tokens_per_group` are the tokens of all ranks together. Few tokens: streaming weights costs most, slices win. Many: the
activations on the link cost most, and slices lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec
from graphshard.cost.facts import ModelFacts, Role, WeightFact
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.kernels import ACTIVATION_BITS, cached_gemm_us, collective_us, gather_us, gemm_us, value_bits
from graphshard.schedule.gating import why_not_tensor_parallel

Mode = Literal["replicated", "gather", "tensor_parallel"]
SLICED_ROLES: frozenset[Role] = frozenset({"shared_expert", "mlp"})
MAX_TOKENS = 2**20
"""Crossovers are looked for up to so many tokens per group."""


@dataclass(frozen=True, slots=True)
class BlockGemm:
    """One matrix of a block."""

    n: int
    k: int
    dtype: str
    split: str


@dataclass(frozen=True, slots=True)
class Block:
    """Weights that are used together, once in each of `layers` layers."""

    name: str
    """In the first of them."""
    role: Role
    gemms: tuple[BlockGemm, ...]
    num_bytes: int
    layers: int

    def why_not_sliced(self, world_size: int) -> str:
        """Why its compute cannot be cut over `world_size` ranks, one sentence; empty if it can."""
        if self.role not in SLICED_ROLES:
            return f"{self.name} is {self.role}: its slices would need other ranks' requests, not only their tokens"
        splits = {gemm.split for gemm in self.gemms}
        if not {"column", "row"} <= splits or "none" in splits:
            return f"{self.name} is not columns followed by rows"
        for gemm in self.gemms:
            intermediate, hidden = (gemm.n, gemm.k) if gemm.split == "column" else (gemm.k, gemm.n)
            why = why_not_tensor_parallel(
                is_asked=True,
                is_sequence_parallel=True,  # asked of weights that every rank has for tokens of its own
                world_size=world_size,
                hidden=hidden,
                intermediate=intermediate,
                name=self.name,
            )
            if why:
                return why
        return ""


@dataclass(frozen=True, slots=True)
class DualTimes:
    """A block's time in one layer, in us; tensor_parallel is None where `why_not_sliced` says so."""

    tokens_per_group: int
    replicated_us: float
    gather_us: float
    tensor_parallel_us: float | None

    @property
    def best(self) -> Mode:
        """The fastest; of equal ones the one that keeps fewest bytes: slices, then gathers."""
        times: list[tuple[float, int, Mode]] = [(self.gather_us, 1, "gather"), (self.replicated_us, 2, "replicated")]
        if self.tensor_parallel_us is not None:
            times.append((self.tensor_parallel_us, 0, "tensor_parallel"))
        return min(times)[2]

    def us(self, mode: Mode) -> float | None:
        """The time of `mode`."""
        return {"replicated": self.replicated_us, "gather": self.gather_us}.get(mode, self.tensor_parallel_us)


@dataclass(frozen=True)
class DualEstimate:
    """A block on a machine, over a group of ranks."""

    block: Block
    hardware: HardwareSpec
    world_size: int
    transport: str = "pull"
    hide_us: float = 0.0
    """Compute that runs beside the gather."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise SpecError(f"{self.world_size} ranks: there is at least 1, and from 2 on there is something to free")

    def times(self, tokens_per_group: int) -> DualTimes:
        """All three at this many tokens of all ranks together; SpecError below 1."""
        if tokens_per_group < 1:
            raise SpecError(f"{tokens_per_group} tokens per group: there is at least 1")
        num_slices = 1 if self.block.why_not_sliced(self.world_size) else max(1, len(self.block.gemms))
        gathered = gather_us(
            self.block.num_bytes, self.world_size, self.transport, self.hardware, num_slices=num_slices
        )
        in_cache = self.hide_us == 0 and self.block.num_bytes <= self.hardware.cache_bytes
        return DualTimes(
            tokens_per_group=tokens_per_group,
            replicated_us=self._whole_us(tokens_per_group, gemm_us),
            gather_us=self._whole_us(tokens_per_group, cached_gemm_us if in_cache else gemm_us)
            + max(0.0, gathered - self.hide_us),
            tensor_parallel_us=self._sliced_us(tokens_per_group),
        )

    def crossover(self, first: Mode, second: Mode) -> int | None:
        """The fewest tokens per group from which `second` is no slower than `first`; None: up to MAX_TOKENS it is."""
        if not self._is_reached(first, second, MAX_TOKENS):
            return None
        low, high = 0, MAX_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._is_reached(first, second, middle) else (middle, high)
        return high

    def _is_reached(self, first: Mode, second: Mode, tokens: int) -> bool:
        times = self.times(tokens)
        one, other = times.us(first), times.us(second)
        return one is not None and other is not None and other <= one

    def _whole_us(self, tokens: int, time_us: Callable[[int, int, int, str, HardwareSpec], float]) -> float:
        m = -(-tokens // self.world_size)
        return sum(time_us(m, gemm.n, gemm.k, gemm.dtype, self.hardware) for gemm in self.block.gemms)

    def _sliced_us(self, tokens: int) -> float | None:
        return None if self.block.why_not_sliced(self.world_size) else sum(self.sliced_parts_us(tokens))

    def sliced_parts_us(self, tokens: int) -> tuple[float, float, float]:
        """(act_gather, compute on this rank's slices, reduce_scatter) of a block that can be sliced, in us."""
        us = 0.0
        for gemm in self.block.gemms:
            n = gemm.n // self.world_size if gemm.split == "column" else gemm.n
            k = gemm.k // self.world_size if gemm.split == "row" else gemm.k
            us += gemm_us(tokens, n, k, gemm.dtype, self.hardware)
        wide_in = max(gemm.k for gemm in self.block.gemms if gemm.split == "column")
        wide_out = max(gemm.n for gemm in self.block.gemms if gemm.split == "row")
        bits = max(ACTIVATION_BITS, *(value_bits(gemm.dtype) for gemm in self.block.gemms))
        gathered, scattered = (
            collective_us(tokens * wide * bits / 8, self.world_size, self.hardware) for wide in (wide_in, wide_out)
        )
        return gathered, us, scattered


def blocks_of(model: ModelSpec, facts: ModelFacts) -> tuple[Block, ...]:
    """The blocks of replicated weights, equal ones of several layers once."""
    found: dict[tuple[object, ...], Block] = {}
    for name, members in _by_block(facts):
        gemms = tuple(BlockGemm(fact.n, fact.k, fact.dtype, fact.split) for fact in members)
        size = sum(model.weight(fact.weight).num_bytes for fact in members)
        key = (members[0].role, gemms, size)
        before = found.get(key)
        layers = 1 if before is None else before.layers + 1
        found[key] = Block(name if before is None else before.name, members[0].role, gemms, size, layers)
    return tuple(found.values())


def _by_block(facts: ModelFacts) -> Iterator[tuple[str, Sequence[WeightFact]]]:
    blocks: dict[str, list[WeightFact]] = {}
    for fact in facts.weights:
        if fact.is_replicated and fact.rows == "rank" and fact.n:
            blocks.setdefault(fact.block, []).append(fact)
    yield from blocks.items()


def step_gain(estimate: DualEstimate, tokens_per_group: int, rest_us: float) -> float:
    """How much more a group serves with slices than replicated: 0.1 is 10 %. `rest_us` is the step without the blocks.

    Raises:
        SpecError: the block cannot be sliced; says why.
    """
    times = estimate.times(tokens_per_group)
    if times.tensor_parallel_us is None:
        raise SpecError(estimate.block.why_not_sliced(estimate.world_size))
    layers = estimate.block.layers
    return (rest_us + layers * times.replicated_us) / (rest_us + layers * times.tensor_parallel_us) - 1.0
