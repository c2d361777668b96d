"""A server's own speculative loop: `torchrun --nproc-per-node 2 docs/examples/speculative_loop.py`."""

from typing import Any

import torch

import graphshard
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.models.speculative.truncated import TruncatedLlama

TINY = LlamaConfig(96, 256, 256, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=64)


def serve(spec: graphshard.Speculation, length: int, guesses: bool) -> tuple[list[int], int]:
    """A text of `length` tokens, one or two a step, and its steps. Ranks may serve texts of different lengths."""
    step, text, num_steps = spec.graph(1, 2), [7], 0
    while not spec.agree(int(len(text) < length)).is_over:
        if len(text) >= length:
            spec.idle(1, 2, skip=not guesses)  # transport nccl: the others' gathers need this rank
            continue
        where, guess = [max(len(text) - 2, 0), len(text) - 1], 0
        if guesses:
            draft = step.draft()
            draft.inputs["tokens"].copy_(torch.tensor([[text[i] for i in where]]))
            draft.inputs["positions"].copy_(torch.tensor([where]))
            step.propose()  # on what was gathered while the step before committed
            guess = int(draft.outputs["logits"][0, -1].argmax())
        step.target.inputs["tokens"].copy_(torch.tensor([[text[-1], guess]]))
        step.target.inputs["positions"].copy_(torch.tensor([[len(text) - 1, len(text)]]))
        step.verify()
        token, behind = step.target.outputs["logits"][0].argmax(-1).tolist()
        step.commit()  # a target with states: write its input `accepted` first, in every step
        text += [token, behind] if guesses and guess == token else [token]
        num_steps += 1
    return text[:length], num_steps


def main(group: graphshard.Group, transport: str = "pull") -> bool:
    """Whether the tokens are those of a token a step, and come in fewer steps."""
    model, weights = random_llama(TINY)
    choices: dict[str, Any] = {"checkpoint": weights, "capture_sizes": [(1, 2)], "transport": transport}
    target = graphshard.compile(model, group, **choices)
    cut = TruncatedLlama(TINY, 2, max_batch_size=1)  # its embedding, last norm and head are the target's
    draft = graphshard.compile(cut, group, borrow=target, ignore=cut.redundant_tensors, head="outside", **choices)
    with graphshard.speculate(target, draft) as spec:
        text, num_steps = serve(spec, 40 - 9 * group.rank, guesses=True)
        expected, most_steps = serve(spec, 40 - 9 * group.rank, guesses=False)
    print(f"{group.prefix} {num_steps} steps, not {most_steps}; tokens equal: {text == expected}")
    return text == expected and num_steps < most_steps


if __name__ == "__main__":
    main(graphshard.init_group())
