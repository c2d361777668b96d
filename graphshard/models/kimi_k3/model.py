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

Tokens must be within `[0, vocab_size)`, and positions below `cache_length`; a captured step cannot refuse others.

The residual is a plain sum of what layers add. Published checkpoints attend over the residuals of earlier blocks
instead (`attn_res_block_size`); a config that asks for it is refused.
"""

from __future__ import annotations

import torch

from graphshard.core.errors import SpecError
from graphshard.core.specs import BufferRole, BufferSpec, ModelSpec, StepShape, WeightSpec
from graphshard.models.config import DEFAULT_CACHE_LENGTH
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.declare import Declarations, Work, normalise
from graphshard.models.kimi_k3.kda import declare_kda
from graphshard.models.kimi_k3.mla import declare_mla
from graphshard.models.kimi_k3.moe import declare_dense, declare_moe
from graphshard.runtime.model import Segment, StepState


class KimiK3:
    """A SegmentedModel. Weights are named as servers keep them, see `models.specs.kimi_k3`."""

    def __init__(
        self,
        config: KimiK3ModelConfig,
        max_batch_size: int,
        cache_length: int = DEFAULT_CACHE_LENGTH,
        *,
        fused: bool = True,
    ) -> None:
        """Caches are for `max_batch_size` sequences of `cache_length` positions.

        Without `fused`, projections with one input are weights of their own (q, k and v; f_a and b; q_a and kv_a; gate
        and up), with the same bits. Routed experts are one weight for all either way.

        Raises:
            SpecError: `cache_length` or `max_batch_size` is out of range.
        """
        if not 1 <= cache_length <= config.max_positions:
            raise SpecError(
                f"kimi_k3: cache_length {cache_length} is not within 1 and the model's {config.max_positions} positions"
            )
        if max_batch_size < 1:
            raise SpecError(f"kimi_k3: max_batch_size is {max_batch_size}, must be at least 1")
        self.config = config
        self.max_batch_size = max_batch_size
        self.cache_length = cache_length
        self.is_fused = fused
        self._declared = Declarations(config, fused)
        self._declare()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """In the order of a step."""
        return tuple(self._declared.segments)

    @property
    def pieces(self) -> dict[str, tuple[WeightSpec, ...]]:
        """The published tensors of which each weight is made: one after the other, in bytes."""
        return self._declared.pieces()

    def spec(self) -> ModelSpec:
        """Weights in the order in which a step first reads them, and which of them stay resident."""
        return self._declared.spec("kimi_k3")

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """Everything that lives longer than a segment.

        Raises:
            SpecError: `shape` does not fit the caches.
        """
        batch, t = shape.batch_size, shape.tokens_per_sequence
        if batch > self.max_batch_size or t > self.cache_length:
            raise SpecError(
                f"kimi_k3: step shape {shape} does not fit {self.max_batch_size} sequences of {self.cache_length} "
                "positions; make the model with a larger max_batch_size or cache_length"
            )

        def tokens(name: str, role: BufferRole) -> BufferSpec:
            return BufferSpec(name, (batch, t), "int64", role)

        return (
            tokens("tokens", "input"),
            tokens("positions", "input"),
            BufferSpec("logits", (batch, t, self.config.sizes.vocab), self.config.dtype, "output"),
            BufferSpec("mask", (batch, t, self.cache_length), "float32", "activation"),
            *self._declared.buffers(shape),
        )

    def _declare(self) -> None:
        d, s = self._declared, self.config.sizes
        d.activation("hidden", s.hidden)
        d.activation("normed", s.hidden)
        d.at(None, "model")
        embedding = d.name_of("embed_tokens.weight")
        d.read("embed_tokens", "embed_tokens.weight", (s.vocab, s.hidden), self._embed(embedding))
        for layer in range(s.num_layers):
            self._declare_layer(layer)
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
            declare_kda(d, input_norm, self.max_batch_size)
        d.at(layer, block)
        post_norm = d.norm("post_attention_layernorm.weight", s.hidden)
        if layer < s.dense_layers:
            declare_dense(d, layer, post_norm)
        else:
            declare_moe(d, layer, post_norm)

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
