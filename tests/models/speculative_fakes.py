"""A speculative step over plain states, all weights resident; and drafts that propose what a test wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import torch
from torch import Tensor

from graphshard.core.specs import StepShape
from graphshard.models.module import new_buffers
from graphshard.models.speculative.acceptance import Row
from graphshard.models.speculative.proposers import BlockProposer
from graphshard.runtime.model import SegmentedModel, StepState, folds_of


class PlainGraph:
    """One step shape of a model: its inputs, its outputs, its state."""

    def __init__(
        self, model: SegmentedModel, shape: StepShape, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        specs = model.buffers(shape)
        self.inputs = {spec.name: buffers[spec.name] for spec in specs if spec.role == "input"}
        self.outputs = {spec.name: buffers[spec.name] for spec in specs if spec.role == "output"}
        self.segments, self.folds = tuple(model.segments), folds_of(model)
        every = [segment.spec for segment in (*self.segments, *self.folds)]
        self.state = StepState(shape, {s.path: {name: weights[name] for name in s.reads} for s in every}, buffers)

    def replay(self) -> None:
        with torch.inference_mode():
            self.state.run(self.segments)

    def fold(self) -> None:
        with torch.inference_mode():
            self.state.run(self.folds)


def plain_graphs(
    model: SegmentedModel, weights: Mapping[str, Tensor], shapes: Sequence[tuple[int, int]]
) -> list[PlainGraph]:
    """One for each of `shapes`, over one set of caches."""
    steps = [StepShape(*shape) for shape in shapes]
    buffers = new_buffers(model, list(dict.fromkeys(steps)))
    made = {step: PlainGraph(model, step, weights, buffers[step]) for step in buffers}
    return [made[step] for step in steps]


class PlainStep:
    """Checks the order of calls, as a real speculative step does."""

    def __init__(self, target: PlainGraph, drafts: Sequence[PlainGraph] = ()) -> None:
        self.target, self._drafts = target, drafts
        self._done: list[str] = []
        self.steps: list[list[str]] = []
        """What was called in each step."""

    def draft(self, i: int) -> PlainGraph:
        return self._drafts[i]

    def propose(self, i: int = 0) -> None:
        assert self._done == [f"propose {j}" for j in range(i)]
        self._done.append(f"propose {i}")
        self._drafts[i].replay()

    def verify(self) -> None:
        assert len(self._done) in (0, len(self._drafts))  # a draft may be skipped
        self._done.append("verify")
        self.target.replay()

    def commit(self) -> None:
        assert self._done[-1] == "verify"
        self.target.fold()
        self.steps.append([*self._done, "commit"])
        self._done.clear()


class Oracle:
    """Proposes the reference's tokens, the first `right(row's number)` of them right and the next one wrong."""

    num_replays = 0

    def __init__(self, batch_size: int, block: int, texts: Sequence[Sequence[int]], vocab_size: int, seed: int) -> None:
        self.batch_size, self.block = batch_size, block
        self.texts, self.vocab_size, self.random = texts, vocab_size, Random(seed)
        self.plan: list[list[int]] = []
        """How many proposals are right in each step to come, by row; random where it has run out."""
        self.planned: list[list[int]] = []
        """What it did."""

    def begin(self) -> None:
        self.planned.clear()

    def write(self, i: int, rows: Sequence[Row], inputs: Mapping[str, Tensor]) -> None:
        raise AssertionError("an oracle has no replays")

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        raise AssertionError("an oracle has no replays")

    def proposals(self, rows: Sequence[Row]) -> list[list[int]]:
        made, counts = [], []
        for index, row in enumerate(rows):
            text = self.texts[index] if index < len(self.texts) else []
            begin = len(row.tokens)
            right = self.plan[len(self.planned)][index] if len(self.planned) < len(self.plan) else None
            right = self.random.randrange(self.block) if right is None else right
            tokens = [self.random.randrange(self.vocab_size) for _ in range(self.block - 1)]
            known = list(text[begin : begin + self.block - 1])
            tokens[: min(right, len(known))] = known[:right]
            if right < len(known):
                tokens[right] = (known[right] + 1 + self.random.randrange(self.vocab_size - 1)) % self.vocab_size
            made.append(tokens)
            counts.append(right)
        self.planned.append(counts)
        return made

    def note(self, begins: Sequence[int], counts: Sequence[int], outputs: Mapping[str, Tensor]) -> None:
        """It knows the text."""


class Watched(BlockProposer):
    """Proposes what an oracle says, so that texts grow by 1 to `block` tokens; keeps what the draft itself proposed."""

    def __init__(self, oracle: Oracle, mask_token: int) -> None:
        super().__init__(oracle.batch_size, oracle.block, mask_token)
        self.oracle = oracle
        self.seen: list[list[tuple[list[int], int, list[float]]]] = []
        """By step and row: the text, how much of it is committed, and the draft's logits."""

    def read(self, i: int, outputs: Mapping[str, Tensor]) -> None:
        super().read(i, outputs)
        self.logits = outputs["logits"].clone()

    def proposals(self, rows: Sequence[Row]) -> Sequence[Sequence[int]]:
        own = super().proposals(rows)
        assert torch.equal(torch.tensor(own), self.logits[:, 1:].argmax(-1))
        self.seen.append([(list(r.tokens), r.committed, x) for r, x in zip(rows, self.logits, strict=True)])
        return self.oracle.proposals(rows)
