"""The Llama family, cut into a segment at every large weight.

    embed | q_proj k_proj v_proj o_proj gate_proj up_proj down_proj (each layer) | head

A step feeds `tokens` `[batch, t]` at `positions` `[batch, t]` and gives `logits` `[batch, t, vocab]` for every token.
Sequence i of the batch owns row i of the KV caches, which all step shapes share; attention always covers the whole
cache under a mask made from the positions, so what lies beyond a position has no influence.

Tokens must be within `[0, vocab_size)` and positions within `[0, cache_length)`. A captured step reads no value on the
host, so nothing in it can refuse others; whoever writes the inputs checks them first, as `bench.decode` does.

With `dual`, each layer's MLP is a block (`ModelSpec.blocks`), which may be gathered or computed in slices; down_proj is
then stored [in, out], in every mode, and `recipes` make it of the checkpoint's.

Prompts of unequal length in one step: repeat the first token at position 0 on the left. It writes the same key and
value again, so the cache is right; its own logits are to be ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from graphshard.core.specs import BufferRole, BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.load.recipe import Read, Recipe, Transpose
from graphshard.models.blocks import MlpBlock, add_product
from graphshard.models.caches import DEFAULT_CACHE_LENGTH, check_caches, check_fits
from graphshard.models.config import LlamaConfig, load_llama_config
from graphshard.models.rope import rotate_, rotations
from graphshard.models.taps import check_taps, tapped, taps_buffer
from graphshard.runtime.model import Block, Segment, StepState


class Llama:
    """A SegmentedModel; weights are named as in Hugging Face's checkpoints."""

    def __init__(
        self,
        config: LlamaConfig,
        max_batch_size: int,
        cache_length: int = DEFAULT_CACHE_LENGTH,
        *,
        taps: Sequence[int] = (),
        dual: bool = False,
    ) -> None:
        """Caches are `[max_batch_size, kv heads, cache_length, head_dim]`, two a layer.

        `taps` are layers after which the residual stream is an output too, side by side in `taps`
        `[batch, t, len(taps) * hidden]`: what a draft may want to see. `dual` makes a block of each MLP, and turns the
        orientation in which down_proj is stored: load it by `recipes`.

        Raises:
            SpecError: `cache_length` or `max_batch_size` is out of range, or a tap is no layer.
        """
        check_caches("llama", max_batch_size, cache_length, config.max_positions)
        check_taps("llama", taps, config.num_layers)
        self.config = config
        self.max_batch_size = max_batch_size
        self.cache_length = cache_length
        self.taps = tuple(taps)
        self.is_dual = dual
        self._weights: dict[str, WeightSpec] = {}
        self._blocks: list[Block] = []
        segments = [self._embed()]
        for layer in range(config.num_layers):
            segments += self._layer(layer)
            if dual:
                self._blocks.append(self._block(layer, end=len(segments)))
        self._segments = (*segments, self._head())

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of a step."""
        return self._segments

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Each layer's MLP, of a `dual` model."""
        return tuple(self._blocks)

    @property
    def recipes(self) -> dict[str, Recipe]:
        """How weights are made that are not stored as a checkpoint has them."""
        return {down: Transpose(Read(down)) for block in self._blocks for down in block.spec.rows}

    def spec(self) -> ModelSpec:
        """Weights in the order in which a step first reads them."""
        segments = tuple(segment.spec for segment in self._segments)
        blocks = tuple(block.spec for block in self._blocks)
        return ModelSpec("llama", tuple(self._weights.values()), segments, blocks=blocks)

    @property
    def redundant_tensors(self) -> tuple[str, ...]:
        """Patterns of tensors that checkpoints of this model may hold and that no weight is made of.

        A tied head that is stored a second time, and frequencies that are computed here.
        """
        tied = ("lm_head.weight",) if self.config.tied_embeddings else ()
        return (*tied, "*rotary_emb.inv_freq")

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Everything that lives longer than a segment.

        Raises:
            SpecError: `shape` does not fit the caches.
        """
        batch, t, c = shape.batch_size, shape.tokens_per_sequence, self.config
        check_fits("llama", shape, self.max_batch_size, self.cache_length)
        n, group = batch * t, c.num_heads // c.num_kv_heads

        def activation(name: str, *size: int) -> BufferSpec:
            return BufferSpec(name, size, c.dtype, "activation")

        def tokens(name: str, role: BufferRole) -> BufferSpec:
            return BufferSpec(name, (batch, t), "int64", role)

        cache = (self.max_batch_size, c.num_kv_heads, self.cache_length, c.head_dim)
        return (
            tokens("tokens", "input"),
            tokens("positions", "input"),
            BufferSpec("logits", (batch, t, c.vocab_size), c.dtype, "output"),
            activation("hidden", n, c.hidden_size),
            activation("normed", n, c.hidden_size),
            activation("queries", n, c.num_heads, c.head_dim),
            activation("keys", n, c.num_kv_heads, c.head_dim),
            activation("mlp", n, c.intermediate_size),
            activation("cos", n, 1, c.head_dim),
            activation("sin", n, 1, c.head_dim),
            activation("mask", batch, 1, group * t, self.cache_length),
            *taps_buffer(self.taps, shape, c.hidden_size, c.dtype),
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

    def _linear(self, name: str, out_features: int, in_features: int, has_bias: bool) -> tuple[str, ...]:
        """Names of a linear's weight and, if it has one, bias."""
        weight = self._weight(f"{name}.weight", out_features, in_features)
        return (weight, self._weight(f"{name}.bias", out_features)) if has_bias else (weight,)

    def _embed(self) -> Segment:
        c, length = self.config, self.cache_length
        weight = self._weight("model.embed_tokens.weight", c.vocab_size, c.hidden_size)

        def run(state: StepState) -> None:
            positions = state.buffer("positions")
            torch.index_select(state.weight(weight), 0, state.buffer("tokens").view(-1), out=state.buffer("hidden"))
            cos, sin = rotations(positions.view(-1), c.head_dim, c.rope)
            state.buffer("cos").copy_(cos[:, None])
            state.buffer("sin").copy_(sin[:, None])
            is_hidden = torch.arange(length, device=positions.device) > positions[:, :, None]
            mask = state.buffer("mask").view(len(positions), -1, *is_hidden.shape[1:])  # [batch, group, t, length]
            mask.zero_().masked_fill_(is_hidden[:, None], float("-inf"))

        return Segment(SegmentSpec("embed", None, (weight,)), run)

    def _mlp(self, layer: int) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """Names of a layer's second norm, gate, up and down, each with its bias if it has one."""
        c, path = self.config, f"model.layers.{layer}"
        inner, outer, bias = c.intermediate_size, c.hidden_size, c.mlp_bias
        norm = self._weight(f"{path}.post_attention_layernorm.weight", outer)
        gate, up = (self._linear(f"{path}.mlp.{name}", inner, outer, bias) for name in ("gate_proj", "up_proj"))
        if not self.is_dual:
            return norm, gate, up, self._linear(f"{path}.mlp.down_proj", outer, inner, bias)
        down = self._weight(f"{path}.mlp.down_proj.weight", inner, outer)
        return norm, gate, up, (down, self._weight(f"{path}.mlp.down_proj.bias", outer)) if bias else (down,)

    def _layer(self, layer: int) -> tuple[Segment, ...]:
        c, path = self.config, f"model.layers.{layer}"
        q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

        def attention(name: str, out_features: int, in_features: int) -> tuple[str, ...]:
            return self._linear(f"{path}.self_attn.{name}", out_features, in_features, c.attention_bias)

        def segment(name: str, reads: tuple[str, ...], run: Callable[[StepState], None]) -> Segment:
            return Segment(SegmentSpec(name, layer, reads), run)

        input_norm = self._weight(f"{path}.input_layernorm.weight", c.hidden_size)
        q, k = attention("q_proj", q_size, c.hidden_size), attention("k_proj", kv_size, c.hidden_size)
        v, o = attention("v_proj", kv_size, c.hidden_size), attention("o_proj", c.hidden_size, q_size)
        post_norm, gate, up, down = self._mlp(layer)
        add_mlp = _add_dual_mlp(down) if self.is_dual else _add_mlp(down)
        return (
            segment("q_proj", (input_norm, *q), _norm_then_linear(input_norm, q, c.norm_eps, "queries")),
            segment("k_proj", k, lambda state: _linear(state, k, "normed", state.buffer("keys").flatten(1))),
            segment("v_proj", v, _write_cache(layer, v)),
            segment("o_proj", o, _attend(layer, o)),
            segment("gate_proj", (post_norm, *gate), _norm_then_linear(post_norm, gate, c.norm_eps, "mlp")),
            segment("up_proj", up, lambda state: _swiglu(state, up, "normed", state.buffer("mlp"))),
            segment("down_proj", down, tapped(layer, self.taps, add_mlp)),
        )

    def _block(self, layer: int, end: int) -> Block:
        """The MLP whose last segment ends at `end`. In slices, `mlp` holds fewer features of more tokens."""
        norm, gate, up, down = self._mlp(layer)
        eps = self.config.norm_eps

        def activated(state: StepState, gathered: Tensor) -> Tensor:
            mlp = state.buffer("mlp").view(len(gathered), -1)
            _linear(state, gate, "tp.gathered", mlp)
            _swiglu(state, up, "tp.gathered", mlp)
            return mlp

        def add_bias(state: StepState) -> None:
            for bias in down[1:]:
                state.buffer("hidden").add_(state.weight(bias))

        return MlpBlock(
            name=f"layers.{layer}.mlp",
            layer=layer,
            begin=end - 3,
            end=end,
            label="mlp_",
            columns=(*gate, *up),
            down=down[0],
            hidden_size=self.config.hidden_size,
            dtype=self.config.dtype,
            source=lambda state: _normed(state, norm, eps),
            source_reads=(norm,),
            activated=activated,
            after=tapped(layer, self.taps, add_bias),
            after_reads=down[1:],
        ).block()

    def _head(self) -> Segment:
        c = self.config
        norm = self._weight("model.norm.weight", c.hidden_size)
        name = "model.embed_tokens.weight" if c.tied_embeddings else "lm_head.weight"
        head = (self._weight(name, c.vocab_size, c.hidden_size),)
        return Segment(SegmentSpec("head", None, (norm, *head)), _norm_then_linear(norm, head, c.norm_eps, "logits"))


def load_llama(
    path: str | Path, max_batch_size: int, cache_length: int = DEFAULT_CACHE_LENGTH, *, dual: bool = False
) -> Llama:
    """The model whose config.json lies in the folder `path`; its weights are not read (see `Llama.recipes`).

    Raises:
        SpecError: the config is missing, malformed or not supported.
    """
    return Llama(load_llama_config(Path(path)), max_batch_size, cache_length, dual=dual)


def random_llama(
    config: LlamaConfig,
    seed: int = 0,
    max_batch_size: int = 4,
    cache_length: int = DEFAULT_CACHE_LENGTH,
    *,
    dual: bool = False,
) -> tuple[Llama, dict[str, Tensor]]:
    """A model and random weights for it, the same for the same seed on every machine, `dual` or not."""
    model = Llama(config, max_batch_size, cache_length, dual=dual)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for spec in Llama(config, 1, cache_length).spec().weights:
        values = torch.randn(spec.shape, generator=generator)
        is_norm = spec.name.endswith("norm.weight")
        scaled = 1 + values / 10 if is_norm else values / spec.shape[-1] ** 0.5
        weights[spec.name] = scaled.to(getattr(torch, spec.dtype))
    return model, weights | {name: weights[name].t().contiguous() for name in model.recipes}


def _linear(state: StepState, names: tuple[str, ...], source: str, out: Tensor) -> None:
    """`out = source @ weight.T + bias`; `names` are the weight's and, if there is one, the bias's."""
    weight = state.weight(names[0]).t()
    if len(names) == 1:
        torch.mm(state.buffer(source), weight, out=out)
    else:
        torch.addmm(state.weight(names[1]), state.buffer(source), weight, out=out)


def _add_linear(state: StepState, names: tuple[str, ...], x: Tensor) -> None:
    """`hidden += x @ weight.T + bias`: the residual is the gemm's accumulator."""
    hidden = state.buffer("hidden").addmm_(x, state.weight(names[0]).t())
    if len(names) == 2:
        hidden.add_(state.weight(names[1]))


def _add_mlp(names: tuple[str, ...]) -> Callable[[StepState], None]:
    return lambda state: _add_linear(state, names, state.buffer("mlp"))


def _add_dual_mlp(names: tuple[str, ...]) -> Callable[[StepState], None]:
    """The same where the weight is [in, out]."""

    def run(state: StepState) -> None:
        add_product(state, state.buffer("mlp"), names[0])
        for bias in names[1:]:
            state.buffer("hidden").add_(state.weight(bias))

    return run


def _norm_then_linear(norm: str, names: tuple[str, ...], eps: float, target: str) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        normed = state.buffer("normed").copy_(_normed(state, norm, eps))
        _linear(state, names, "normed", state.buffer(target).view(len(normed), -1))

    return run


def _normed(state: StepState, norm: str, eps: float) -> Tensor:
    hidden = state.buffer("hidden")
    return F.rms_norm(hidden, hidden.shape[-1:], state.weight(norm), eps)


def _write_cache(layer: int, names: tuple[str, ...]) -> Callable[[StepState], None]:
    """Values; then queries and keys are turned, and keys and values put at their positions."""

    def run(state: StepState) -> None:
        positions, keys = state.buffer("positions"), state.buffer("keys")
        values = torch.empty_like(keys)
        _linear(state, names, "normed", values.flatten(1))
        rotate_(state.buffer("queries"), state.buffer("cos"), state.buffer("sin"))
        rotate_(keys, state.buffer("cos"), state.buffer("sin"))
        where = (torch.arange(len(positions), device=positions.device)[:, None], positions)
        for what, new in (("key", keys), ("value", values)):
            cache = state.buffer(f"layers.{layer}.{what}_cache").transpose(1, 2)
            cache.index_put_(where, new.view(*positions.shape, *new.shape[1:]))

    return run


def _attend(layer: int, names: tuple[str, ...]) -> Callable[[StepState], None]:
    """Attention over the whole cache: the query heads that share a kv head stand where query positions would."""

    def run(state: StepState) -> None:
        queries, mask = state.buffer("queries"), state.buffer("mask")
        keys, values = (state.buffer(f"layers.{layer}.{what}_cache") for what in ("key", "value"))
        (batch, t), (_, kv_heads, _, head_dim) = state.buffer("positions").shape, keys.shape
        grouped = queries.view(batch, t, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
        attended = F.scaled_dot_product_attention(grouped.flatten(2, 3), keys, values, attn_mask=mask)
        attended = attended.view(batch, kv_heads, -1, t, head_dim).permute(0, 3, 1, 2, 4)
        _add_linear(state, names, attended.reshape(batch * t, -1))

    return run


def _swiglu(state: StepState, names: tuple[str, ...], source: str, mlp: Tensor) -> None:
    """`mlp = silu(mlp) * up(source)`."""
    up = torch.empty_like(mlp)
    _linear(state, names, source, up)
    F.silu(mlp, inplace=True).mul_(up)
