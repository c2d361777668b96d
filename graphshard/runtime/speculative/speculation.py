"""Speculation: a target and its draft on one rank, stepped together.

    with graphshard.speculate(target, draft) as speculation:
        step = speculation.graph(batch_size=8, tokens_per_sequence=8)
        while ...:
            step.propose()    # the draft, on a prefetched first unit
            step.verify()     # the target; when it ends, the draft's first unit is gathered ...
            step.commit()     # ... beside the target's fold

Target and draft are two runtimes over one group: slots, streams, control pages and, under transport nccl, communicators
are each one's own. What a step issues is fixed by the settings (`sequences`), never by tokens, so that under nccl equal
calls on all ranks are equal gathers on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import TracebackType

from torch import Tensor

from graphshard.comm.group import Group
from graphshard.core.errors import CommError, ProgramError, SpecError
from graphshard.core.sequence import StepSequence
from graphshard.core.specs import StepShape
from graphshard.runtime.compute import refuse_inside_segment
from graphshard.runtime.eager_step import EagerStep
from graphshard.runtime.folding import RunMode
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.speculative.agreement import Agreed, Exchange, agree_on_size, check_size, compare_rows
from graphshard.runtime.speculative.order import CallOrder
from graphshard.runtime.speculative.pieces import (
    Piece,
    check_apart,
    check_lender,
    sequences_of,
    shapes_of,
)
from graphshard.runtime.speculative.step import SpeculativeStep
from graphshard.runtime.update import UpdateReport

Tensors = Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


class Speculation:
    """A target and its draft on one rank. Made by `speculate`; close it, or use it as a context manager.

    One thread at a time makes the calls of steps; another may `update` meanwhile, under transport pull.
    """

    def __init__(
        self,
        target: Runtime,
        draft: Runtime | None,
        draft_tokens: Sequence[int],
        run: RunMode,
        group: Group | None = None,
    ) -> None:
        """Local. `draft_tokens` as `pieces.shapes_of` takes them; `group` is for sizes alone: updates have another."""
        if run not in ("graph", "eager"):
            raise SpecError(f"unknown run {run!r}; known: graph, eager")
        self.target, self.draft, self.run = target, draft, run
        self._runtimes = [runtime for runtime in (draft, target) if runtime is not None]
        """In the order in which they are closed."""
        for runtime in self._runtimes:
            runtime.check_open()
        if draft is not None:
            _check_one_group(target, draft)
            check_apart(target, draft)
            check_lender(target, draft)
        self.num_draft_replays = len(draft_tokens)
        sequences = sequences_of(target, draft, shapes_of(target, draft, draft_tokens, run))
        self._steps = {shapes.target: SpeculativeStep(self, shapes, sequences[shapes]) for shapes in sequences}
        self._sequences = self._steps[min(self._steps)].sequences
        self._eager: dict[tuple[Runtime, StepShape], EagerStep] = {}
        self._group = group
        self.order = CallOrder(self.num_draft_replays)

    # --- what there is ---

    @property
    def is_collective(self) -> bool:
        """Whether steps need all ranks (transport nccl, tensor-parallel blocks): then all make the same calls."""
        return any(runtime.is_collective for runtime in self._runtimes)

    @property
    def sequences(self) -> Mapping[str, StepSequence]:
        """What steps issue, by name: `cold` (nothing was prefetched), `step`, `skip` (no draft), ...

        Those of the smallest step shape; of all, unless `needs_agreement` under transport nccl says that they differ
        (`SpeculativeStep.sequences`).
        """
        return self._sequences

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks must choose step shapes by one size, `agree`'s.

        Under transport nccl where shapes gather unlike; anywhere if some have tensor-parallel blocks.
        """
        if any(runtime.is_joint for runtime in self._runtimes):
            return len(self._steps) > 1
        digests = {tuple(one.digest for one in step.sequences.values()) for step in self._steps.values()}
        return self.is_collective and len(digests) > 1

    @property
    def must_exit(self) -> str | None:
        """Why this process must end to be rid of what closed runtimes left; None if it need not."""
        return next((runtime.must_exit for runtime in self._runtimes if runtime.must_exit is not None), None)

    def graph(self, batch_size: int, tokens_per_sequence: int = 1) -> SpeculativeStep:
        """The smallest step that fits `batch_size` sequences of which the target sees `tokens_per_sequence` tokens.

        With `run` graph among the captured ones, with `run` eager among all that were planned. Local, and cheap: under
        transport nccl ranks may differ in it, unless `needs_agreement`.

        Raises:
            SpecError: there is none that is large enough, or that is no step shape.
            ProgramError: the speculation is closed.
        """
        self.target.check_open()
        wanted = StepShape(batch_size, tokens_per_sequence)
        fitting = [
            shape
            for shape in self._steps
            if shape.batch_size >= wanted.batch_size and shape.tokens_per_sequence == wanted.tokens_per_sequence
        ]
        if not fitting:
            known = ", ".join(map(str, sorted(self._steps)))
            raise SpecError(
                f"no speculative step fits {wanted}; there are: {known}. Add it to both models' step shapes"
            )
        return self._steps[min(fitting)]

    def certificate(self) -> tuple[list[tuple[str, str]], dict[str, str]]:
        """(field, value) rows that ranks compare, and the texts behind values that are digests."""
        texts = {
            f"sequence {name} of step shape {shape}": sequence.text()
            for shape, step in self._steps.items()
            for name, sequence in step.sequences.items()
        }
        digests = [sequence.digest for step in self._steps.values() for sequence in step.sequences.values()]
        run = [("run", self.run)] if self.is_collective else []  # under pull each rank may run as it likes
        rows = [
            ("draft", "none" if self.draft is None else f"{self.draft.model.name} {self.draft.model.digest[:12]}"),
            ("num_draft_replays", str(self.num_draft_replays)),
            *run,
            ("step shapes", ", ".join(str(step.shapes) for step in self._steps.values())),
            *zip(texts, digests, strict=True),
        ]
        return rows, texts

    # --- beside steps ---

    def agree(self, batch_size: int, exchange: Exchange | None = None) -> Agreed:
        """The size by which all ranks choose the next step's graph, and whether any has requests left.

        Needed where `needs_agreement`; elsewhere only to learn that all ranks are done. Under transport nccl one
        exchange, collective; under pull there is none: the answer is this rank's own.

        Args:
            batch_size: this rank's number of sequences; 0 if it has none (it then calls `idle`).
            exchange: a server's own exchange, to ride on instead of the group's: takes this rank's number, returns all
                ranks' by rank. The server bounds it.

        Order:   none with what was issued: a step may run meanwhile.
        Blocks:  until all ranks have come, bounded by the target's timeout; `seconds` says how long.
        Capture: no.

        Raises:
            SpecError: `batch_size` is no whole number from 0 on.
            CommError: a rank did not come; or `exchange` returned something else than all ranks' numbers.
        """
        self.target.check_open()
        check_size(batch_size)
        if not self.is_collective or self._group is None:
            return Agreed(batch_size, batch_size == 0, 0.0)
        return agree_on_size(self._group, batch_size, exchange, self.target.timeout_s)

    def idle(self, batch_size: int = 1, tokens_per_sequence: int = 1, *, skip: bool = False) -> None:
        """Take part in a step in which this rank has no requests.

        Under pull the call is checked, and nothing is done. Under transport nccl all calls of a step are made on zeros,
        which are written into the inputs in place: no memory is allocated. Caches are written as zeroed inputs say, so
        nothing of value may lie there; a rank that keeps some makes the calls itself, on inputs that write elsewhere.

        Args:
            batch_size: the agreed one where `needs_agreement`; else any that there is a step for.
            tokens_per_sequence: as the other ranks'.
            skip: the other ranks skip the draft in this step.

        Order:   as a step's calls.
        Blocks:  as a step's calls, until peers have come.
        Capture: no.

        Raises:
            ProgramError: a step is open.
            SpecError: there is no such step.
            CommError: a peer did not come, or gave up.
        """
        step = self.graph(batch_size, tokens_per_sequence)
        self.order.check_closed("idle()")
        if not self.is_collective:
            return
        num_proposed = 0 if skip else step.num_draft_replays
        for piece in (*(step.draft(replay) for replay in range(num_proposed)), step.target):
            for tensor in piece.inputs.values():
                tensor.zero_()
        _make_all([*(partial(step.propose, replay) for replay in range(num_proposed)), step.verify, step.commit])

    def discard(self) -> None:
        """Give up what was prefetched for the draft: the next step is cold. Under transport nccl on all ranks alike.

        Order:   after the gathers in flight, which cannot be recalled.
        Blocks:  until they have ended, bounded by the draft's timeout.
        Capture: no.

        Raises:
            CommError: they did not end in time, or a peer gave up.
        """
        if self.draft is not None:
            with self._in_step():
                self.draft.discard_prefetch()

    def update(
        self,
        target: Tensors | None = None,
        draft: Tensors | None = None,
        *,
        only: str | Iterable[str] | None = None,
        keep: str | Iterable[str] = (),
    ) -> dict[str, UpdateReport]:
        """Put new weights in the place of the old ones, of the models that are given. Collective, both transports.

        Each model's update is all ranks' or none's, as `Runtime.update` says, the target's first; what was prefetched
        of an updated model is gathered again, on all ranks alike. Weights that the draft borrows come with the
        target's, once: such names among the draft's tensors are passed over.

        Args:
            target: (name, tensor) of the target's checkpoint; None leaves it as it is.
            draft: (name, tensor) of the draft's checkpoint; None leaves it as it is.
            only: as in `Runtime.update`, where one model is updated.
            keep: as in `Runtime.update`, where one model is updated.

        Order:   after everything that the model was asked to do before.
        Blocks:  the host, bounded as in `Runtime.update`.
        Capture: no.

        Returns:
            A report by "target" and "draft".

        Raises:
            SpecError: no model is named, or `only` or `keep` beside two.
            CommError: ranks name different models. Other errors as in `Runtime.update`; where the draft's fails after
                the target's, the target has its new weights.
        """
        refuse_inside_segment("update")
        wanted = {"target": target, "draft": draft}
        given = {name: tensors for name, tensors in wanted.items() if tensors is not None}
        if self._group is not None:  # else Runtime.update says why a rank that came back has no part in this
            with closing(whole_group(self.target)) as group:
                group.agree("update of a speculation", lambda: self._check_update(given, only, keep))
                compare_rows(group, "update of a speculation", [("models", " ".join(given))], {})
        reports = {}
        if target is not None:
            reports["target"] = self.target.update(target, only=only, keep=keep)
        if draft is not None and self.draft is not None:
            reports["draft"] = self.draft.update(_owned(self.draft, draft), only=only, keep=keep)
        return reports

    def close(self) -> None:
        """Close the draft, then the target. Local, bounded, idempotent; peers may go on under pull.

        Where one communicator is broken the other is broken off before either is waited for.
        """
        refuse_inside_segment("close")
        with ExitStack() as stack:
            if self._group is not None:
                stack.callback(self._group.close)
            for runtime in reversed(self._runtimes):
                stack.callback(runtime.close)
            self._break_all()
        self._steps.clear()  # else steps and this hold each other, and what little a closed runtime keeps
        self._eager.clear()

    def __enter__(self) -> Speculation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- used by steps ---

    def piece(self, runtime: Runtime, shape: StepShape) -> Piece:
        """The step of `shape`, captured or eager."""
        if self.run == "graph":
            graph: StepGraph = runtime.graph(shape.batch_size, shape.tokens_per_sequence)
            if graph.shape != shape:  # a larger one is another step
                raise SpecError(
                    f"{runtime.model.name}'s graph of step shape {shape} was given back; call Runtime.capture, which "
                    "captures it again"
                )
            return graph
        if (runtime, shape) not in self._eager:
            self._eager[runtime, shape] = EagerStep(runtime, shape)
        return self._eager[runtime, shape]

    def draft_for(self, step: SpeculativeStep, replay: int) -> Runtime:
        """The draft; ProgramError if `step` has no draft replay number `replay`."""
        if self.draft is None:
            raise ProgramError(f"{step} has no draft: its calls are verify() and commit()")
        if not 0 <= replay < step.num_draft_replays:
            raise ProgramError(f"{step} has {step.num_draft_replays} draft replays, from 0 on, and no {replay}")
        return self.draft

    @contextmanager
    def calling(self, call: str, step: SpeculativeStep) -> Iterator[None]:
        """`call` of `step`, if it is due. Where one model's gathers cannot go on, the other's do not either."""
        try:
            self.order.begin(call, step)
        except ProgramError as error:  # of a step that a break left open: say what broke
            if (broken := self._break_all()) is not None:
                raise CommError(broken) from error
            raise
        try:
            with self._in_step():
                yield
        finally:
            self.order.end()

    # --- inside ---

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        """Where one model's gathers cannot go on, the other's do not either: peers may wait in either."""
        try:
            yield
        except CommError:
            self._break_all()
            raise

    def _break_all(self) -> str | None:
        broken = next((runtime.broken for runtime in self._runtimes if runtime.broken is not None), None)
        if broken is not None:
            for runtime in self._runtimes:
                runtime.give_up(CommError(broken), "its part of a speculative step")
        return broken

    def _check_update(
        self, given: Mapping[str, Tensors], only: str | Iterable[str] | None, keep: str | Iterable[str]
    ) -> None:
        if not given:
            raise SpecError("name what is updated: target=tensors, draft=tensors, or both")
        if "draft" in given and self.draft is None:
            raise SpecError("there is no draft to update: give target=tensors alone")
        if len(given) > 1 and (only is not None or keep):
            raise SpecError("only and keep say which weights of one model are updated: update target and draft apart")


def _check_one_group(target: Runtime, draft: Runtime) -> None:
    if target is draft:
        raise SpecError("target and draft are one runtime: compile the draft as one of its own")
    if (target.group.path, target.group.job) != (draft.group.path, draft.group.job):
        raise SpecError(
            f"target and draft are on different groups ({target.group.path}, {draft.group.path}): compile both over one"
        )


def whole_group(runtime: Runtime) -> Group:
    """All ranks, for calls of their own."""
    group = runtime.group.subgroup(range(runtime.group.world_size))
    assert group is not None
    return group


def _make_all(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls, as peers do, also where one raises; the first error is raised then, a CommError at once."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except CommError:
            raise
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def _owned(draft: Runtime, tensors: Tensors) -> Iterable[tuple[str, Tensor]]:
    """`tensors` without those that the draft borrows."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    borrowed = set(draft.model.borrowed)
    return ((name, tensor) for name, tensor in pairs if name not in borrowed)
