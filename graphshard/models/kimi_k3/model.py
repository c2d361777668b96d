"""Kimi K3, cut into a segment at every large weight.

    embed_tokens | KDA: qkv f_a_b f_b g o,  MLA: qkv_a q_b kv_b g o | gate down w13 w2 up gate_up down | ... | lm_head

A step feeds `tokens` `[batch, t]` at `positions` `[batch, t]` and gives `logits` `[batch, t, vocab]` for every token.
Sequence i of the batch owns row i of the caches and states, which all step shapes share.

Positions count up from 0 in each row, also from one step to the next. A token at position 0 begins a sequence anew. A
negative position is no token: it changes neither caches nor states, and its logits are to be ignored; in a step's row
no token comes after it. So

- prompts of unequal length in one step: put -1 behind the shorter ones; or, as for llama, repeat the first token at
  position 0 before them;
- rows that sit out a step: -1 throughout. A row that holds anything else, as a captured step's spare ones may, loses
  its state.

For speculative decoding, a model with a `ring` can take back the last tokens of a step: see `ring.py`. `taps` are
layers whose results a draft reads: `taps` `[batch, t, number of taps * hidden]` holds the residual after each of them.

Tokens must be within `[0, vocab_size)`, and positions below `cache_length`; a captured step cannot refuse others.

The residual is a plain sum of what layers add. Published checkpoints attend over the residuals of earlier blocks
instead (`attn_res_block_size`); a config that asks for it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphshard.core.errors import SpecError
from graphshard.core.specs import BufferRole, BufferSpec, ModelSpec, StepShape, WeightSpec
from graphshard.models.caches import DEFAULT_CACHE_LENGTH, check_caches, check_fits
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.declare import Declarations, Work, normalise
from graphshard.models.kimi_k3.kda import declare_kda
from graphshard.models.kimi_k3.mla import declare_mla
from graphshard.models.kimi_k3.moe import declare_dense, declare_moe
from graphshard.models.kimi_k3.ring import Ring, check_ring
from graphshard.models.taps import check_taps, tapped, taps_buffer
from graphshard.runtime.model import Block, Segment, StepState


class KimiK3:
    """A SegmentedModel. Weights are named as servers keep them, see `models.specs.kimi_k3`."""

    def __init__(
        self,
        config: KimiK3ModelConfig,
        max_batch_size: int,
        cache_length: int = DEFAULT_CACHE_LENGTH,
        *,
        fused: bool = True,
        ring: int = 0,
        compact_ring: bool = False,
        taps: Sequence[int] = (),
        dual: bool = False,
    ) -> None:
        """Caches are for `max_batch_size` sequences of `cache_length` positions.

        Without `fused`, projections with one input are weights of their own (q, k and v; f_a and b; q_a and kv_a; gate
        and up), with the same bits. Routed experts are one weight for all either way.

        With a `ring`, steps of up to so many tokens change no KDA state: `commit_fold` does, by the tokens `accepted`.
        A `compact_ring` is smaller, and its fold reads f_b too.

        `dual` makes a block of each layer's shared experts: their gate and up are weights of their own then, fused or
        not, and their down_proj is stored [in, out], see `transposed`.

        Raises:
            SpecError: `cache_length`, `max_batch_size`, `ring` or `taps` are out of range.
        """
        check_caches("kimi_k3", max_batch_size, cache_length, config.max_positions)
        check_taps("kimi_k3", taps, config.sizes.num_layers)
        check_ring(ring, compact_ring)
        self.config = config
        self.max_batch_size = max_batch_size
        self.cache_length = cache_length
        self.is_fused = fused
        self.taps = tuple(taps)
        self.is_dual = dual
        self._declared = Declarations(config, fused)
        self._ring: Ring | None = None
        self._declare(ring, compact_ring)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of a step."""
        return tuple(self._declared.segments)

    @property
    def folds(self) -> tuple[Segment, ...]:
        """`commit_fold`, of a model with a ring."""
        return () if self._ring is None else (self._ring.fold(),)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The shared experts of each layer, of a `dual` model."""
        return tuple(self._declared.blocks)

    @property
    def transposed(self) -> frozenset[str]:
        """Weights that are stored [in, out], made of a published tensor that is [out, in]."""
        return frozenset(self._declared.transposed)

    @property
    def ring(self) -> int:
        """The most tokens of a step that can be taken back; 0: none."""
        return 0 if self._ring is None else self._ring.length

    @property
    def pieces(self) -> dict[str, tuple[WeightSpec, ...]]:
        """The published tensors of which each weight is made: one after the other, in bytes (or see `transposed`)."""
        return self._declared.pieces()

    def spec(self) -> ModelSpec:
        """Weights in the order in which a step first reads them, and which of them stay resident."""
        return self._declared.spec("kimi_k3", self.folds)

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Everything that lives longer than a segment.

        Raises:
            SpecError: `shape` does not fit the caches, or the ring.
        """
        batch, t = shape.batch_size, shape.tokens_per_sequence
        check_fits("kimi_k3", shape, self.max_batch_size, self.cache_length)
        if self._ring is not None and t > self._ring.length:
            raise SpecError(
                f"kimi_k3: step shape {shape} has {t} tokens a sequence, and the ring holds {self._ring.length}; make "
                f"the model with ring={t}, or take shorter steps"
            )

        def tokens(name: str, role: BufferRole, *, width: int = 0, dtype: str = "int64") -> BufferSpec:
            return BufferSpec(name, (batch, t, width) if width else (batch, t), dtype, role)

        s, dtype = self.config.sizes, self.config.dtype
        return (
            tokens("tokens", "input"),
            tokens("positions", "input"),
            *(() if self._ring is None else self._ring.inputs(shape)),
            tokens("logits", "output", width=s.vocab, dtype=dtype),
            *taps_buffer(self.taps, shape, s.hidden, dtype),
            tokens("mask", "activation", width=self.cache_length, dtype="float32"),
            *self._declared.buffers(shape),
        )

    def _declare(self, ring: int, compact_ring: bool) -> None:
        d, s = self._declared, self.config.sizes
        d.activation("hidden", s.hidden)
        d.activation("normed", s.hidden)
        d.at(None, "model")
        embedding = d.name_of("embed_tokens.weight")
        d.read("embed_tokens", "embed_tokens.weight", (s.vocab, s.hidden), self._embed(embedding))
        if ring:
            self._ring = Ring(d, ring, self.max_batch_size, is_compact=compact_ring)
        for layer in range(s.num_layers):
            self._declare_layer(layer)
            last = d.segments.pop()
            d.segments.append(Segment(last.spec, tapped(layer, self.taps, last.run)))
        d.at(None, "model")
        norm = d.small("norm.weight", (s.hidden,), "")
        d.at(None, "")
        d.read("lm_head", "lm_head.weight", (s.vocab, s.hidden), self._head(norm))

    def _declare_layer(self, layer: int) -> None:
        d, s = self._declared, self.config.sizes
        block = f"model.layers.{layer}"
        d.at(layer, block)
        input_norm = d.norm("input_layernorm.weight", s.hidden)
        d.at(layer, f"{block}.self_attn")
        if layer in s.mla_layers:
            declare_mla(d, input_norm, self.max_batch_size, self.cache_length)
        else:
            kda = declare_kda(d, input_norm, self.max_batch_size, is_kept=self._ring is not None)
            if self._ring is not None:
                self._ring.add(d, kda)
        d.at(layer, block)
        post_norm = d.norm("post_attention_layernorm.weight", s.hidden)
        if layer < s.dense_layers:
            declare_dense(d, layer, post_norm)
        else:
            declare_moe(d, layer, post_norm, is_dual=self.is_dual, after=tapped(layer, self.taps, lambda state: None))

    def _embed(self, weight: str) -> Work:
        length = self.cache_length

        def run(state: StepState) -> None:
            positions = state.buffer("positions")
            torch.index_select(state.weight(weight), 0, state.buffer("tokens").view(-1), out=state.buffer("hidden"))
            seen = positions.clamp(min=0)[:, :, None]  # what is no token sees one all the same: no row is all -inf
            is_hidden = torch.arange(length, device=positions.device) > seen
            state.buffer("mask").zero_().masked_fill_(is_hidden, float("-inf"))

        return run

    def _head(self, norm: str) -> Work:
        work, weight = normalise(norm, self.config.norm_eps), "lm_head.weight"

        def run(state: StepState) -> None:
            work(state)
            normed = state.buffer("normed")
            torch.mm(normed, state.weight(weight).t(), out=state.buffer("logits").view(len(normed), -1))

        return run
