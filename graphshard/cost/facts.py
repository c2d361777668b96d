"""What the cost model knows of a model beside its ModelSpec: gemms, caches, and which weights every rank holds.

A spec lists what *one rank* holds under a deployment (its slice, its experts), and so do these facts. Weights and
their facts have one order. A segment of the spec costs the sum of the facts of the weights that it reads, and the
attention of the layer whose `segment` it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec
from graphshard.cost.deployment import Deployment

Role = Literal[
    "attention", "mlp", "shared_expert", "latent", "routed_expert", "router", "norm", "embedding", "head", "other"
]
"""`other`: biases, convolutions, decays, scales, and whatever is no matrix of a gemm."""
Rows = Literal["rank", "routed", "none"]
"""The tokens that a weight's gemm sees: the rank's, those routed to its experts, or none (a lookup, a norm)."""
Split = Literal["column", "row", "none"]
"""How tensor parallelism cuts a weight: by out_features (no sum), by in_features (outputs are summed), or not."""
LayerKind = Literal["attention", "window", "mla", "kda", "ssm", "none"]
"""`attention`: keys and values of all tokens; `window`: of the last `window_tokens`; `kda` and `ssm`: a state."""


@dataclass(frozen=True, slots=True)
class WeightFact:
    """One weight of the spec: `num_matrices` gemms of `[rows, k] x [n, k].T` in `dtype`; n = k = 0 if it is none."""

    weight: str
    role: Role
    block: str
    """Weights of one block are used together: `layers.3.self_attn`, `layers.3.shared_experts`; tensor parallelism
    needs one gather and one reduction for all of a block."""
    n: int
    k: int
    dtype: str
    """Of its gemm's operands (torch's name); activations and results are bfloat16 where this is narrower."""
    rows: Rows
    split: Split
    is_replicated: bool
    """Whether all ranks of the group hold equal bytes of it *and* it is worth sharding."""
    reason: str
    """Why it is or is not, one sentence."""
    num_matrices: int = 1
    """Experts of this rank for routed ones."""
    num_experts: int = 0
    """Of the layer, over all ranks; 0 where nothing is routed."""
    top_k: int = 0
    """Experts that each token is sent to."""

    def num_rows(self, tokens_per_rank: int) -> int:
        """Rows of all its gemms together. Routed evenly, a rank's experts see as many tokens as the rank sends out."""
        if self.rows == "routed":
            return tokens_per_rank * self.top_k
        return tokens_per_rank if self.rows == "rank" else 0

    def matrices_read(self, tokens_per_rank: int, num_ranks: int) -> float:
        """Expected matrices that at least one of the tokens of `num_ranks` ranks is routed to: E (1 - (1 - k/E)^t)."""
        if self.rows != "routed":
            return float(self.num_matrices)
        tokens = tokens_per_rank * num_ranks
        return self.num_matrices * (1.0 - (1.0 - self.top_k / self.num_experts) ** tokens)


@dataclass(frozen=True, slots=True)
class LayerFact:
    """A layer's attention or recurrence, and what its experts send over the network. Bytes and flops of one rank."""

    layer: int
    """As in SegmentSpec.layer."""
    kind: LayerKind
    segment: str
    """Path of the segment that runs it: the one that reads the output projection."""
    kv_bytes_per_token: int = 0
    attention_flops: int = 0
    """For each pair of a query token and a cached token: scores and weighted sum, 2 flops a multiply-add."""
    window_tokens: int | None = None
    """Cached tokens at most; None: all."""
    state_bytes_per_request: int = 0
    """Recurrent state and the tail of its short convolution: constant in the context; a decode step reads and writes
    all of it."""
    state_flops_per_token: int = 0
    routed_bytes_per_token: int = 0
    """To all experts of one token, one way (bfloat16): top_k times the experts' input; as much comes back."""


@dataclass(frozen=True)
class ModelFacts:
    """All of it. `layers` has an entry for every layer of the spec, in order."""

    name: str
    weights: tuple[WeightFact, ...]
    layers: tuple[LayerFact, ...]
    hidden_size: int
    vocab_size: int
    activation_bytes_per_token: int
    """Peak of a step's activations without logits: residual, normed, and the widest gemm's input and output (`top_k`
    rows of those in routed experts)."""
    deployment: Deployment
    notes: tuple[str, ...] = ()
    """What of the model is left out, one sentence each."""

    def weight(self, name: str) -> WeightFact:
        """The fact of the weight called `name`; SpecError if there is none."""
        fact = self._by_name.get(name)
        if fact is None:
            raise SpecError(f"facts of {self.name} have no weight {name!r}")
        return fact

    def layer(self, layer: int) -> LayerFact:
        """The fact of layer `layer`; SpecError if there is none."""
        fact = self._by_layer.get(layer)
        if fact is None:
            raise SpecError(f"facts of {self.name} have no layer {layer}")
        return fact

    @property
    def num_layers(self) -> int:
        """Layers of the spec."""
        return len(self.layers)

    @property
    def replicated(self) -> tuple[str, ...]:
        """Names of the weights to shard, in order: what `make_plan` takes as `include`."""
        return tuple(fact.weight for fact in self.weights if fact.is_replicated)

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes of a request that do not grow with its context."""
        return sum(layer.state_bytes_per_request for layer in self.layers)

    def kv_bytes(self, context_tokens: int) -> int:
        """Bytes of one request's keys and values after `context_tokens`; windows keep their last tokens only."""
        return sum(layer.kv_bytes_per_token * _kept(layer, context_tokens) for layer in self.layers)

    def request_bytes(self, context_tokens: int) -> int:
        """Bytes of one request: `kv_bytes` and its states."""
        return self.kv_bytes(context_tokens) + self.state_bytes_per_request

    @cached_property
    def _by_name(self) -> dict[str, WeightFact]:
        return {fact.weight: fact for fact in self.weights}

    @cached_property
    def _by_layer(self) -> dict[int, LayerFact]:
        return {fact.layer: fact for fact in self.layers}


@dataclass(frozen=True)
class PlanningModel:
    """A model as planning sees it: what exists and what it costs; and its draft model, which has units of its own."""

    spec: ModelSpec
    facts: ModelFacts
    draft: PlanningModel | None = None

    def __post_init__(self) -> None:
        names = [weight.name for weight in self.spec.weights]
        facts = [fact.weight for fact in self.facts.weights]
        assert names == facts, f"{self.spec.name}: weights and facts differ, first at {_first_difference(names, facts)}"


def _kept(layer: LayerFact, context_tokens: int) -> int:
    return context_tokens if layer.window_tokens is None else min(context_tokens, layer.window_tokens)


def _first_difference(names: Sequence[str], facts: Sequence[str]) -> str:
    pairs = zip(names, facts, strict=False)
    return next((f"{name} and {fact}" for name, fact in pairs if name != fact), "their ends")
