"""The smallest thing that runs a segmented model: all weights resident, segments called in order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from graphshard.core.specs import StepShape
from graphshard.runtime.arena import Arena
from graphshard.runtime.model import SegmentedModel, StepState, folds_of
from graphshard.runtime.record import Tape, record


class Executor:
    """Steps of several shapes over one set of caches."""

    def __init__(self, model: SegmentedModel, weights: Mapping[str, Tensor]) -> None:
        self.model = model
        specs = model.spec()
        self.weights = {s.path: {name: weights[name] for name in s.reads} for s in (*specs.segments, *specs.folds)}
        self.states: dict[StepShape, StepState] = {}
        self.caches: dict[str, Tensor] = {}
        self.arena = Arena()

    def state(self, shape: StepShape) -> StepState:
        if shape not in self.states:
            buffers = {}
            for spec in self.model.buffers(shape):
                dtype = getattr(torch, spec.dtype)
                if spec.role == "cache":
                    cache = self.caches.setdefault(spec.name, torch.zeros(spec.shape, dtype=dtype))
                    buffers[spec.name] = cache[: shape.batch_size]
                else:
                    buffers[spec.name] = torch.zeros(spec.shape, dtype=dtype)
            self.states[shape] = StepState(shape, self.weights, buffers | self.more_buffers(shape))
        return self.states[shape]

    def more_buffers(self, shape: StepShape) -> dict[str, Tensor]:
        """What is no buffer of the model."""
        return {}

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits `[batch, t, vocab]` of one step."""
        state = self.state(StepShape(*tokens.shape))
        state.buffer("tokens").copy_(tokens)
        state.buffer("positions").copy_(positions)
        with torch.inference_mode():
            state.run(self.model.segments)
        return state.buffer("logits").clone()

    def fold(self, shape: StepShape, accepted: Tensor) -> None:
        """Run the model's folds after a step of `shape`."""
        state = self.state(shape)
        state.buffer("accepted").copy_(accepted)
        with torch.inference_mode():
            state.run(folds_of(self.model))

    def tapes(self, shape: StepShape, merged: bool = False) -> list[Tape]:
        """The step, recorded: a tape a segment, or one for all. Buffers are as before."""
        state = self.state(shape)
        tensors = [state.buffer(spec.name) for spec in self.model.buffers(shape)]
        saved = [tensor.clone() for tensor in tensors]
        pieces = [self.model.segments] if merged else [(segment,) for segment in self.model.segments]
        tapes = [record(lambda piece=piece: state.run(piece), self.arena) for piece in pieces]
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)
        return tapes


def greedy(executor: Executor, prompt: Tensor, num_tokens: int) -> Tensor:
    """The prompts `[batch, t]`, one token a step, and `num_tokens` more."""
    tokens = prompt.clone()
    for at in range(prompt.shape[1] + num_tokens - 1):
        logits = executor.step(tokens[:, at : at + 1], torch.full((len(prompt), 1), at))
        if at + 1 >= prompt.shape[1]:
            tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens
