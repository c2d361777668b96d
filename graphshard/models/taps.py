"""Taps: a model's residual stream after some of its layers, as an output that a draft reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphshard.core.errors import SpecError
from graphshard.core.specs import BufferSpec, StepShape
from graphshard.runtime.model import StepState


def check_taps(model: str, taps: Sequence[int], num_layers: int) -> None:
    """SpecError if one of `taps` is no layer of `model`, or is named twice."""
    wrong = [layer for layer in taps if not 0 <= layer < num_layers]
    if wrong or len(set(taps)) != len(taps):
        raise SpecError(f"{model}: taps {list(taps)} are not layers from 0 to {num_layers - 1}, each once")


def taps_buffer(taps: tuple[int, ...], shape: StepShape, hidden_size: int, dtype: str) -> tuple[BufferSpec, ...]:
    """The output `taps` `[batch, t, len(taps) * hidden]` of a model that has any."""
    if not taps:
        return ()
    size = (shape.batch_size, shape.tokens_per_sequence, len(taps) * hidden_size)
    return (BufferSpec("taps", size, dtype, "output"),)


def tapped(layer: int, taps: tuple[int, ...], run: Callable[[StepState], None]) -> Callable[[StepState], None]:
    """`run`, the last segment of `layer`; where that is tapped, a copy of `hidden` `[batch * t, hidden]` after it."""
    if layer not in taps:
        return run
    which = taps.index(layer)

    def run_and_tap(state: StepState) -> None:
        run(state)
        hidden = state.buffer("hidden")
        width = hidden.shape[-1]
        state.buffer("taps").flatten(0, 1)[:, which * width : (which + 1) * width].copy_(hidden)

    return run_and_tap
