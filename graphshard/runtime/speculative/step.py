"""One speculative step of one batch size: propose, verify, commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from graphshard.core.errors import CommError
from graphshard.core.sequence import StepSequence
from graphshard.runtime.speculative.order import COMMIT, VERIFY, propose
from graphshard.runtime.speculative.pieces import Piece, Shapes

if TYPE_CHECKING:
    from graphshard.runtime.speculative.speculation import Speculation


class SpeculativeStep:
    """The step of one batch size. Made by `Speculation.graph`; all tensors are static, and may be kept.

    Steps of other sizes have theirs in the same memory, as the draft's replays have.

        step.draft().inputs["tokens"].copy_(block);  step.propose()
        step.target.inputs["tokens"].copy_(...);     step.verify()
        step.target.inputs["accepted"].copy_(...);   step.commit()

    The calls come in this order, each once: `propose(0)`, ..., `propose(n - 1)`, or none of them (the draft is
    skipped), then `verify`, then `commit`. Where one raises, the step goes on with the next call: the gathers of the
    failed one have been issued, or were done without. After a target that raised `commit` folds nothing. Under
    transport nccl all ranks make equal calls, and a rank that has no requests makes them on anything
    (`Speculation.idle`).
    """

    def __init__(self, speculation: Speculation, shapes: Shapes, sequences: Mapping[str, StepSequence]) -> None:
        self.shapes = shapes
        self.sequences = sequences
        """What the calls issue, by name: `cold`, `step`, `skip`, ... (see `schedule.sequence.emit_sequences`)."""
        self._speculation = speculation

    def __str__(self) -> str:
        return f"speculative step {self.shapes.target}"

    @property
    def batch_size(self) -> int:
        """Rows of every tensor here; a smaller batch leaves the last ones unused."""
        return self.shapes.target.batch_size

    @property
    def num_draft_replays(self) -> int:
        """How often `propose` is called in a step, on every rank, whatever the tokens are."""
        return len(self.shapes.drafts)

    @property
    def target(self) -> Piece:
        """The verify step: `inputs` and `outputs` by name."""
        return self._speculation.piece(self._speculation.target, self.shapes.target)

    def draft(self, replay: int = 0) -> Piece:
        """The draft's replay number `replay`: `inputs` and `outputs` by name.

        They lie in one memory for all replays and step shapes: write those of a replay once the one before was read.

        Raises:
            ProgramError: there is no such replay.
        """
        return self._speculation.piece(self._speculation.draft_for(self, replay), self.shapes.drafts[replay])

    def propose(self, replay: int = 0) -> None:
        """Run the draft's replay number `replay` on what its inputs hold now.

        Order:   after everything that the draft was asked to do before, its prefetch included: its first unit is waited
                 for here, by the launching stream, or gathered here if nothing was prefetched (cold). The next
                 replay's prefetch follows at once.
        Blocks:  as `StepGraph.replay` does. With `run` graph under transport nccl the host too waits for the prefetch,
                 bounded: a communicator's eager gathers have ended before its captured ones begin.
        Capture: no.

        Raises:
            ProgramError: another call is due, or there is no draft.
            CommError: a peer did not come, or gave up: then neither model can be stepped any more (nccl).
        """
        piece = self.draft(replay)
        is_last = replay == self.num_draft_replays - 1
        with self._speculation.calling(propose(replay), self):
            self._replay(piece, None if is_last else replay + 1)

    def verify(self) -> None:
        """Run the target on what its inputs hold now; then begin to gather what the next step's first draft needs.

        Order:   the target's replay after everything that the target was asked to do before. The draft's gather comes
                 after that replay, beside whatever follows (`commit`), on a stream and, under transport nccl, a
                 communicator of its own. What is held or in flight is not gathered again: a step that skipped the
                 draft leaves what was prefetched before it.
        Blocks:  as `StepGraph.replay` does; with `run` graph under transport nccl until the draft's replay has ended,
                 as in `propose`. Never for the draft's gather.
        Capture: no.

        Raises:
            ProgramError: another call is due.
            CommError: a peer did not come, or gave up: then neither model can be stepped any more (nccl).
        """
        piece = self.target
        with self._speculation.calling(VERIFY, self):
            self._replay(piece, 0 if self.num_draft_replays else None, is_target=True)

    def commit(self) -> None:
        """Run the target's fold (`ModelSpec.folds`) on what its inputs, as `accepted`, hold now; the step is over.

        A target without folds has nothing to run, nor one whose replay raised; the call ends the step nevertheless.

        Order:   after `verify` on the target's compute stream, beside the draft's gather.
        Blocks:  as `StepGraph.replay` does.
        Capture: no; the fold itself was captured beside the step shape, with `run` graph.

        Raises:
            ProgramError: another call is due.
        """
        speculation, shape = self._speculation, self.shapes.target
        with speculation.calling(COMMIT, self):
            if speculation.target.model.folds and speculation.order.has_outputs:
                speculation.target.fold(shape.batch_size, shape.tokens_per_sequence, run=speculation.run)

    def _replay(self, piece: Piece, next_draft: int | None, *, is_target: bool = False) -> None:
        """Replay `piece`, then begin what replay `next_draft` of the draft needs.

        Under a collective transport also where compute raised: peers gather on.
        """
        try:
            piece.replay()
            self._speculation.order.has_outputs = is_target
        except CommError:
            raise
        except Exception:
            if self._speculation.is_collective and next_draft is not None:
                self._prefetch(next_draft)
            raise
        if next_draft is not None:
            self._prefetch(next_draft)

    def _prefetch(self, replay: int) -> None:
        shape = self.shapes.drafts[replay]
        self._speculation.draft_for(self, replay).prefetch(shape.batch_size, shape.tokens_per_sequence)
