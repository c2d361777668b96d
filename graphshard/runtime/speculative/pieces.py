"""What a speculative step is made of: captured graphs or eager steps with one face, and the sequences they come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from graphshard.core.counts import some_of
from graphshard.core.errors import SpecError
from graphshard.core.sequence import StepSequence
from graphshard.core.specs import StepShape
from graphshard.runtime.folding import RunMode
from graphshard.runtime.runtime import Runtime
from graphshard.schedule.sequence import DRAFT, TARGET, emit_sequences
from graphshard.verify.sequence import verify_sequences


class Piece(Protocol):
    """A step of one model, captured (`StepGraph`) or not (`EagerStep`): write the inputs, replay, read the outputs."""

    shape: StepShape
    inputs: dict[str, Tensor]
    """Static tensors by name."""
    outputs: dict[str, Tensor]
    """Static tensors by name."""

    def replay(self) -> None:
        """Run it on what the inputs hold now; see `StepGraph.replay`."""


@dataclass(frozen=True, order=True)
class Shapes:
    """The step shapes that belong together: the target's, and that of each draft replay."""

    target: StepShape
    drafts: tuple[StepShape, ...]

    def __str__(self) -> str:
        drafts = " ".join(map(str, self.drafts))
        return f"{self.target}" + (f" after drafts {drafts}" if drafts else "")


def shapes_of(target: Runtime, draft: Runtime | None, draft_tokens: Sequence[int], run: RunMode) -> tuple[Shapes, ...]:
    """The target's step shapes for which there are drafts, smallest first; with `run` graph those that are captured.

    Args:
        target: the runtime that verifies.
        draft: the runtime that proposes, if there is one.
        draft_tokens: of each draft replay the tokens per sequence; 0: as many as the target's.
        run: how steps are run.

    Raises:
        SpecError: there is none.
    """
    found, missing = [], []
    for shape in sorted(target.programs):
        drafts = tuple(StepShape(shape.batch_size, tokens or shape.tokens_per_sequence) for tokens in draft_tokens)
        lacking = ([] if _is_ready(target, shape, run) else [f"target {shape}"]) + [
            f"draft {one}" for one in dict.fromkeys(drafts) if draft is not None and not _is_ready(draft, one, run)
        ]
        missing += lacking
        if not lacking:
            found.append(Shapes(shape, drafts))
    if not found:
        where = "captured" if run == "graph" else "in the plan"
        otherwise = "; or give draft_tokens=, the tokens of each draft replay" if 0 in draft_tokens else ""
        raise SpecError(
            f"no step shape of the target goes with drafts: not {where} {'is' if len(missing) == 1 else 'are'} "
            f"{', '.join(missing)}; add them to capture_sizes where the models are compiled{otherwise}"
        )
    return tuple(found)


def sequences_of(
    target: Runtime, draft: Runtime | None, shapes: Sequence[Shapes]
) -> dict[Shapes, Mapping[str, StepSequence]]:
    """The sequences of each step shape, verified: every ordered pair of those that may follow each other.

    Raises:
        SpecError: the programs of an autoregressive draft's replays differ.
        ProgramError: the verifier found a race.
    """
    made: dict[Shapes, Mapping[str, StepSequence]] = {}
    verified: set[tuple[str, ...]] = set()
    fold = next((fold.name for fold in target.model.folds), None)
    runtimes = {TARGET: target} | ({} if draft is None else {DRAFT: draft})
    layouts = {name: runtime.layout for name, runtime in runtimes.items()}
    models = {name: runtime.model for name, runtime in runtimes.items()}
    num_copies = max(runtime.plan.num_copies for runtime in runtimes.values())
    for one in shapes:
        programs = [] if draft is None else [draft.programs[shape] for shape in one.drafts]
        unlike = [shape for shape, program in zip(one.drafts, programs, strict=False) if program != programs[0]]
        if unlike:
            raise SpecError(
                f"step shape {one}: the draft's program of step shape {unlike[0]} is not that of {one.drafts[0]}, and "
                "all replays of one step need the same: plan the draft without splits by step shape"
            )
        sequences = emit_sequences(
            target.programs[one.target],
            programs[0] if programs else None,
            num_draft_replays=max(1, len(one.drafts)),
            fold=fold,
        )
        made[one] = sequences
        digests = tuple(sequence.digest for sequence in sequences.values())
        if digests not in verified:
            verified.add(digests)
            verify_sequences(sequences, num_copies=num_copies, layouts=layouts, models=models).raise_if_bad()
    return made


def check_apart(target: Runtime, draft: Runtime) -> None:
    """SpecError if slots of the two lie in the same memory: then one's gathers would overwrite the other's."""
    # never so for runtimes that `compile` made: each reserves its own; said of what somebody puts together by hand
    spans = [
        (memory.address, memory.address + memory.num_bytes, name)
        for name, memory in (("target", target.memory.slots), ("draft", draft.memory.slots))
        if memory is not None
    ]
    if len(spans) == 2 and max(spans[0][0], spans[1][0]) < min(spans[0][1], spans[1][1]):
        places = ", ".join(f"{name}'s at {begin:#x}..{end:#x}" for begin, end, name in spans)
        raise SpecError(f"slots of target and draft overlap ({places}): compile the draft as a runtime of its own")


def check_lender(target: Runtime, draft: Runtime) -> None:
    """SpecError if the draft borrows of another runtime: an update of the target would leave it with other weights."""
    lender = draft.lender
    while lender is not None and lender is not target:
        lender = lender.lender
    if draft.model.borrowed and lender is None:
        raise SpecError(
            f"the draft borrows {some_of(list(draft.model.borrowed))} of a runtime that is not the target: compile it "
            "with borrow= the target"
        )


def _is_ready(runtime: Runtime, shape: StepShape, run: RunMode) -> bool:
    if run == "eager":
        return shape in runtime.programs
    try:
        return runtime.graph(shape.batch_size, shape.tokens_per_sequence).shape == shape
    except SpecError:
        return False
