"""What `graphshard plan` works out: totals, ledgers, frontier, recommendation, dual estimate, predicted steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout, build_layout
from graphshard.core.plan import Plan
from graphshard.core.sizes import dtype_bits, format_bytes
from graphshard.core.specs import DeviceSpec, StepShape
from graphshard.cost.deployment import Deployment
from graphshard.cost.dual import Block, DualEstimate, DualTimes, blocks_of
from graphshard.cost.facts import PlanningModel
from graphshard.cost.frontier import Frontier, frontier
from graphshard.cost.hardware import HardwareSpec
from graphshard.cost.host_step import predict_step
from graphshard.cost.ledger import Ledger, Overheads, PartTotal, make_ledger, shardable_by_part
from graphshard.cost.patterns import exact_patterns
from graphshard.cost.problem import Problem, ResidencyRequest
from graphshard.cost.recommend import HIDDEN_SHARE, Recommendation, recommend
from graphshard.cost.residency import Residency, bytes_for_kv_tokens
from graphshard.cost.segments import SegmentKinds, segment_kinds, step_times
from graphshard.cost.timeline import Prediction
from graphshard.models.specs.read import read_model
from graphshard.schedule.auto import make_plan

DUAL_TOKENS = tuple(2**i for i in range(3, 15))
"""Tokens per group of the dual table."""
PERIPHERY_ROLES = ("shared_expert", "latent")
BF16_BYTES = 2
HOST_GRANULARITY_BYTES = 4096


@dataclass(frozen=True)
class PlanAsk:
    """What the options said."""

    source: str
    draft: Path | None
    deployment: Deployment
    hardware: HardwareSpec
    step_shapes: tuple[StepShape, ...]
    transport: str
    context_tokens: int
    free_bytes: int | None = None
    """To free on each rank, net of slots."""
    memory_limit_bytes: int | None = None
    """Of one rank's chunks, slots and resident weights."""
    kv_tokens: int | None = None
    """Cached tokens that a rank is to have room for, in all."""


@dataclass(frozen=True)
class Fit:
    """Whether what a rank holds fits its memory, and what would."""

    used_bytes: int
    memory_bytes: int
    routed_bytes: int
    """Routed experts of one rank."""
    least_ep: int | None
    """The fewest ranks over which routed experts have to be spread; None: no number of them helps."""

    @property
    def fits(self) -> bool:
        """Weights, slots and workspaces, without any request."""
        return self.used_bytes <= self.memory_bytes


@dataclass(frozen=True)
class Planned:
    """A plan, where its bytes lie, and the account of one rank."""

    plan: Plan
    layout: Layout
    ledger: Ledger


@dataclass(frozen=True)
class DualTable:
    """A block by tokens. The crossovers say from how many tokens per group the second is no slower than the first."""

    block: Block
    rows: tuple[DualTimes, ...]
    crossovers: tuple[tuple[str, str, int | None], ...]


class PlanWork:
    """Answers to one `PlanAsk`, each worked out when it is first asked for."""

    def __init__(self, ask: PlanAsk) -> None:
        """Reads the model.

        Raises:
            SpecError: the ranks are too many for the machine, the model cannot be read, or the deployment does not
                divide it.
        """
        self.ask = ask
        _check_domain(ask)
        self.model: PlanningModel = read_model(ask.source, ask.deployment, ask.draft)
        self.world_size = ask.deployment.world_size
        kind = ask.hardware.kind
        self.device = DeviceSpec(
            kind=kind,
            name=ask.hardware.name,
            memory_bytes=ask.hardware.memory_bytes,
            granularity_bytes=self.overheads.granularity_bytes,
            spare_cores=max(0, ask.hardware.max_domain - self.world_size) if kind == "host" else 0,
        )
        self._draft_layout = self._laid_out_draft()
        self._layers_us: dict[int, float] = {}

    @property
    def is_shardable(self) -> bool:
        """Whether ranks hold anything alike."""
        return bool(self.model.facts.replicated)

    @property
    def request(self) -> ResidencyRequest:
        """For the solver."""
        ask = self.ask
        return ResidencyRequest(
            self.model.spec,
            self.model.facts,
            ask.hardware,
            self.world_size,
            ask.step_shapes,
            transport=ask.transport,
            context_tokens=ask.context_tokens,
        )

    @property
    def overheads(self) -> Overheads:
        """Beside weights and requests."""
        if self.ask.hardware.kind == "host":
            return Overheads(granularity_bytes=HOST_GRANULARITY_BYTES, workspace_bytes=0)
        return Overheads()

    @cached_property
    def parts(self) -> tuple[PartTotal, ...]:
        """Bytes to shard by what they are."""
        return shardable_by_part(self.model)

    @cached_property
    def periphery_bf16_bytes(self) -> tuple[int, int]:
        """(all, a layer) of what surrounds routed experts and is sharded, were it bfloat16; (0, 0) without any."""
        where = {name: segment.layer for segment in self.model.spec.segments for name in segment.reads}
        by_layer: dict[int | None, int] = {}
        for fact in self.model.facts.weights:
            if fact.is_replicated and fact.role in PERIPHERY_ROLES:
                size = fact.num_matrices * fact.n * fact.k * BF16_BYTES
                layer = where.get(fact.weight)
                by_layer[layer] = by_layer.get(layer, 0) + size
        return sum(by_layer.values()), max(by_layer.values(), default=0)

    @cached_property
    def front(self) -> Frontier:
        """Freed against exposed."""
        return frontier(self.request, like=self._problem)

    @cached_property
    def advice(self) -> Recommendation:
        """What to do without a target."""
        return recommend(self.request, like=self._problem)

    @cached_property
    def _problem(self) -> Problem:
        """What the frontier and the recommendation have in common."""
        return Problem(self.request)

    @cached_property
    def residency(self) -> Residency | None:
        """The plan for the target; without one the recommended; None: shard nothing."""
        if not self.is_shardable:
            return None
        target = self.target_bytes
        if target is None:
            return self.advice.residency
        return self.front.residency(target) if target > 0 else None

    @cached_property
    def target_bytes(self) -> int | None:
        """To free on each rank; None: nobody asked.

        Raises:
            SpecError: it cannot be reached; names the nearest that can.
        """
        ask = self.ask
        if ask.free_bytes is not None:
            return ask.free_bytes
        if ask.memory_limit_bytes is not None:
            return self._within_limit(ask.memory_limit_bytes)
        if ask.kv_tokens is None:
            return None
        ledger = self.replicated.ledger
        room = ledger.memory_bytes - ledger.replicated_bytes
        wanted = max(0, bytes_for_kv_tokens(self.model.facts, ask.kv_tokens, ask.context_tokens) - room)
        most = self.front.search.most_freed().freed_bytes
        if wanted > most:
            tokens = max(0, room + most) // max(1, ledger.request_bytes) * ask.context_tokens
            nearest = f"the nearest is --kv-tokens {tokens}" if tokens else "no request fits beside the weights"
            raise SpecError(
                f"{ask.kv_tokens:,} KV tokens in requests of {ask.context_tokens:,} need {format_bytes(wanted)} more "
                f"than a replica leaves, and sharding frees {format_bytes(max(most, 0))} at most: {nearest}"
            )
        return wanted

    def _within_limit(self, limit: int) -> int:
        """What has to be freed so that chunks, slots and resident weights take `limit`."""
        whole = self.replicated.ledger
        weights = whole.resident_bytes + whole.rounding_bytes
        wanted, most = max(0, weights - limit), max(0, self.front.search.most_freed().freed_bytes)
        if wanted > most:
            raise SpecError(
                f"a rank holds {format_bytes(weights)} of weights, of which {format_bytes(most)} can be freed, so "
                f"{format_bytes(limit)} are too little: the nearest is --memory-limit {weights - most}"
            )
        return wanted

    @cached_property
    def replicated(self) -> Planned:
        """Every weight whole."""
        return self._planned({"replicated": True})

    @cached_property
    def full(self) -> Planned:
        """Everything that ranks hold alike is sharded, a layer a unit, one layer ahead."""
        if not self.is_shardable:
            return self.replicated
        names = [weight.name for weight in self.front.search.problem.weights]
        include = exact_patterns(names, [weight.name for weight in self.model.spec.weights])
        return self._planned({"units": "layer", "prefetch_depth": 1, "include": include})

    @cached_property
    def chosen(self) -> Planned:
        """The plan of `residency`."""
        residency = self.residency
        if residency is None:
            return self.replicated
        return self._planned({name: value for name, value in residency.options().items() if name != "step_shapes"})

    def mean_us(self, by_shape: Sequence[float]) -> float:
        """The mean over the step shapes."""
        return self.front.search.problem.mean(by_shape)

    def fit(self, planned: Planned) -> Fit:
        """Whether a rank of `planned` fits, and the least ep (a multiple of the ranks) with which it does."""
        facts = self.model.facts
        routed = [fact for fact in facts.weights if fact.role == "routed_expert" and fact.num_experts]
        size = sum(self.model.spec.weight(fact.weight).num_bytes for fact in routed)
        used, memory = planned.ledger.used_bytes, planned.ledger.memory_bytes
        ep = facts.deployment.expert_ranks
        experts = max((fact.num_experts for fact in routed), default=0)
        steps = [n for n in range(ep, experts + 1, self.world_size) if experts % n == 0]
        fitting = (n for n in steps if used - size + size * ep // n <= memory)
        return Fit(used, memory, size, next(fitting, None))

    @cached_property
    def predictions(self) -> tuple[Prediction, ...]:
        """A step of `chosen` at each step shape."""
        return tuple(self.predicted(self.chosen, shape) for shape in self.ask.step_shapes)

    def predicted(self, planned: Planned, shape: StepShape) -> Prediction:
        """A step of `planned` at `shape`."""
        spec, facts, ask = self.model.spec, self.model.facts, self.ask
        return predict_step(spec, facts, planned.plan, shape, ask.hardware, ask.context_tokens, self._kinds)

    def hidden_by_shape(self) -> list[dict[str, Any]]:
        """For each step shape the most that one of the frontier's plans frees with at most 2 % of that step exposed."""
        problem, full = self.front.search.problem, self.advice.full
        found = []
        for index, (shape, times) in enumerate(zip(self.ask.step_shapes, problem.times, strict=True)):
            allowed = HIDDEN_SHARE * times.total_us + 1e-6
            hidden = [one for one in self.front.points if one.exposed_by_shape[index] <= allowed]
            best = max(hidden, key=lambda one: one.freed_bytes)
            found.append(
                {
                    "step_shape": str(shape),
                    "tokens_per_rank": shape.batch_size * shape.tokens_per_sequence,
                    "step_us": times.total_us,
                    "full_exposed_us": full.exposed_by_shape[index],
                    "full_is_hidden": full.exposed_by_shape[index] <= allowed,
                    "hidden_freed_bytes": best.freed_bytes,
                    "hidden_exposed_us": best.exposed_by_shape[index],
                }
            )
        return found

    def dual_tables(self) -> list[DualTable]:
        """A table for each block that could be computed in slices."""
        return self._dual_tables

    @cached_property
    def _dual_tables(self) -> list[DualTable]:
        if self.world_size == 1:
            return []
        blocks = blocks_of(self.model.spec, self.model.facts)
        sliced = [block for block in blocks if not block.why_not_sliced(self.world_size)]
        wide = [_in_bfloat16(block) for block in sliced if any(dtype_bits(gemm.dtype) < 16 for gemm in block.gemms)]
        return [self._dual_table(block) for block in (*sliced, *wide)]

    def _dual_table(self, block: Block) -> DualTable:
        plain = self._estimate(block, 0)
        rows = tuple(self._estimate(block, count).times(count) for count in DUAL_TOKENS)
        crossovers = (
            ("tensor_parallel", "replicated", plain.crossover("tensor_parallel", "replicated")),
            ("tensor_parallel", "gather", self._gather_crossover(block)),
        )
        return DualTable(block, rows, crossovers)

    def _estimate(self, block: Block, tokens_per_group: int) -> DualEstimate:
        """With the compute of one mean layer at these tokens beside the gather; 0 tokens: nothing beside it."""
        hide_us = self._layer_us(max(1, tokens_per_group // self.world_size)) if tokens_per_group else 0.0
        return DualEstimate(block, self.ask.hardware, self.world_size, self.ask.transport, hide_us)

    def _layer_us(self, tokens_per_rank: int) -> float:
        """One mean layer in a step of one sequence."""
        if tokens_per_rank not in self._layers_us:
            spec, facts, ask = self.model.spec, self.model.facts, self.ask
            shape = StepShape(1, tokens_per_rank)
            times = step_times(spec, facts, shape, ask.hardware, ask.context_tokens, kinds=self._kinds)
            self._layers_us[tokens_per_rank] = times.total_us / max(1, facts.num_layers)
        return self._layers_us[tokens_per_rank]

    @cached_property
    def _kinds(self) -> SegmentKinds:
        return segment_kinds(self.model.spec, self.model.facts)

    def _gather_crossover(self, block: Block) -> int | None:
        """Tokens per group from which a gather beside a layer's compute is no slower than slices, within 1 %."""

        def is_reached(count: int) -> bool:
            times = self._estimate(block, count).times(count)
            return times.tensor_parallel_us is not None and times.gather_us <= times.tensor_parallel_us

        high = next((2**i for i in range(21) if is_reached(2**i)), None)
        low = 0 if high is None else high // 2
        while high is not None and high - low > max(1, high // 100):
            middle = (low + high) // 2
            low, high = (low, middle) if is_reached(middle) else (middle, high)
        return high

    def _laid_out_draft(self) -> Layout | None:
        """The draft model's own plan: units of layers, its first gather outside the target's graph."""
        draft = self.model.draft
        if draft is None:
            return None
        names = [weight.name for weight in draft.spec.weights]
        options: dict[str, Any] = {"replicated": True}
        if draft.facts.replicated:
            options = {"units": "layer", "prefetch_depth": 1, "head": "outside"}
            options["include"] = exact_patterns(draft.facts.replicated, names)
        return build_layout(draft.spec, make_plan(draft.spec, self.world_size, self.device, **options))

    def _planned(self, options: dict[str, Any]) -> Planned:
        ask = self.ask
        options = {"transport": ask.transport, **options, "step_shapes": ask.step_shapes}
        plan = make_plan(self.model.spec, self.world_size, self.device, **options)
        layout = build_layout(self.model.spec, plan)
        ledger = make_ledger(
            self.model,
            layout,
            ask.step_shapes,
            ask.hardware.memory_bytes,
            ask.context_tokens,
            self.overheads,
            self._draft_layout,
        )
        return Planned(plan, layout, ledger)


def _check_domain(ask: PlanAsk) -> None:
    ranks, most = ask.deployment.world_size, ask.hardware.max_domain
    if ranks > most:
        raise SpecError(
            f"{ranks} ranks cannot map each other's memory on {ask.hardware.name}: the largest shard group is {most}, "
            f"so the nearest is --world-size {most}"
        )


def _in_bfloat16(block: Block) -> Block:
    """The block before its weights were narrowed, as published crossovers have it."""
    gemms = tuple(replace(gemm, dtype="bfloat16") for gemm in block.gemms)
    size = sum(gemm.n * gemm.k * BF16_BYTES for gemm in gemms)
    return replace(block, name=f"{block.name} in bfloat16", gemms=gemms, num_bytes=size)
