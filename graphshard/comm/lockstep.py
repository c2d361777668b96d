"""Ranks that gather together: each issues the same collectives in the same order, or all end in one named error.

Before a rank issues gathers it posts them on its control page: their number in its own sequence, and a hash of the
sequence so far. Collectives pair up by number, so a rank whose gather has ended can compare: every peer has posted that
number. While a rank waits it looks at the pages of the others: who gave up and why, who issued something else, who is
dead or closed and will not come. The first failure is everybody's.

# Note [eager and captured]: one communicator serves both, so all that was issued one way has ended before the first is
# issued the other way (the host waits); NCCL's own mixing support is not relied on.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from graphshard._core import ControlPage, Word
from graphshard.comm.alignment import Awaited, IssueKind, JointStep, ProgressWords
from graphshard.comm.control import ControlTable
from graphshard.comm.group import Group
from graphshard.core.errors import CommError

TIMEOUT, DEAD, CLOSED, UNLIKE, LIBRARY, ISSUE = range(1, 7)
"""Kinds of failure, as control pages hold them."""
_SLICE_S = 0.05
"""How often a rank that waits looks at its peers."""
_GRACE_S = 2.0
"""How long a rank that closes waits on when a peer is gone: what that peer came to ends by then, or never does."""
_KINDS: dict[IssueKind, int] = {"outside": 1, "eager": 2, "graph": 3}
_KIND_TEXTS = {1: "outside a step", 2: "in an eager step", 3: "in a captured step"}
_JOINT = 4
"""The kind of a step that gathers no weights by collectives, and has tensor-parallel blocks."""


class Breakable(Protocol):
    """The communicators that gathers go through."""

    def settings(self) -> Mapping[str, str]:
        """What must be alike on all ranks where something is captured."""

    def async_error(self) -> str | None:
        """What went wrong inside; None if nothing did."""

    def break_off(self) -> None:
        """Abort, without waiting for it: peers will not come."""


class Lockstep:
    """See the module. Owns the words that gathers write, if they do."""

    def __init__(
        self,
        control: ControlTable,
        rank: int,
        communicators: Breakable,
        timeout_s: float,
        words: tuple[Word, Word] | None = None,
        *,
        noun: str = "communicator",
    ) -> None:
        """`words` are begun and ended, for `ProgressWords`; `noun` is what errors call what `communicators` is."""
        self._noun = noun
        self._control, self._rank, self.timeout_s = control, rank, timeout_s
        self._communicators = communicators
        self._words = words
        self._hash = bytes(8)
        self._number = 0
        self._what = 0
        self._kind: IssueKind | None = None
        self._step = 0
        self._broken: str | None = None
        self._kept: CommError | None = None

    @property
    def watched(self) -> Lockstep:
        """Steps that nobody waits for need peers, too."""
        return self

    @property
    def broken(self) -> str | None:
        """The first failure of this rank or a peer."""
        return self._broken

    @property
    def progress(self) -> ProgressWords | None:
        """Where gathers write how far they are."""
        return ProgressWords(self._words[0].address, self._words[1].address) if self._words is not None else None

    @property
    def number(self) -> int:
        """How many batches of gathers this rank issued."""
        return self._number

    def check(self, what: str) -> None:
        """CommError if this rank or a peer gave up; the first time with the whole reason."""
        self._raise_kept()
        if self._broken is not None:
            raise CommError(self._refusal(what, self._rank, self._broken))
        self._adopt()

    def _refusal(self, what: str, rank: int, broken: str) -> str:
        return (
            f"{what} is refused: rank {rank}'s {self._noun} is broken ({broken}); end all ranks of this group and "
            "start them anew"
        )

    def must_drain(self, kind: IssueKind) -> bool:
        """Between eager and captured gathers, see Note [eager and captured]."""
        return self._kind is not None and (self._kind == "graph") != (kind == "graph")

    def begin_step(self, step: int) -> None:
        """Show peers that this rank came to `step`."""
        self._step = step
        if self._words is not None:
            for word in self._words:
                word.store(0)
        self._control.mine.set_begun(step, 0)

    def issue(self, kind: IssueKind, units: Sequence[int], what: str, joint: JointStep | None = None) -> None:
        """Post gathers, and a step with blocks, and compare with what peers posted at this place."""
        if not units and joint is None:
            return
        key = f"{_KINDS[kind]} {' '.join(map(str, units))}" + ("" if joint is None else f" blocks {joint}")
        self._hash = hashlib.blake2b(key.encode(), digest_size=8, key=self._hash).digest()
        if units:
            self._what = _KINDS[kind] << 56 | min(len(units), 0xFFFFFF) << 32 | units[0] & 0xFFFFFFFF
        else:
            assert joint is not None
            shape = (joint.batch_size & 0xFFFF) << 16 | joint.tokens_per_sequence & 0xFFFF
            self._what = _JOINT << 56 | min(len(joint.blocks), 0xFFFFFF) << 32 | shape
        self._kind = kind
        self._number = self._control.mine.post_issue(int.from_bytes(self._hash, "little"), self._what)
        self._compare(what)

    def wait(self, waiter: Callable[[float], bool], awaited: Awaited) -> bool:
        """Until all that was issued has ended, bounded, with a look at the peers now and then."""
        self._raise_kept()
        if self._broken is not None:  # what was aborted may end, with wrong bytes
            raise CommError(self._broken)
        deadline = time.monotonic() + self.timeout_s
        while not waiter(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            self.look(awaited, is_late=time.monotonic() >= deadline)
        self._refuse_aborted(awaited.number or self._number)
        self._compare(awaited.what)  # what has ended paired up with what peers posted: was it the same?
        if awaited.is_all:
            self._control.mine.set_num_finished(awaited.number or self._number)
        return True

    def look(self, awaited: Awaited, *, is_late: bool) -> None:
        """See `Watched.look`."""
        number = awaited.number or self._number
        self._publish()
        self._adopt()
        self._compare(awaited.what)
        self._look_for_the_missing(awaited.what, number)
        self._ask_communicators(awaited.what)
        if is_late:
            raise self._late(awaited, number)

    def keep(self, error: CommError) -> None:
        """See `Watched.keep`."""
        self._kept = error

    def drain(self, waiter: Callable[[float], bool], *, is_posted: bool) -> str | None:
        """See `Alignment.drain`. Once a peer is gone that may be needed, its last gathers get a grace period to end."""
        deadline = time.monotonic() + self.timeout_s
        alone = None
        while not waiter(max(0.0, min(_SLICE_S, deadline - time.monotonic()))):
            if alone is None:
                alone = self._why_alone(is_posted)
                if alone is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() >= deadline:
                alone = alone or f"it did not end within {self.timeout_s:.1f} s; peers: {self._control.describe()}"
                return str(self._break(alone))
        self._control.mine.set_num_finished(self._number)
        return None

    def fail(self, error: BaseException, what: str) -> CommError | None:
        """Tell peers that `what` could not be issued here: they would wait in vain."""
        if self._broken is not None:
            return None
        return self._fail(ISSUE, f"rank {self._rank} could not issue {what}: {error}", culprit=self._rank)

    def compute_failed(self, error: BaseException, what: str) -> None:
        """See `Alignment`: posted before this rank's next flags, so before any peer's step can end."""
        text = f"rank {self._rank} could not compute {what}: {type(error).__name__}: {error}"
        self._control.mine.post_failure(text, ISSUE, culprit=self._rank)
        self._control.pages[0].claim_first(self._rank)

    def agree_on_capture(self, group: Group, sequences: Sequence[tuple[str, str]]) -> None:
        """Compare with all ranks what is about to be captured, and what was issued before it (collective).

        Raises:
            CommError: on every rank, naming the first difference.
        """
        settings = [[f"setting {name}", value] for name, value in sorted(self._communicators.settings().items())]
        mine = settings + [[shape, text] for shape, text in sequences]
        told: list[Any] = [
            value
            for value, _ in group.all_gather(
                [mine, self._number, self._hash.hex(), self._broken], name="capture certificate"
            )
        ]
        for rank, (theirs, number, digest, broken) in enumerate(told):
            if broken is not None:
                raise CommError(self._refusal("a capture", rank, broken))
            if theirs != told[0][0]:
                raise CommError(f"captures differ: {_first_difference(told[0][0], theirs, rank)}; {_ALIKE}")
            if [number, digest] != told[0][1:3]:
                raise CommError(
                    f"captures differ: before this one rank 0 issued {told[0][1]} batches of gathers, rank {rank} "
                    f"{number}, or others; {_ALIKE}"
                )

    # --- looking at peers ---

    @property
    def _peers(self) -> list[int]:
        return [rank for rank in range(len(self._control.pages)) if rank != self._rank]

    def _publish(self) -> None:
        """Show how far the step that is waited for has come."""
        if self._words is not None:
            begun, ended = (word.value for word in self._words)
            self._control.mine.set_begun(self._step, begun)
            if ended:
                self._control.mine.set_progress(self._step, ended - 1)

    def _adopt(self) -> None:
        """CommError with the failure that is everybody's, if there is one."""
        first = self._control.pages[0].first_failed
        if first is not None:
            raise self._break(self._told_by(first))

    def _refuse_aborted(self, number: int) -> None:
        """CommError if batch `number` may have ended only because a peer gave up in it: an abort lets gathers pass.

        A peer that was done with it gave up later: then all chunks had arrived everywhere.
        """
        pages = [self._control.pages[rank] for rank in self._peers]
        has_failed = any(page.has_failed and page.num_finished < number for page in pages)
        if has_failed or self._control.mine.has_failed:  # here: `compute_failed`
            self._adopt()

    def _told_by(self, rank: int) -> str:
        failure = self._control.pages[rank].failure
        assert failure is not None, f"rank {rank} claimed to have failed, and posted nothing"
        return failure[0]

    def _compare(self, what: str) -> None:
        """CommError if a peer posted something else at this rank's latest number."""
        mine = (int.from_bytes(self._hash, "little"), self._what)
        for rank in self._peers:
            theirs = self._control.pages[rank].issue(self._number)
            if theirs is not None and theirs != mine:
                here, there = _issue_text(self._what), _issue_text(theirs[1])
                if here == there:
                    there = "others, in another order or after others"
                raise self._fail(
                    UNLIKE,
                    f"ranks issue different gathers: at {what} (batch {self._number}) rank {self._rank} gathers "
                    f"{here}; rank {rank} gathers {there}; {_ALIKE}",
                    unit=self._what & 0xFFFFFFFF,
                    culprit=rank,
                )

    def _look_for_the_missing(self, what: str, number: int) -> None:
        for rank in self._peers:
            page = self._control.pages[rank]
            if page.num_finished >= number:
                continue  # it is done with all that this rank waits for
            state = self._control.state(rank)
            if state in ("dead", "closed"):
                how = "died" if state == "dead" else "closed its runtime"
                raise self._fail(
                    DEAD if state == "dead" else CLOSED,
                    f"rank {rank} (pid {page.pid}) {how} while rank {self._rank} waited for {what}; "
                    f"{self._control.progress(rank)}",
                    culprit=rank,
                )

    def _why_alone(self, is_posted: bool) -> str | None:
        """Which peer will not come to what this rank still waits for; None if all may."""
        first = self._control.pages[0].first_failed
        if first is not None:
            return self._told_by(first)
        for rank in self._peers:
            page = self._control.pages[rank]
            state = self._control.state(rank)
            if state in ("dead", "closed") and not (is_posted and page.num_finished >= self._number):
                how = "died" if state == "dead" else "closed its runtime"
                return (
                    f"rank {rank} (pid {page.pid}) {how}, and may not have come to it: {self._control.progress(rank)}"
                )
        return None

    def _ask_communicators(self, what: str) -> None:
        error = self._communicators.async_error()
        if error is not None:
            self._adopt()  # a peer that gave up aborts its end, which shows here too
            raise self._fail(LIBRARY, f"rank {self._rank}'s communicator failed while it waited for {what}: {error}")

    # --- failing ---

    def _late(self, awaited: Awaited, number: int) -> CommError:
        pages = self._control.pages
        place = _place(pages[self._rank])
        op = place[1] - 1
        behind = [rank for rank in self._peers if pages[rank].num_issues < number]
        behind = behind or [rank for rank in self._peers if _place(pages[rank]) < place]
        ahead = [rank for rank in self._peers if _place(pages[rank]) > place]
        what = f"{awaited.name_op(op)} (op {op}, step {awaited.step})" if op >= 0 else awaited.what
        text = f"rank {self._rank} waited {self.timeout_s:.1f} s for {what}"
        if behind:
            here = _ranks([rank for rank in range(len(pages)) if rank not in behind])
            theirs = f"rank {behind[0]}'s" if len(behind) == 1 else f"those of {_ranks(behind)}"
            came = f"chunks of {here} arrived, {theirs}" if op >= 0 else f"{here} came to it, {_ranks(behind)}"
            text += f": {came} did not; {self._missing_text(behind)}"
        elif ahead:
            text += f": {_ranks(ahead)} went on, this rank itself is behind{awaited.detail()}"
        else:
            text += f": all ranks came to it, and it did not end{awaited.detail()}; peers: {self._control.describe()}"
        culprit = behind[0] if behind else self._rank if ahead else -1
        return self._fail(TIMEOUT, text, op=op, step=awaited.step, culprit=culprit)

    def _missing_text(self, ranks: Sequence[int]) -> str:
        """`it is stopped, it last finished op 27 of step 417`, of each of `ranks`."""
        found = []
        for rank in ranks:
            state = self._control.state(rank)
            why = "" if state == "live" else f"it is {state}, "
            found.append((f"rank {rank}: " if len(ranks) > 1 else "") + why + self._control.progress(rank))
        return "; ".join(found)

    def _fail(self, kind: int, text: str, unit: int = -1, op: int = -1, step: int = -1, culprit: int = -1) -> CommError:
        """Post a failure. Of ranks that fail at once one comes first, and its failure is the one that all raise."""
        self._control.mine.post_failure(text, kind, unit, op, step, culprit)
        return self._break(self._told_by(self._control.pages[0].claim_first(self._rank)))

    def _break(self, text: str) -> CommError:
        self._broken = text
        self._communicators.break_off()
        return CommError(text)

    def _raise_kept(self) -> None:
        error, self._kept = self._kept, None
        if error is not None:
            raise error


_ALIKE = (
    "under a collective transport, and in steps with tensor-parallel blocks, all ranks make the same calls in the same "
    "order"
)


def _place(page: ControlPage) -> tuple[int, int]:
    return page.begun_step, page.begun_op


def _issue_text(what: int) -> str:
    """`24 units, 0 first, in an eager step`."""
    count = what >> 32 & 0xFFFFFF
    if what >> 56 == _JOINT:
        shape = f"{what >> 16 & 0xFFFF}x{what & 0xFFFF}"
        return f"the tokens of {count} tensor-parallel block{'s' if count != 1 else ''}, in a step of shape {shape}"
    return f"{count} unit{'s' if count != 1 else ''}, {what & 0xFFFFFFFF} first, {_KIND_TEXTS.get(what >> 56, '?')}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + " ".join(map(str, ranks))


def _first_difference(ours: list[list[str]], theirs: list[list[str]], rank: int) -> str:
    """Where two lists of [setting, value] and [step shape, text of its gathers] differ first."""
    for here, there in zip_longest(ours, theirs, fillvalue=["nothing", ""]):
        if here[0].startswith("setting ") and here != there:
            return f"{here[0]} is {here[1]!r} on rank 0, {there[1]!r} on rank {rank}"
        if here[0] != there[0]:
            return f"rank 0 captures step shape {here[0]} where rank {rank} captures {there[0]}"
        for number, lines in enumerate(zip_longest(here[1].splitlines(), there[1].splitlines(), fillvalue="nothing")):
            if lines[0] != lines[1]:
                return f"collective {number} of step shape {here[0]} is {lines[0]} on rank 0, {lines[1]} on rank {rank}"
    raise AssertionError("the lists differ, their entries do not")
