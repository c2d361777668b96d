"""From the programs of a target and its draft to the sequences that the host issues, one for each kind of step.

A step runs the draft, then the target, gathers what the draft's next run expects, and folds:

    what `draft` expects and is not in flight: prefetch_launch; what is in flight: prefetch_wait; replay draft
    the same for every further run of the draft, and for `target`
    what `draft` expects next and its own end does not leave: prefetch_launch, under the fold
    fold
A *skip* is a step without a draft: what was prefetched stays, and the next draft run uses it. A *discard* drops what is
in flight or held. Graphs that expect nothing at their entry (head `inside`, or all weights resident) have no such ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from graphshard.core.errors import SpecError
from graphshard.core.program import Program
from graphshard.core.sequence import (
    Fold,
    Held,
    PrefetchDiscard,
    PrefetchLaunch,
    PrefetchWait,
    Replay,
    SequenceGraph,
    SequenceOp,
    SlotState,
    StepSequence,
)

DRAFT = "draft"
TARGET = "target"
PrefetchStream = Literal["prefetch", "copy"]
Graphs = tuple[SequenceGraph, ...]


def emit_sequences(
    target: Program,
    draft: Program | None,
    *,
    num_draft_replays: int = 1,
    fold: str | None = "commit_fold",
    prefetch_stream: PrefetchStream = "prefetch",
) -> dict[str, StepSequence]:
    """Every sequence that a speculative step may be, by name.

    `cold` is a step with nothing in flight, `step` one after another, `skip` a step without the draft, `cold_skip` that
    with nothing in flight, `discard` what update and cancel do; `primed` ones follow `cold_skip` where that leaves more
    in flight than a step does. What would be equal to one before it in this order, or does nothing, is left out, except
    `cold`, `step` and `skip` where there is a draft.

    Args:
        target: The program of the target.
        draft: The program of the draft; None: the target alone.
        num_draft_replays: Runs of the draft in a step. A constant: it never follows from tokens.
        fold: The target's segment that commits what was accepted; None: the model has none.
        prefetch_stream: `prefetch`, the draft's own; `copy`: the target's copy stream, to compare the two.

    Raises:
        SpecError: no run of the draft in a step, or an unknown stream.
    """
    if not isinstance(num_draft_replays, int) or num_draft_replays < 1:
        raise SpecError(f"num_draft_replays is {num_draft_replays!r}: a step runs the draft at least once")
    if prefetch_stream not in get_args(PrefetchStream):
        known = ", ".join(get_args(PrefetchStream))
        raise SpecError(f"prefetch_stream {prefetch_stream!r} is unknown; known are {known}")
    drafts = () if draft is None else (SequenceGraph(DRAFT, draft),)
    steps = _Steps((*drafts, SequenceGraph(TARGET, target)), num_draft_replays, fold, prefetch_stream)
    cold = steps.step(())
    step = steps.step(cold.exit)
    found = {"cold": cold, "step": step}
    if draft is not None:
        found["skip"] = steps.skip(step.exit)
    for name, sequence in steps.others(step.exit):
        if sequence.ops and sequence not in found.values():
            found[name] = sequence
    if draft is None and cold == step:
        del found["cold"]
    return found


class _Steps:
    """The kinds of steps, each from any state of the slots."""

    def __init__(
        self,
        graphs: tuple[SequenceGraph, ...],
        num_draft_replays: int,
        fold: str | None,
        prefetch_stream: PrefetchStream,
    ) -> None:
        self.graphs = graphs
        self.has_draft = len(graphs) > 1
        self.num_draft_replays = num_draft_replays
        self.fold = fold
        self.prefetch_stream = prefetch_stream

    def step(self, entry: tuple[SlotState, ...]) -> StepSequence:
        """The draft's runs, the target's, and what follows."""
        issue = _Issue(self.graphs, entry, self.prefetch_stream)
        for _ in range(self.num_draft_replays if self.has_draft else 0):
            issue.replay(DRAFT)
        return self.verify(issue)

    def skip(self, entry: tuple[SlotState, ...]) -> StepSequence:
        """A step without the draft."""
        return self.verify(_Issue(self.graphs, entry, self.prefetch_stream))

    def discard(self, entry: tuple[SlotState, ...]) -> StepSequence:
        """Drop what `entry` states."""
        issue = _Issue(self.graphs, entry, self.prefetch_stream)
        issue.discard()
        return issue.sequence()

    def verify(self, issue: _Issue) -> StepSequence:
        """The target's run, the draft's next prefetch, the fold."""
        issue.replay(TARGET)
        if self.has_draft:
            issue.launch(DRAFT)
        if self.fold is not None:
            issue.ops.append(Fold(TARGET, self.fold))
        return issue.sequence()

    def others(self, steady: tuple[SlotState, ...]) -> Iterator[tuple[str, StepSequence]]:
        """What may follow a discard, and what may follow that. `steady` is the state between two steps."""
        yield "discard", self.discard(steady)
        if not self.has_draft:
            return
        cold_skip = self.skip(())
        yield "cold_skip", cold_skip
        yield "primed", self.step(cold_skip.exit)
        yield "primed_skip", self.skip(cold_skip.exit)
        yield "primed_discard", self.discard(cold_skip.exit)


class _Issue:
    """Ops so far, and what they leave in the slots: what the runtime's own table of slots does, on paper."""

    def __init__(
        self, graphs: tuple[SequenceGraph, ...], entry: tuple[SlotState, ...], prefetch_stream: PrefetchStream
    ) -> None:
        self.graphs = graphs
        self.programs = {graph.name: graph.program for graph in graphs}
        self.prefetch_stream = prefetch_stream
        self.ops: list[SequenceOp] = []
        self.entry = entry
        self.state: dict[str, dict[int, SlotState]] = {graph.name: {} for graph in graphs}
        for item in entry:
            self.state[item.graph][item.slot] = item

    def launch(self, graph: str) -> None:
        """Gather what `graph` expects at its entry and does not have."""
        state = self.state[graph]
        for gather in self.programs[graph].prime:
            if gather.slot not in state:
                # only the draft's gathers are compared on two streams
                stream: PrefetchStream = self.prefetch_stream if graph == DRAFT else "prefetch"
                launch = PrefetchLaunch(graph, gather.unit, gather.slot, stream)
                self.ops.append(launch)
                state[gather.slot] = launch

    def replay(self, graph: str) -> None:
        """Run `graph`, after the gathers that it needs."""
        self.launch(graph)
        state = self.state[graph]
        for _, item in sorted(state.items()):
            if isinstance(item, PrefetchLaunch):
                self.ops.append(PrefetchWait(graph, item.unit, item.slot))
        self.ops.append(Replay(graph))
        program = self.programs[graph]
        state.clear()
        for gather in program.prime:
            if program.exit[gather.slot] == gather.unit:
                state[gather.slot] = Held(graph, gather.unit, gather.slot)

    def discard(self) -> None:
        """Drop what every graph has."""
        for graph, state in self.state.items():
            if state:
                self.ops.append(PrefetchDiscard(graph))
                state.clear()

    def sequence(self) -> StepSequence:
        states = [self.state[graph.name] for graph in self.graphs]
        left = tuple(state[slot] for state in states for slot in sorted(state))
        return StepSequence(self.graphs, tuple(self.ops), self.entry, left)
