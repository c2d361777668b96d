"""Steps with tensor-parallel blocks beside gathers that need nobody: all ranks step alike there, and only there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from graphshard.comm.alignment import Alignment, Awaited, IssueKind, JointStep, ProgressWords
from graphshard.comm.group import Group
from graphshard.comm.lockstep import Lockstep
from graphshard.core.errors import CommError


class Joint:
    """Steps with tensor-parallel blocks go by `lockstep`, whatever else a rank does by `apart`.

    So a rank that is dead, idle or broken delays nobody's other steps. Eager and captured steps may be mixed: flags are
    the same for both.
    """

    def __init__(self, apart: Alignment, lockstep: Lockstep, shapes: Collection[str]) -> None:
        """`shapes` are the step shapes with such blocks, as `agree_on_capture` is told of them."""
        self._apart, self._lockstep, self._shapes = apart, lockstep, frozenset(shapes)
        self._is_joint = False

    @property
    def timeout_s(self) -> float:
        """The longest that the host waits for anything."""
        return self._lockstep.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self._lockstep.timeout_s = self._apart.timeout_s = timeout_s

    @property
    def watched(self) -> Joint:
        """Steps that nobody waits for may need peers."""
        return self

    @property
    def broken(self) -> str | None:
        """Why no more tensor-parallel steps can be issued; other steps can."""
        return self._lockstep.broken

    @property
    def progress(self) -> ProgressWords | None:
        """Gathers from peers' memory do not write how far they are."""
        return self._apart.progress

    @property
    def number(self) -> int:
        """How many tensor-parallel steps this rank issued."""
        return self._lockstep.number

    def check(self, what: str) -> None:
        """See `Alignment`; what needs peers is checked where it is issued."""
        self._apart.check(what)

    def must_drain(self, kind: IssueKind) -> bool:
        """Flags are the same for eager and captured steps."""
        return self._apart.must_drain(kind)

    def begin_step(self, step: int) -> None:
        """See `Alignment`."""
        self._is_joint = False
        self._lockstep.begin_step(step)

    def issue(self, kind: IssueKind, units: Sequence[int], what: str, joint: JointStep | None = None) -> None:
        """Gathers need nobody; a step with blocks is posted, and compared with what peers posted at this place."""
        del kind, units
        self._is_joint = joint is not None
        if joint is not None:
            self._lockstep.check(what)
            self._lockstep.issue("graph", (), what, joint)

    def wait(self, waiter: Callable[[float], bool], awaited: Awaited) -> bool:
        """See `Alignment`."""
        return (self._lockstep if awaited.is_joint else self._apart).wait(waiter, awaited)

    def look(self, awaited: Awaited, *, is_late: bool) -> None:
        """See `Watched`; a step without blocks that is late is said by whoever waits for it."""
        if awaited.is_joint:
            self._lockstep.look(awaited, is_late=is_late)

    def keep(self, error: CommError) -> None:
        """See `Watched`; the next step with blocks raises it."""
        self._lockstep.keep(error)

    def drain(self, waiter: Callable[[float], bool], *, is_posted: bool) -> str | None:
        """See `Alignment`."""
        return (self._lockstep if self._lockstep.number else self._apart).drain(waiter, is_posted=is_posted)

    def fail(self, error: BaseException, what: str) -> CommError | None:
        """See `Alignment`; nobody waits for a step without blocks."""
        return self._lockstep.fail(error, what) if self._is_joint else None

    def compute_failed(self, error: BaseException, what: str) -> None:
        """See `Alignment`."""
        self._lockstep.compute_failed(error, what)

    def agree_on_capture(self, group: Group, sequences: Sequence[tuple[str, str]]) -> None:
        """Collective where a step shape with blocks is captured: ranks meet, with nothing enqueued, and compare."""
        joint = [(shape, text) for shape, text in sequences if shape in self._shapes]
        if joint:
            self._lockstep.agree_on_capture(group, joint)
