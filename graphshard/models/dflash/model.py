"""A DFlash draft, cut into a segment at every large weight.

    embed | fc (layer 0 alone) q_proj k_proj v_proj o_proj gate_proj up_proj down_proj (each layer) | head

A step feeds a block `tokens` `[batch, t]` at `positions` `[batch, t]`, which count up: a text's last token, then the
mask token in the places to propose for. `logits` `[batch, t, vocab]` at a mask are of the token at that very place.
What the draft knows of the text before the block comes from its target: `features` `[batch, t, taps * hidden]` are the
target's residual streams at up to t tokens, and `feature_positions` `[batch, t]` say where those stand; a negative one
is none. Each layer makes keys and values of `hidden_norm(fc(features))` as it does of its own tokens, and keeps them in
its caches by position. A block attends to all that stands before it and to all of itself, not causally.

The block's own keys and values stand in the caches at its positions, where no later step sees them: by the time that a
block begins further on, features of all tokens before it have to have come, in any step up to that one, in any order.
Caches have one position more than the model: features that are none are written there, and nobody reads it.

Embedding and head are the target's (`ModelSpec.borrowed`). The shape of the network and the names of its weights are
those of the published drafts, dense decoder layers with norms on queries and keys. Source: DFlash (arXiv 2602.06036).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from graphshard.core.specs import BufferRole, BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.models.caches import DEFAULT_CACHE_LENGTH, check_caches, check_fits
from graphshard.models.config import RopeConfig
from graphshard.models.dflash.config import DFlashConfig
from graphshard.models.rope import rotate_, rotations
from graphshard.runtime.model import Segment, StepState

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""As the targets call them."""
Run = Callable[[StepState], None]


class DFlash:
    """A SegmentedModel."""

    def __init__(self, config: DFlashConfig, max_batch_size: int, cache_length: int = DEFAULT_CACHE_LENGTH) -> None:
        """Caches are `[max_batch_size, kv heads, cache_length + 1, head_dim]`, two a layer.

        Raises:
            SpecError: `cache_length` or `max_batch_size` is out of range.
        """
        check_caches("dflash", max_batch_size, cache_length, config.max_positions)
        self.config = config
        self.max_batch_size = max_batch_size
        self.cache_length = cache_length
        self._weights: dict[str, WeightSpec] = {}
        self._segments = (
            self._embed(),
            self._fc(),
            *(segment for layer in range(config.num_layers) for segment in self._layer(layer)),
            self._head(),
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of a step."""
        return self._segments

    def spec(self) -> ModelSpec:
        """Weights in the order in which a step first reads them."""
        borrowed = (EMBEDDING,) if self.config.tied_embeddings else (EMBEDDING, HEAD)
        segments = tuple(segment.spec for segment in self._segments)
        return ModelSpec("dflash", tuple(self._weights.values()), segments, borrowed=borrowed)

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Everything that lives longer than a segment.

        Raises:
            SpecError: `shape` does not fit the caches.
        """
        batch, t, c = shape.batch_size, shape.tokens_per_sequence, self.config
        check_fits("dflash", shape, self.max_batch_size, self.cache_length)
        n = batch * t

        def activation(name: str, *size: int) -> BufferSpec:
            return BufferSpec(name, size, c.dtype, "activation")

        def integers(name: str, role: BufferRole) -> BufferSpec:
            return BufferSpec(name, (batch, t), "int64", role)

        cache = (self.max_batch_size, c.num_kv_heads, self.cache_length + 1, c.head_dim)
        return (
            integers("tokens", "input"),
            integers("positions", "input"),
            BufferSpec("features", (batch, t, c.features_width), c.dtype, "input"),
            integers("feature_positions", "input"),
            BufferSpec("logits", (batch, t, c.vocab_size), c.dtype, "output"),
            activation("hidden", n, c.hidden_size),
            activation("normed", 2, n, c.hidden_size),  # of the block's tokens, and the context
            activation("queries", n, c.num_heads, c.head_dim),
            activation("keys", 2, n, c.num_kv_heads, c.head_dim),
            activation("mlp", n, c.intermediate_size),
            activation("cos", 2, n, 1, c.head_dim),
            activation("sin", 2, n, 1, c.head_dim),
            activation("mask", batch, 1, 1, self.cache_length),
            *(
                BufferSpec(f"layers.{layer}.{what}_cache", cache, c.dtype, "cache")
                for layer in range(c.num_layers)
                for what in ("key", "value")
            ),
        )

    def _weight(self, name: str, *shape: int) -> str:
        """Declare a weight (again, if it is tied) and return its name."""
        self._weights.setdefault(name, WeightSpec(name, shape, self.config.dtype))
        return name

    def _embed(self) -> Segment:
        c, length = self.config, self.cache_length
        rope = RopeConfig(theta=c.rope_theta)
        weight = self._weight(EMBEDDING, c.vocab_size, c.hidden_size)

        def run(state: StepState) -> None:
            positions = state.buffer("positions")
            torch.index_select(state.weight(weight), 0, state.buffer("tokens").view(-1), out=state.buffer("hidden"))
            for which, where in enumerate((positions, state.buffer("feature_positions"))):
                cos, sin = rotations(where.view(-1), c.head_dim, rope)
                state.buffer("cos")[which].copy_(cos[:, None])
                state.buffer("sin")[which].copy_(sin[:, None])
            is_beyond = torch.arange(length, device=positions.device) > positions[:, -1:]
            state.buffer("mask").zero_().masked_fill_(is_beyond[:, None, None], float("-inf"))

        return Segment(SegmentSpec("embed", None, (weight,)), run)

    def _fc(self) -> Segment:
        """The context, in the second half of `normed`. A part of layer 0: it is gathered with it."""
        c = self.config
        fc = self._weight("fc.weight", c.hidden_size, c.features_width)
        norm = self._weight("hidden_norm.weight", c.hidden_size)

        def run(state: StepState) -> None:
            context = torch.mm(state.buffer("features").flatten(0, 1), state.weight(fc).t())
            state.buffer("normed")[1].copy_(_rms_norm(context, state.weight(norm), c.norm_eps))

        return Segment(SegmentSpec("fc", 0, (fc, norm)), run)

    def _layer(self, layer: int) -> tuple[Segment, ...]:
        c, path = self.config, f"layers.{layer}"
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def weight(name: str, *shape: int) -> str:
            return self._weight(f"{path}.{name}.weight", *shape)

        def segment(name: str, reads: tuple[str, ...], run: Run) -> Segment:
            return Segment(SegmentSpec(name, layer, reads), run)

        input_norm = weight("input_layernorm", c.hidden_size)
        q, q_norm = weight("self_attn.q_proj", q_size, c.hidden_size), weight("self_attn.q_norm", c.head_dim)
        k, k_norm = weight("self_attn.k_proj", kv_size, c.hidden_size), weight("self_attn.k_norm", c.head_dim)
        v = weight("self_attn.v_proj", kv_size, c.hidden_size)
        o = weight("self_attn.o_proj", c.hidden_size, q_size)
        post_norm = weight("post_attention_layernorm", c.hidden_size)
        gate, up = (weight(f"mlp.{name}", c.intermediate_size, c.hidden_size) for name in ("gate_proj", "up_proj"))
        down = weight("mlp.down_proj", c.hidden_size, c.intermediate_size)
        return (
            segment("q_proj", (input_norm, q, q_norm), _queries(input_norm, q, q_norm, c.norm_eps)),
            segment("k_proj", (k, k_norm), _keys(k, k_norm, c.norm_eps)),
            segment("v_proj", (v,), _write_caches(layer, v)),
            segment("o_proj", (o,), _attend(layer, o)),
            segment("gate_proj", (post_norm, gate), _norm_then_linear(post_norm, gate, c.norm_eps, "mlp")),
            segment("up_proj", (up,), _swiglu(up)),
            segment("down_proj", (down,), lambda state: _add_linear(state, down, state.buffer("mlp"))),
        )

    def _head(self) -> Segment:
        c = self.config
        norm = self._weight("norm.weight", c.hidden_size)
        head = self._weight(EMBEDDING if c.tied_embeddings else HEAD, c.vocab_size, c.hidden_size)
        return Segment(SegmentSpec("head", None, (norm, head)), _norm_then_linear(norm, head, c.norm_eps, "logits"))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _add_linear(state: StepState, name: str, x: Tensor) -> None:
    """`hidden += x @ weight.T`: the residual is the gemm's accumulator."""
    state.buffer("hidden").addmm_(x, state.weight(name).t())


def _norm_then_linear(norm: str, name: str, eps: float, target: str) -> Run:
    def run(state: StepState) -> None:
        normed, hidden = state.buffer("normed")[0], state.buffer("hidden")
        normed.copy_(_rms_norm(hidden, state.weight(norm), eps))
        torch.mm(normed, state.weight(name).t(), out=state.buffer(target).view(len(hidden), -1))

    return run


def _queries(input_norm: str, q: str, q_norm: str, eps: float) -> Run:
    """Queries of the block; the context asks nothing."""
    project = _norm_then_linear(input_norm, q, eps, "queries")

    def run(state: StepState) -> None:
        project(state)
        queries = state.buffer("queries")
        queries.copy_(_rms_norm(queries, state.weight(q_norm), eps))
        rotate_(queries, state.buffer("cos")[0], state.buffer("sin")[0])

    return run


def _keys(k: str, k_norm: str, eps: float) -> Run:
    """Keys of the block and of the context, a gemm each: so either has the bits that it would have alone."""

    def run(state: StepState) -> None:
        for normed, keys, cos, sin in zip(*(state.buffer(n) for n in ("normed", "keys", "cos", "sin")), strict=True):
            torch.mm(normed, state.weight(k).t(), out=keys.flatten(1))
            keys.copy_(_rms_norm(keys, state.weight(k_norm), eps))
            rotate_(keys, cos, sin)

    return run


def _write_caches(layer: int, v: str) -> Run:
    """Values, and then keys and values to their positions; features that are none, to the one that nobody reads."""

    def run(state: StepState) -> None:
        keys, positions = state.buffer("keys"), state.buffer("positions")
        values = torch.empty_like(keys)
        for normed, made in zip(state.buffer("normed"), values, strict=True):
            torch.mm(normed, state.weight(v).t(), out=made.flatten(1))
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for what, new in (("key", keys), ("value", values)):
            cache = state.buffer(f"layers.{layer}.{what}_cache").transpose(1, 2)
            spare, known = cache.shape[1] - 1, state.buffer("feature_positions")
            for which, where in ((1, known.masked_fill(known < 0, spare)), (0, positions)):
                cache.index_put_((rows, where), new[which].view(*positions.shape, *new.shape[2:]))

    return run


def _attend(layer: int, o: str) -> Run:
    """Attention over the whole cache: the query heads that share a kv head stand where query positions would."""

    def run(state: StepState) -> None:
        queries, mask = state.buffer("queries"), state.buffer("mask")
        keys, values = (state.buffer(f"layers.{layer}.{what}_cache")[:, :, :-1] for what in ("key", "value"))
        (batch, t), (_, kv_heads, _, head_dim) = state.buffer("positions").shape, keys.shape
        grouped = queries.view(batch, t, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        attended = F.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, attn_mask=mask)
        attended = attended.view(batch, kv_heads, -1, t, head_dim).permute(0, 3, 1, 2, 4)
        _add_linear(state, o, attended.reshape(batch * t, -1))

    return run


def _swiglu(up: str) -> Run:
    """`mlp = silu(mlp) * up`."""

    def run(state: StepState) -> None:
        mlp = state.buffer("mlp")
        F.silu(mlp, inplace=True).mul_(torch.mm(state.buffer("normed")[0], state.weight(up).t()))

    return run
