"""Where a rank's memory goes under a plan, against holding every weight whole, and what requests gain by it.

    gross          = bytes of the sharded weights, which a replica holds whole
    net_of_ranks   = gross - chunks                            (a chunk is 1/N of a unit, with its padding)
    net_of_slots   = net_of_ranks - slots - draft slots
    freed          = net_of_slots - communicators - rounding
    used           = chunks + slots + resident                 (target and draft)
                     + graph pool + workspaces + communicators + rounding
    replicated     = gross + resident + graph pool + workspaces
    freed          = replicated - used                         (so the two sides agree to the byte)
    for_requests   = memory - used
    sequences      = for_requests // bytes of a request        (keys and values of the context, and the layers' states)
    gained         = sequences - what a replica has

All sizes are bytes of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graphshard.core.errors import SpecError
from graphshard.core.layout import Layout
from graphshard.core.sizes import align_up, format_bytes
from graphshard.core.specs import StepShape
from graphshard.cost.facts import ModelFacts, PlanningModel

LOGIT_BYTES = 4
"""float32."""


@dataclass(frozen=True, slots=True)
class Overheads:
    """What is reserved beside weights and requests. Defaults for CUDA; a measured value is better than any of them."""

    granularity_bytes: int = 2 * 2**20
    """Windows are multiples of it: 2 MiB for the driver's allocations."""
    workspace_bytes: int = 32 * 2**20
    """Of gemm libraries, for one compute stream: cuBLAS takes 32 MiB on Hopper and later."""
    communicator_bytes: int = 0
    """Of collectives that only the plan needs, all communicators together; 0 for `pull`, which has none."""
    pool_slack: float = 0.0
    """What fragmentation adds to the graphs' shared pool, as a share of it."""
    load_buffer_bytes: int = 4 * 8 * 2**20
    """Of loading: a stripe of 8 MiB for each of 4 threads, for recipes that compute; else bytes go to their place."""

    def __post_init__(self) -> None:
        for name in ("workspace_bytes", "communicator_bytes", "load_buffer_bytes"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name} is {getattr(self, name)}: it is a number of bytes, at least 0")
        if self.granularity_bytes < 1 or self.pool_slack < 0:
            raise SpecError(
                f"granularity_bytes is {self.granularity_bytes} and pool_slack {self.pool_slack}: "
                "they are at least 1 and 0"
            )


class LedgerRow(NamedTuple):
    """One line: what, how much, and the formula behind it. `unit` is `bytes`, `tokens` or `sequences`."""

    line: str
    value: int
    unit: str
    formula: str

    @property
    def text(self) -> str:
        """The value as people read it."""
        return format_bytes(self.value) if self.unit == "bytes" else f"{self.value:,}"


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one rank; derived lines are properties."""

    world_size: int
    memory_bytes: int
    """What the rank has for everything: the device's memory, or the share of it that the server may take."""
    context_tokens: int
    """Of one request, at the end of its life."""
    gross_bytes: int
    """`Layout.shardable_bytes` of target and draft."""
    chunk_bytes: int
    """`Layout.shard_bytes` of both."""
    slot_bytes: int
    """The target's."""
    draft_slot_bytes: int
    """The draft's own: its first gather runs outside the target's graph, so they share none."""
    resident_bytes: int
    """`Layout.resident_bytes` of both: weights that are kept whole."""
    graph_pool_bytes: int
    """The largest step shape's activations and logits; graphs share one pool."""
    workspace_bytes: int
    communicator_bytes: int
    rounding_bytes: int
    """Chunks, slots and resident weights are windows: each is rounded up to the granularity."""
    load_buffer_bytes: int
    """Stripes of the weights that a recipe computes while they are loaded, one for each thread."""
    largest_chunk_bytes: int
    request_kv_bytes: int
    """Keys and values of `context_tokens`, target and draft."""
    request_state_bytes: int
    """Recurrent states of one request (KDA, SSM), whatever its context."""

    @property
    def net_of_ranks_bytes(self) -> int:
        """Freed if gathered weights needed no room: gross - chunks."""
        return self.gross_bytes - self.chunk_bytes

    @property
    def net_of_slots_bytes(self) -> int:
        """Freed once units have slots: net of ranks - slots - draft slots."""
        return self.net_of_ranks_bytes - self.slot_bytes - self.draft_slot_bytes

    @property
    def freed_bytes(self) -> int:
        """What is left to requests: net of slots - communicators - rounding."""
        return self.net_of_slots_bytes - self.communicator_bytes - self.rounding_bytes

    @property
    def used_bytes(self) -> int:
        """Everything but requests, under the plan."""
        weights = self.chunk_bytes + self.slot_bytes + self.draft_slot_bytes + self.resident_bytes
        return weights + self.graph_pool_bytes + self.workspace_bytes + self.communicator_bytes + self.rounding_bytes

    @property
    def replicated_bytes(self) -> int:
        """Everything but requests, with every weight whole."""
        return self.gross_bytes + self.resident_bytes + self.graph_pool_bytes + self.workspace_bytes

    @property
    def load_peak_bytes(self) -> int:
        """While a checkpoint's byte ranges are read into chunks: the three windows, and the threads' stripes."""
        weights = self.chunk_bytes + self.slot_bytes + self.draft_slot_bytes + self.resident_bytes
        return weights + self.rounding_bytes + self.load_buffer_bytes

    @property
    def staged_bytes(self) -> int:
        """In the host's memory while an update replaces every weight: the new bytes of all that the rank keeps."""
        return self.chunk_bytes + self.resident_bytes

    @property
    def attach_peak_bytes(self) -> int:
        """While a loaded module is sharded unit by unit: all of it, the slots, and the first unit's chunk."""
        slots = self.slot_bytes + self.draft_slot_bytes
        return self.gross_bytes + self.resident_bytes + slots + self.largest_chunk_bytes + self.rounding_bytes

    @property
    def request_bytes(self) -> int:
        """One request of `context_tokens`: keys and values, and states."""
        return self.request_kv_bytes + self.request_state_bytes

    @property
    def for_requests_bytes(self) -> int:
        """Memory - used; below 0 where the weights alone do not fit."""
        return self.memory_bytes - self.used_bytes

    @property
    def sequences(self) -> int:
        """Requests of `context_tokens` that fit under the plan."""
        return self._sequences(self.for_requests_bytes)

    @property
    def replicated_sequences(self) -> int:
        """Requests of `context_tokens` that fit beside a replica."""
        return self._sequences(self.memory_bytes - self.replicated_bytes)

    @property
    def sequences_gained(self) -> int:
        """Under the plan, against a replica; a replica that does not fit has none."""
        return self.sequences - self.replicated_sequences

    @property
    def kv_tokens(self) -> int:
        """Tokens cached in requests of `context_tokens` each, under the plan; a last request may be shorter."""
        return self._tokens(self.for_requests_bytes)

    @property
    def replicated_kv_tokens(self) -> int:
        """The same, beside a replica."""
        return self._tokens(self.memory_bytes - self.replicated_bytes)

    @property
    def kv_tokens_gained(self) -> int:
        """Under the plan, against a replica."""
        return self.kv_tokens - self.replicated_kv_tokens

    def _sequences(self, num_bytes: int) -> int:
        return max(num_bytes, 0) // self.request_bytes if self.request_bytes else 0

    def _tokens(self, num_bytes: int) -> int:
        return max(num_bytes, 0) * self.context_tokens // self.request_bytes if self.request_bytes else 0

    def rows(self) -> tuple[LedgerRow, ...]:
        """Every line, in the order in which it is summed."""
        context = f"requests of {self.context_tokens} tokens"
        return (
            _row("gross", self.gross_bytes, "sharded weights, whole"),
            _row("chunks", self.chunk_bytes, f"1/{self.world_size} of each unit, with padding"),
            _row("net of ranks", self.net_of_ranks_bytes, "gross - chunks"),
            _row("slots", self.slot_bytes, "each as large as its largest unit"),
            _row("draft slots", self.draft_slot_bytes, "the draft's own"),
            _row("net of slots", self.net_of_slots_bytes, "net of ranks - slots - draft slots"),
            _row("communicators", self.communicator_bytes, "needed by the plan alone"),
            _row("rounding", self.rounding_bytes, "windows to the granularity"),
            _row("freed", self.freed_bytes, "net of slots - communicators - rounding"),
            _row("resident", self.resident_bytes, "weights kept whole"),
            _row("graph pool", self.graph_pool_bytes, "activations and logits of the largest step shape"),
            _row("workspaces", self.workspace_bytes, "of gemm libraries"),
            _row("used", self.used_bytes, "chunks + slots + resident + pool + workspaces + communicators + rounding"),
            _row("replicated", self.replicated_bytes, "gross + resident + pool + workspaces"),
            _row("load peak", self.load_peak_bytes, "windows and the threads' stripes, from a checkpoint"),
            _row("attach peak", self.attach_peak_bytes, "the whole module, slots and a chunk, when sharded in place"),
            _row("update", self.staged_bytes, "chunks + resident: the host stages them to replace all weights"),
            _row("memory", self.memory_bytes, "the limit"),
            _row("for requests", self.for_requests_bytes, "memory - used"),
            _row("state a request", self.request_state_bytes, "recurrent layers, whatever the context"),
            _row("a request", self.request_bytes, f"keys, values and states of {self.context_tokens} tokens"),
            LedgerRow("kv tokens", self.kv_tokens, "tokens", f"for requests / a token's share, {context}"),
            LedgerRow("kv tokens gained", self.kv_tokens_gained, "tokens", "against a replica"),
            LedgerRow("sequences", self.sequences, "sequences", f"for requests // a request, {context}"),
            LedgerRow("sequences gained", self.sequences_gained, "sequences", "against a replica"),
        )


def make_ledger(
    model: PlanningModel,
    layout: Layout,
    step_shapes: Sequence[StepShape],
    memory_bytes: int,
    context_tokens: int,
    overheads: Overheads | None = None,
    draft_layout: Layout | None = None,
) -> Ledger:
    """The account of one rank.

    Args:
        model: the target, and its draft model if it has one.
        layout: of the target's plan.
        step_shapes: what is captured; the largest sets the graphs' pool.
        memory_bytes: what the rank has for everything.
        context_tokens: of one request.
        overheads: what is reserved beside weights and requests; None: CUDA's defaults.
        draft_layout: of the draft's own plan; needed if `model` has a draft.

    Raises:
        SpecError: no step shape, no context, no memory, or a draft without a layout.
    """
    _check_request(model, memory_bytes, context_tokens, draft_layout)
    over = overheads or Overheads()
    facts = [model.facts, *([model.draft.facts] if model.draft else [])]
    layouts = [layout, *([draft_layout] if draft_layout else [])]
    return Ledger(
        world_size=layout.world_size,
        memory_bytes=memory_bytes,
        context_tokens=context_tokens,
        gross_bytes=sum(one.shardable_bytes for one in layouts),
        chunk_bytes=sum(one.shard_bytes for one in layouts),
        slot_bytes=layout.slot_bytes,
        draft_slot_bytes=draft_layout.slot_bytes if draft_layout else 0,
        resident_bytes=sum(one.resident_bytes for one in layouts),
        graph_pool_bytes=graph_pool_bytes(facts, step_shapes, over.pool_slack),
        workspace_bytes=over.workspace_bytes,
        communicator_bytes=over.communicator_bytes,
        rounding_bytes=sum(_rounding(one, over.granularity_bytes) for one in layouts),
        load_buffer_bytes=over.load_buffer_bytes,
        largest_chunk_bytes=max((unit.chunk_bytes for one in layouts for unit in one.units), default=0),
        request_kv_bytes=sum(one.kv_bytes(context_tokens) for one in facts),
        request_state_bytes=sum(one.state_bytes_per_request for one in facts),
    )


def _check_request(model: PlanningModel, memory_bytes: int, context_tokens: int, draft_layout: Layout | None) -> None:
    if context_tokens < 1 or memory_bytes < 1:
        raise SpecError(f"a ledger of {memory_bytes} B for contexts of {context_tokens} tokens: both start at 1")
    if (model.draft is None) != (draft_layout is None):
        missing = "layout" if draft_layout is None else "model"
        raise SpecError(f"a draft needs a model and a layout: there is no draft {missing}")


def graph_pool_bytes(facts: Sequence[ModelFacts], step_shapes: Sequence[StepShape], slack: float = 0.0) -> int:
    """Tokens * (activations + 4 * vocabulary) of the largest step shape, the largest model's; times 1 + slack."""
    if not step_shapes:
        raise SpecError("a ledger needs a step shape: the largest one sets the graphs' pool")
    tokens = max(shape.batch_size * shape.tokens_per_sequence for shape in step_shapes)
    a_token = max(one.activation_bytes_per_token + LOGIT_BYTES * one.vocab_size for one in facts)
    return round(tokens * a_token * (1.0 + slack))


class PartTotal(NamedTuple):
    """A kind of weights: how many layers have it, and its bytes."""

    part: str
    num_layers: int
    num_bytes: int


def shardable_by_part(model: PlanningModel) -> tuple[PartTotal, ...]:
    """Bytes of the weights to shard by what they are: the layers' attention by its kind (`kda`, `mla`, `attention`).

    `moe_periphery` is everything around routed experts: shared experts and latent projections; `mlp` is dense.
    """
    totals: dict[str, int] = {}
    layers: dict[str, set[int | None]] = {}
    where = {name: segment.layer for segment in model.spec.segments for name in segment.reads}
    for fact in model.facts.weights:
        if fact.is_replicated:
            layer = where.get(fact.weight)
            part = _part(model.facts, fact.role, layer)
            totals[part] = totals.get(part, 0) + model.spec.weight(fact.weight).num_bytes
            layers.setdefault(part, set()).add(layer)
    return tuple(PartTotal(part, len(layers[part]), totals[part]) for part in totals)


def _part(facts: ModelFacts, role: str, layer: int | None) -> str:
    if role in ("shared_expert", "latent"):
        return "moe_periphery"
    if role == "attention" and layer is not None:
        kind = facts.layer(layer).kind
        return "attention" if kind in ("window", "none") else kind
    return role


def _rounding(layout: Layout, granularity: int) -> int:
    areas = (layout.shard_bytes, layout.slot_bytes, layout.resident_bytes)
    return sum(align_up(area, granularity) - area for area in areas)


def _row(line: str, value: int, formula: str) -> LedgerRow:
    return LedgerRow(line, value, "bytes", formula)
