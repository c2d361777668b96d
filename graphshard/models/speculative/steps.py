"""What decoding needs of a speculative step: `Runtime`s give it as `graphshard.speculate(...).graph(...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class StepTensors(Protocol):
    """Static tensors of one replay. Write the inputs before it runs, read the outputs after."""

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """By name."""

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """By name."""


class SpeculativeStepLike(Protocol):
    """One step: `propose(0)` to `propose(n - 1)` or none, `verify`, `commit`."""

    @property
    def target(self) -> StepTensors:
        """The target's: `tokens` and `positions` [batch, block] in, `logits` [batch, block, vocabulary] out.

        A model with a ring takes `accepted` [batch] too, before `commit`; one with taps gives `taps`.
        """

    def draft(self, i: int) -> StepTensors:
        """Those of the draft's replay `i`."""

    def propose(self, i: int = 0) -> None:
        """Run the draft's replay `i` on what its inputs hold."""

    def verify(self) -> None:
        """Run the target on what its inputs hold."""

    def commit(self) -> None:
        """Make the `accepted` tokens count, where the target has to be told."""


def write(target: Tensor, values: Sequence[Any]) -> None:
    """Put `values`, nested as `target` is, into a static input."""
    target.copy_(torch.tensor(values, dtype=target.dtype))


def choices(logits: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Of `logits` `[batch, t, vocabulary]`: the greedy token of each place, and by how much it exceeds the next."""
    top = logits.topk(2).values.double()
    return logits.argmax(dim=-1).tolist(), (top[..., 0] - top[..., 1]).tolist()
