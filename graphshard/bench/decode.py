"""Greedy decoding as a measurement: prompts in, tokens and a hash of every step's logits out.

All sequences of a batch take one token a step: the next of their own prompt while there is one, then their own last.
So prompts of any lengths share a step shape without padding, and two runs can be compared step by step, bit by bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from graphshard.bench.ranges import check_positions, check_tokens
from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.runtime.eager_step import EagerStep
from graphshard.runtime.runtime import Runtime

OnToken = Callable[[int, int], None]
"""Called with (sequence, token) as soon as a token is chosen."""


class Step(Protocol):
    """What decoding needs of a step: a `StepGraph`, or `EagerStep`."""

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """Static tensors to write: `tokens` and `positions`, [batch_size, 1]."""

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """Static tensors to read: `logits`, [batch_size, ..., vocabulary]."""

    def replay(self) -> None:
        """Run the step on what the inputs hold."""


@dataclass(frozen=True)
class Decoded:
    """What one run gave. Equal `hashes` mean logits equal bit for bit at every step."""

    tokens: list[list[int]]
    """Generated tokens, by sequence."""
    hashes: list[str]
    """Of the logits' bytes, by step."""
    step_s: list[float]
    """From before the inputs are written until the outputs may be read, by step; hashing is outside."""
    min_gap: float
    """The smallest distance between the two largest logits where a token was chosen: how near a tie came."""


def num_steps(prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
    """Steps that `decode` runs, which is also the cache length it needs."""
    return max(len(prompt) for prompt in prompts) + num_tokens - 1


def step_of(runtime: Runtime, shape: StepShape, run: str) -> Step:
    """The step of `shape`, captured or eager."""
    return EagerStep(runtime, shape) if run == "eager" else runtime.graph(shape.batch_size, shape.tokens_per_sequence)


def clear_state(runtime: Runtime, shape: StepShape) -> None:
    """Zero caches and outputs: a run that fails to write them cannot pass by what an earlier run left there."""
    for role in ("cache", "output", "activation"):
        for tensor in runtime.buffers(shape, role).values():
            tensor.zero_()


def cache_length(runtime: Runtime, shape: StepShape) -> int:
    """Positions that the runtime's caches have, as `models.llama` declares them."""
    return min(cache.shape[2] for cache in runtime.buffers(shape, "cache").values())


def decode(
    step: Step,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    on_token: OnToken | None = None,
    *,
    num_positions: int,
) -> Decoded:
    """Greedily generate `num_tokens` tokens for each prompt, all in one batch, from position 0.

    Raises:
        SpecError: a prompt is empty or has a token outside the vocabulary, there are not as many prompts as the step
            has sequences, or its caches have too few positions (`num_positions`).
    """
    tokens_in, positions, logits = step.inputs["tokens"], step.inputs["positions"], step.outputs["logits"]
    if len(prompts) != tokens_in.shape[0] or not all(prompts):
        raise SpecError(f"{len(prompts)} prompts for {tokens_in.shape[0]} sequences; each needs one, of >= 1 token")
    _check_ranges(prompts, num_tokens, logits.shape[-1], num_positions)
    tokens: list[list[int]] = [[] for _ in prompts]
    hashes, step_s, min_gap = [], [], float("inf")
    for position in range(num_steps(prompts, num_tokens)):
        feed = [
            prompt[position] if position < len(prompt) else made[position - len(prompt)]
            for prompt, made in zip(prompts, tokens, strict=True)
        ]
        begin = time.perf_counter()
        tokens_in.copy_(torch.tensor(feed, dtype=tokens_in.dtype).view_as(tokens_in))
        positions.fill_(position)
        step.replay()
        step_s.append(time.perf_counter() - begin)
        hashes.append(bytes_hash(logits))
        top = logits.reshape(len(prompts), -1, logits.shape[-1])[:, -1].topk(2)
        for i, prompt in enumerate(prompts):
            if position >= len(prompt) - 1:
                tokens[i].append(int(top.indices[i, 0]))
                if len(tokens[i]) <= num_tokens:
                    min_gap = min(min_gap, float(top.values[i, 0] - top.values[i, 1]))
                    if on_token is not None:
                        on_token(i, tokens[i][-1])
    return Decoded([made[:num_tokens] for made in tokens], hashes, step_s, min_gap)


def _check_ranges(prompts: Sequence[Sequence[int]], num_tokens: int, vocab_size: int, num_positions: int) -> None:
    """A captured step reads no value on the host, so what it cannot refuse is refused here."""
    if num_tokens < 1:
        raise SpecError(f"num_tokens is {num_tokens}: generate at least one")
    for index, prompt in enumerate(prompts):
        check_tokens(index, prompt, vocab_size)
    check_positions(num_steps(prompts, num_tokens), num_positions)


def bytes_hash(tensor: Tensor) -> str:
    """A hash of the tensor's bytes, whatever its dtype."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()[:32]


def first_difference(a: Sequence[str], b: Sequence[str]) -> int | None:
    """The first step at which two runs' hashes differ; None if they are equal throughout."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
