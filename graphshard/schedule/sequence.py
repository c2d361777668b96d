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
    COMMIT_FOLD,
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
    fold: str | None = COMMIT_FOLD,
    prefetch_stream: PrefetchStream = "prefetch",
) -> dict[str, StepSequence]:
    """Every sequence that a speculative step may be, by name.

    `cold` is a step with nothing in flight or held, `step` one after another, `skip` a step without the draft, and
    `discard` what cancels the draft's gathers. What is found else at the beginning is said by prefixes: `cold_skip`;
    `draft_cold` and `target_cold` where one of them alone has to begin anew, as after an update of it; `primed` after a
    skip of such a draft, which leaves all of its first gathers in flight where a step leaves some held. Sequences that
    are equal to one named before, or do nothing, are left out, but `cold`, `step` and `skip` are always there for a
    draft, and `step` without one.

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
    found = {"cold": cold, "step": steps.step(cold.exit)}
    if draft is not None:
        found["skip"] = steps.skip(cold.exit)
    elif cold == found["step"]:
        del found["cold"]
    for name, sequence in steps.all_kinds():
        if sequence.ops and sequence not in found.values():
            found[name] = sequence
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

    def discard(self, entry: tuple[SlotState, ...], graph: str) -> StepSequence:
        """Drop what `entry` states of `graph`."""
        issue = _Issue(self.graphs, entry, self.prefetch_stream)
        issue.discard(graph)
        return issue.sequence()

    def verify(self, issue: _Issue) -> StepSequence:
        """The target's run, the draft's next prefetch, the fold."""
        issue.replay(TARGET)
        if self.has_draft:
            issue.launch(DRAFT)
        if self.fold is not None:
            issue.ops.append(Fold(TARGET, self.fold))
        return issue.sequence()

    def states(self) -> dict[str, tuple[SlotState, ...]]:
        """What may be in flight and held between two steps, by the prefix of a sequence's name."""
        steady = self.step(()).exit
        drafts = {"": _of(steady, DRAFT), "draft_cold": (), "primed": _of(self.skip(()).exit, DRAFT)}
        targets = {"": _of(steady, TARGET), "target_cold": ()}
        both = {
            "_".join(filter(None, (first, second))): drafts[first] + targets[second]
            for first in (drafts if self.has_draft else [""])
            for second in targets
        }
        return {"cold": (), **both}

    def all_kinds(self) -> Iterator[tuple[str, StepSequence]]:
        """Every kind of step from every state, by name; many are equal."""
        for prefix, entry in self.states().items():
            yield prefix or "step", self.step(entry)
            kinds = {"discard_target": self.discard(entry, TARGET)}
            if self.has_draft:
                kinds = {"skip": self.skip(entry), "discard": self.discard(entry, DRAFT), **kinds}
            for kind, sequence in kinds.items():
                yield "_".join(filter(None, (prefix, kind))), sequence


def _of(states: tuple[SlotState, ...], graph: str) -> tuple[SlotState, ...]:
    return tuple(state for state in states if state.graph == graph)


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

    def discard(self, graph: str) -> None:
        """Drop what `graph` has."""
        if self.state[graph]:
            self.ops.append(PrefetchDiscard(graph))
            self.state[graph].clear()

    def sequence(self) -> StepSequence:
        states = [self.state[graph.name] for graph in self.graphs]
        left = tuple(state[slot] for state in states for slot in sorted(state))
        return StepSequence(self.graphs, tuple(self.ops), self.entry, left)
