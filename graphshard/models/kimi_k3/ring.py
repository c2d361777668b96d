"""A step whose tokens may be taken back: KDA states stay as they are, records of the tokens wait for a fold.

With a ring of R tokens a KDA layer's state and tail are a *checkpoint*. A step of t <= R tokens computes on a copy of
it, and leaves of each token what it would have changed the checkpoint by, in caches `[max_batch, R, ...]`:

- inputs of the convolution, those of the decay (what f_b gives) and of beta: the fold reads small weights alone; or
- with `is_compact`, what f_a gives in the place of what f_b gives, `kda_head` numbers for `kda_heads * kda_head`. The
  fold then reads f_b of all layers, which therefore stays resident (the plan says why).

The fold `commit_fold` applies the first `accepted[i]` tokens of the latest step to row i: state and tail have then the
bits that a model without a ring has after a step of this shape in which the others are no tokens (negative positions),
since it runs the same functions on the same buffers. Where `accepted` is 0, nothing changes, whatever the step held. A
record counts once: folding again does nothing. A fold comes before the next step, of whichever shape, over its rows.

Attention needs no such thing: what a rejected token left in an MLA cache lies beyond the sequence, is masked, and is
overwritten by the token that comes there.

Source: ReplaySSM, as described for speculative decoding of Kimi K3: one checkpoint, and a ring of inputs per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.sequence import COMMIT_FOLD
from graphshard.core.specs import BufferSpec, SegmentSpec, StepShape
from graphshard.models.kimi_k3.declare import Declarations
from graphshard.models.kimi_k3.kda import KdaLayer, begins_anew, convolve, delta_of, low_rank_decay, set_decay
from graphshard.runtime.model import Segment, StepState


@dataclass(frozen=True, slots=True)
class _Record:
    """A cache `[max_batch, ring, width]` that holds, of each token, the columns of an activation from `begin` on."""

    activation: str
    begin: int
    cache: str

    def keep(self, state: StepState) -> None:
        activation, cache = self._pair(state)
        cache.copy_(activation)

    def bring_back(self, state: StepState, is_ignored: Tensor) -> None:
        """Zero for what is ignored: it may hold anything."""
        activation, cache = self._pair(state)
        activation.copy_(cache).masked_fill_(is_ignored, 0)

    def _pair(self, state: StepState) -> tuple[Tensor, Tensor]:
        batch, t = state.shape.batch_size, state.shape.tokens_per_sequence
        activation = state.buffer(self.activation).view(batch, t, -1)
        return activation[..., self.begin :], state.buffer(self.cache)[:, :t]


class Ring:
    """The records of a model's KDA layers, and their fold."""

    def __init__(self, d: Declarations, length: int, max_batch_size: int, *, is_compact: bool) -> None:
        """For steps of up to `length` tokens. The segment last declared in `d` keeps the step's positions."""
        self.length = length
        self._is_compact = is_compact
        self._max_batch_size = max_batch_size
        self._layers: list[tuple[KdaLayer, tuple[_Record, ...]]] = []
        self._positions = d.cache("ring_positions", (max_batch_size, length), "int64")
        d.then(self._keep_positions)

    def add(self, d: Declarations, layer: KdaLayer) -> None:
        """Keep the tokens of `layer`; the segment last declared in `d` is its last, and does it."""
        s, wide = layer.config.sizes, layer.config.kda_width
        columns = {"kda_qkv": (0, 3 * wide)}
        if self._is_compact:
            columns["kda_f_a_b"] = (0, s.kda_head + s.kda_heads)
        else:
            columns |= {"kda_f": (0, wide), "kda_f_a_b": (s.kda_head, s.kda_heads)}
        records = tuple(
            _Record(name, begin, d.cache(f"ring_{name}", (self._max_batch_size, self.length, width)))
            for name, (begin, width) in columns.items()
        )
        self._layers.append((layer, records))

        def keep(state: StepState) -> None:
            for record in records:
                record.keep(state)

        d.then(keep)

    def fold(self) -> Segment:
        """The segment that applies what was accepted, for all layers."""
        reads = []
        for layer, _ in self._layers:
            reads += [*layer.convs, *([layer.f_b] if self._is_compact else []), layer.a_log, layer.dt_bias]
        return Segment(SegmentSpec(COMMIT_FOLD, None, tuple(reads)), self._run)

    def inputs(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """What the fold is told: how many of the step's tokens count in each row."""
        return (BufferSpec("accepted", (shape.batch_size,), "int64", "input"),)

    def _keep_positions(self, state: StepState) -> None:
        state.buffer(self._positions)[:, : state.shape.tokens_per_sequence].copy_(state.buffer("positions"))

    def _run(self, state: StepState) -> None:
        t = state.shape.tokens_per_sequence
        kept = state.buffer(self._positions)[:, :t]
        accepted = state.buffer("accepted")[:, None]
        positions = kept.masked_fill(torch.arange(t, device=kept.device) >= accepted, -1)
        is_ignored = (positions < 0)[..., None]
        is_changed = is_ignored.logical_not().any(dim=1)[..., None, None]
        for layer, records in self._layers:
            for record in records:
                record.bring_back(state, is_ignored)
            if self._is_compact:
                low_rank = low_rank_decay(layer.config)(state)
                torch.mm(low_rank, state.weight(layer.f_b).t(), out=state.buffer("kda_f"))
            _apply(state, layer, positions, is_changed)
        kept.fill_(-1)


def check_ring(length: int, is_compact: bool) -> None:
    """SpecError unless there is such a ring; length 0 is none."""
    if length < 0 or (is_compact and not length):
        raise SpecError(
            f"kimi_k3: ring is {length}, with compact_ring={is_compact}: a ring is as long as the longest step that "
            "may be taken back, at least 1 token; 0 is none, and cannot be compact"
        )


def _apply(state: StepState, layer: KdaLayer, positions: Tensor, is_changed: Tensor) -> None:
    """Take the state and the tail of `layer` past the tokens at `positions`."""
    convolve(state, layer, positions, is_kept=False)
    set_decay(state, layer, positions)
    delta, memory = delta_of(state, layer), state.buffer(layer.memory)
    after = memory.masked_fill(begins_anew(positions), 0)
    for at in range(positions.shape[1]):
        delta.apply(after, at)
    torch.where(is_changed, after, memory, out=memory)  # a row without a token keeps its zeros' signs, and its NaNs
