"""How ranks keep together in steps: not at all (`Apart`, pull), or gather for gather (`lockstep.Lockstep`, nccl)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from graphshard.comm.group import Group
from graphshard.core.errors import CommError

IssueKind = Literal["outside", "eager", "graph"]
"""Who issues gathers: the host beside a step, an eager step, a captured one."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """What the host waits for, as errors say it."""

    what: str
    """`step 417 of shape 1x1 (graph)`"""
    step: int
    detail: Callable[[], str]
    """More that is known when it is late, beginning with `; `, or nothing."""
    name_op: Callable[[int], str] = "op {}".format
    """`unit 12`, for the op whose gather is waited for."""
    number: int = 0
    """The last batch of gathers that has ended then (`Alignment.number`); 0: the last that was issued."""
    is_all: bool = True
    """Whether that batch has ended then; a loop waits for parts of one."""
    is_joint: bool = False
    """Whether it is a step with tensor-parallel blocks, which needs all ranks where gathers do not."""


@dataclass(frozen=True, slots=True)
class JointStep:
    """A step that all ranks take together, whatever gathers its weights: it has tensor-parallel blocks."""

    batch_size: int
    tokens_per_sequence: int
    blocks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.batch_size}x{self.tokens_per_sequence} {' '.join(map(str, self.blocks))}"


@dataclass(frozen=True, slots=True)
class ProgressWords:
    """Addresses of two 32-bit words that gathers write: op index + 1 when one begins, and when it has ended."""

    begun: int
    ended: int


class Watched(Protocol):
    """What a watchdog does beside the calls of a runtime, with the runtime's lock held."""

    def wait(self, waiter: Callable[[float], bool], awaited: Awaited) -> bool:
        """See `Alignment.wait`."""

    def look(self, awaited: Awaited, *, is_late: bool) -> None:
        """One look at the peers while `awaited` runs; with `is_late` no more time is given.

        Raises:
            CommError: it will not end, or not with right bytes, and why. Peers have been told.
        """

    def keep(self, error: CommError) -> None:
        """Nobody is there to raise `error`: the runtime's next call does."""


class Alignment(Protocol):
    """Between a runtime's steps and those of its peers. Used with the runtime's lock held."""

    timeout_s: float
    """The longest that the host waits for anything."""

    @property
    def watched(self) -> Watched | None:
        """What a watchdog is to look at, if steps that nobody waits for may need peers."""

    @property
    def broken(self) -> str | None:
        """Why no more gathers can be issued; None if they can."""

    @property
    def progress(self) -> ProgressWords | None:
        """Where gathers write how far they are; None if they do not."""

    @property
    def number(self) -> int:
        """How many batches of gathers were issued, where they are counted."""

    def check(self, what: str) -> None:
        """Before `what` begins: CommError if this rank or a peer gave up."""

    def must_drain(self, kind: IssueKind) -> bool:
        """Whether all that was issued must have ended before gathers of `kind` are issued."""

    def begin_step(self, step: int) -> None:
        """Step number `step` begins on this rank."""

    def issue(self, kind: IssueKind, units: Sequence[int], what: str, joint: JointStep | None = None) -> None:
        """The gathers of `units` are about to be issued, in this order; with `joint` a step that all ranks take.

        Raises:
            CommError: a peer issued others at this place.
        """

    def wait(self, waiter: Callable[[float], bool], awaited: Awaited) -> bool:
        """Let the host wait for what was issued: `waiter(seconds)` says whether it has ended. False if time is up.

        Raises:
            CommError: it will not end, or not with right bytes, and why.
        """

    def drain(self, waiter: Callable[[float], bool], *, is_posted: bool) -> str | None:
        """Let a host that closes wait for all that was issued; as `wait`, but nothing is raised.

        Args:
            waiter: says whether all has ended after so many seconds at most.
            is_posted: peers can tell from the control pages all that this rank issued.

        Returns:
            Why it was given up; None if all has ended, and peers that still wait need this rank no more.
        """

    def fail(self, error: BaseException, what: str) -> CommError | None:
        """`what` could not be issued, so peers would wait in vain: tell them. The error to raise, if there is one."""

    def compute_failed(self, error: BaseException, what: str) -> None:
        """On the thread that computes: in `what` a part of a tensor-parallel block raised. Peers are told, now.

        Their steps would else end with what this rank did not compute; whoever waits for this step learns it there.
        """

    def agree_on_capture(self, group: Group, sequences: Sequence[tuple[str, str]]) -> None:
        """Compare what is about to be captured, as (step shape, text of its gathers) in the order of capture."""


class Apart:
    """Each rank at its own pace: nobody waits for a peer, so nothing is compared."""

    watched: Watched | None = None
    broken: str | None = None
    progress: ProgressWords | None = None
    number = 0

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def check(self, what: str) -> None:
        """Nothing can be wrong."""

    def must_drain(self, kind: IssueKind) -> bool:
        """Never: copies of any kind are ordered by streams alone."""
        del kind
        return False

    def begin_step(self, step: int) -> None:
        """Peers see finished steps only."""

    def issue(self, kind: IssueKind, units: Sequence[int], what: str, joint: JointStep | None = None) -> None:
        """Nobody need know of gathers."""
        assert joint is None, f"{what} needs all ranks"

    def wait(self, waiter: Callable[[float], bool], awaited: Awaited) -> bool:
        """Once, for as long as the runtime waits for anything."""
        del awaited
        return waiter(self.timeout_s)

    def drain(self, waiter: Callable[[float], bool], *, is_posted: bool) -> str | None:
        """Once, for as long as the runtime waits for anything."""
        del is_posted
        return None if waiter(self.timeout_s) else f"it did not end within {self.timeout_s:.1f} s"

    def fail(self, error: BaseException, what: str) -> CommError | None:
        """Peers are not concerned."""
        del error, what
        return None

    def compute_failed(self, error: BaseException, what: str) -> None:
        """Nobody computes for others."""
        raise AssertionError(what) from error

    def agree_on_capture(self, group: Group, sequences: Sequence[tuple[str, str]]) -> None:
        """Captures are local."""
