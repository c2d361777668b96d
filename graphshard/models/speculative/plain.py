"""Plain decoding along a text: what a model chooses that is fed one token a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from graphshard.models.speculative.steps import StepTensors, choices, write


class PlainStepLike(StepTensors, Protocol):
    """A step of one model, for one sequence and one token: a `StepGraph`, or an eager one."""

    def replay(self) -> None:
        """Run it on what the inputs hold."""


def follow(step: PlainStepLike, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[list[int], list[float]]:
    """What plain decoding, a token a step, chooses behind `prompt` and each beginning of `tokens`.

    Where a choice differs the text goes on with that of `tokens`, so what comes behind is compared as well.

    Returns:
        Its choices, as many as `tokens`; and by how much each one's logit exceeded the next largest.
    """
    text = [*prompt, *tokens]
    chosen, gaps = [], []
    for position in range(len(text) - 1):
        write(step.inputs["tokens"], [[text[position]]])
        write(step.inputs["positions"], [[position]])
        step.replay()
        if position >= len(prompt) - 1:
            [[token]], [[gap]] = choices(step.outputs["logits"])
            chosen.append(token)
            gaps.append(gap)
    return chosen, gaps
