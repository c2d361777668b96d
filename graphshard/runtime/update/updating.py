"""Online update: all ranks write new weights into the memory that they have, or none does, or all refuse to go on.

    stage    tensors become this rank's bytes, in host memory, while steps go on; ranks compare what they were given
    stop     no step begins, all that was enqueued has ended, on every rank                     -> decision: write
    write    staged bytes go to their places; every unit is gathered once and compared          -> decision: done

# Note [decisions]: each is a word in memory that all ranks share (`comm.verdict`). Without it a rank whose message was
# late would turn back while another goes on. Up to the first nothing is written, and old weights stay everywhere; from
# then on the epoch is odd on all ranks until the second, and stays so if that says no, or if a rank is gone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import Tensor

from graphshard.comm.alignment import Awaited
from graphshard.comm.checksums import ChunkChecksums, checksum_of
from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.comm.verdict import Verdict
from graphshard.core.counts import which_ranks
from graphshard.core.errors import CommError, DeviceError, GraphshardError, ProgramError
from graphshard.core.specs import StepShape
from graphshard.load.accounting import check_unknown
from graphshard.load.recipe import Recipes
from graphshard.runtime.admission import Admission
from graphshard.runtime.binding import refuse_fork
from graphshard.runtime.borrowing import Borrowers
from graphshard.runtime.compute import ComputeTable, refuse_inside_segment
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.loop import StepObserver
from graphshard.runtime.memory import BufferRow
from graphshard.runtime.stepping import Stepping
from graphshard.runtime.update.agreement import compare_staged
from graphshard.runtime.update.outside import PARAMETER, Outside
from graphshard.runtime.update.places import places_of
from graphshard.runtime.update.report import UpdateReport, report_of
from graphshard.runtime.update.selection import Selection, select
from graphshard.runtime.update.staging import StagedPiece, Staging
from graphshard.runtime.update.visible import moved_rows, moved_text

STAGES = ("staging", "staged", "stopping", "stopped", "decided", "writing", "written", "checked")
"""What `Hooks.update` is told, in this order: after each tensor; all are staged; no step begins any more; nothing runs
here; all ranks have stopped; after each piece; all is written; all was gathered and compared."""
_STAGING = "update: staging"
_LOOK_S = 0.2
NUM_OLD_STAGES = 4
"""Until the end of this many stages a failure leaves the old weights; later ones leave none."""


@dataclass
class _Attempt:
    """One update on one rank."""

    group: Group
    epoch: int
    """Before it."""
    num_taken: int = 0
    """Tensors that have come."""
    num_written: int = 0
    """Pieces written, and chunks hashed after it."""
    looked: float = -math.inf
    """When peers were last looked at."""
    seconds: dict[str, float] = field(default_factory=dict)
    checksums: ChunkChecksums | None = None
    """Of what was written, on all ranks."""
    resting: ExitStack = field(default_factory=ExitStack)
    """Closed when the update is over: whoever borrows weights goes on then."""

    def look_at_peers(self) -> None:
        """CommError if a peer gave up or died, so that nobody stages for nothing; a few times a second."""
        now = time.monotonic()
        if now - self.looked < _LOOK_S:
            return
        self.looked = now
        hopeless = self.group.why_hopeless(_STAGING)
        if hopeless is not None:
            raise CommError(hopeless)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = time.perf_counter() - begin


class Updating(Stepping):
    """The base of `Runtime` that changes weights between steps."""

    group: Group
    recipes: Recipes = MappingProxyType({})
    """How weights are made of a checkpoint's tensors, at each update as at load; of a module's, may be set."""
    ignore: str | Sequence[str] = ()
    """Patterns of tensors that no weight is made of, and that may come nevertheless; may be set."""
    outside = Outside()
    """What an attached module has beside."""
    observer: StepObserver | None
    _admission: Admission
    _compute: ComputeTable
    _graphs: dict[StepShape, StepGraph]
    borrowers: Borrowers
    """Who reads resident weights of this runtime in their place."""
    _is_updating = False
    _visible: tuple[BufferRow, ...] = ()
    """Where everything was that graphs see, when they were captured."""

    @property
    def epoch(self) -> int:
        """The version of the weights: even, 2 more after each update, also of those that are borrowed.

        Odd: of no version, see `update`.
        """
        return self._control.mine.epoch

    def set_epoch(self, epoch: int) -> None:
        """Used where weights of this runtime that another one owns are written."""
        self._control.mine.set_epoch(epoch)

    def borrow_from(self, lender: Updating) -> None:
        """Weights of this runtime are `lender`'s: this one needs it, and rests while it writes them."""
        self._lender = lender
        lender.borrowers.add(self)

    def buffer_table(self) -> tuple[BufferRow, ...]:
        """Everything a captured graph can see, where it lies. Equal before and after any step and any update."""
        self.check_open()
        return (*self._memory.buffer_table(), *self._compute.rows(), *self.outside.rows())

    def update(
        self,
        tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        only: str | Iterable[str] | None = None,
        keep: str | Iterable[str] = (),
    ) -> UpdateReport:
        """Put new weights in the place of the old ones, on all ranks or on none. Collective, under both transports.

        Steps go on while tensors come; then they wait, bounded, until the weights are written. Addresses, graphs and
        padding stay as they are. What slots held is forgotten, prefetches included.

        Args:
            tensors: (name, tensor) with the checkpoint's names, whole, the same on all ranks; taken one at a time.
            only: patterns of the weights that are updated; None: all. Each of them must come completely.
            keep: patterns of weights that are declared to keep the bytes they have.

        Order:   after everything that this runtime was asked to do before.
        Blocks:  the host; each meeting of the ranks is bounded by the group's timeout, where a rank that brings forward
                 what is awaited (tensors come, bytes are written) is waited for.
        Capture: no.

        Raises:
            LoadError: tensors are missing, unknown, given twice, or of another dtype or shape.
            SpecError: `only` or `keep` match nothing, or take apart what belongs together.
            CommError, DeviceError, ProgramError: a rank did not come, died, got other bytes, has a step open, ...
                The same error on every rank, which says whether the old weights stay. If they do not, `epoch` is odd
                everywhere, and whatever needs weights is refused until a complete update has ended well.
        """
        refuse_inside_segment("update")
        refuse_fork(self._owner_pid)
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        with self._alone(), closing(self._whole_group()) as group:
            attempt = _Attempt(group, self.epoch)
            with attempt.timed("staging"), self._unwritten(attempt):
                selection, staging = group.agree(
                    _STAGING, lambda: self._stage(attempt, pairs, only, keep), progress=lambda: attempt.num_taken
                )
                compare_staged(group, attempt.epoch, selection, staging.checksums)
                may_write, is_done = Verdict.exchange(group, ["to write", "that the update is done"])
            with self.turn.lock, attempt.resting:
                self._stop(attempt, may_write)
                self._write(attempt, staging, is_done)
            return report_of(self.epoch, selection, staging, attempt.seconds)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One update at a time; another thread's waits."""
        with self._updating:
            if self._is_updating:
                raise ProgramError("update was called by what gives the tensors of an update: end that one first")
            self._is_updating = True
            try:
                yield
            finally:
                self._is_updating = False

    @contextmanager
    def _unwritten(self, attempt: _Attempt) -> Iterator[None]:
        """Errors of the block say that the old weights stay."""
        try:
            yield
        except GraphshardError as error:
            is_even = attempt.epoch % 2 == 0
            stays = f"the weights of epoch {attempt.epoch} stay" if is_even else "the weights stay as they are"
            raise type(error)(f"{error}; nothing was written: {stays}") from error

    def _whole_group(self) -> Group:
        """All ranks, for one update: where it fails the group that the server has is as it was."""
        if isinstance(self.group, Newcomer):
            raise CommError(
                f"update: rank {self.rank} came back to job {self.group.job}, and has no part in what its ranks do "
                "together: start all ranks anew with the new weights"
            )
        group = self.group.subgroup(range(self.group.world_size))
        assert group is not None
        return group

    # --- stage ---

    def _stage(
        self,
        attempt: _Attempt,
        tensors: Iterable[tuple[str, Tensor]],
        only: str | Iterable[str] | None,
        keep: str | Iterable[str],
    ) -> tuple[Selection, Staging]:
        self.check_open()
        self._alignment.check("an update")
        if self._lender is not None:
            self._lender.check_lends(self.model.borrowed)
        specs = {weight.name: weight for weight in self.model.owned} | self.outside.specs()
        check_unknown("recipes", self.recipes, {**specs, **dict.fromkeys(self.model.borrowed)})
        selection = select(list(specs), self.recipes, only, keep, self.model.borrowed)
        if self._torn is not None and selection.kept:
            raise ProgramError(
                f"only a complete update gives weights of no version (epoch {self.epoch}) one again, and this leaves "
                f"out {len(selection.kept)}, {selection.kept[0]} first: update without only and keep"
            )
        places = places_of(self.layout, self.rank) | self.outside.places()

        def on_tensor() -> None:
            attempt.num_taken += 1
            attempt.look_at_peers()
            self.hooks.update("staging")

        is_fleeting, borrowed = self._memory.is_in_slots, self.model.borrowed
        staging = Staging(specs, self.recipes, self.ignore, selection, places, on_tensor, is_fleeting, borrowed)
        staging.take(tensors)
        self.hooks.update("staged")
        return selection, staging

    # --- stop; from here on the lock is held ---

    def _stop(self, attempt: _Attempt, may_write: Verdict) -> None:
        """Nothing runs on any rank, or the old weights stay and GraphshardError says why."""
        with attempt.timed("stopping"), self._unwritten(attempt):
            failure = self._failure_of(lambda: self._stop_together(attempt))
            verdict = may_write.settle(failure)
            if verdict is not None:
                self._control.mine.set_epoch(attempt.epoch)
                raise verdict from failure

    def _stop_together(self, attempt: _Attempt) -> None:
        moved = attempt.group.agree("update: stopping", lambda: self._stop_here(attempt))
        self._refuse_moved(attempt.group, moved)

    def _stop_here(self, attempt: _Attempt) -> list[str]:
        """This rank runs nothing; what moved of what its graphs see."""
        self.check_open()
        self._alignment.check("an update")
        self.turn.wait_until_free()
        if self.observer is not None:
            self.observer.before_step()  # the module's weights are where they were bound
        self._control.mine.set_epoch(attempt.epoch | 1)  # C begins nothing from here on
        self.hooks.update("stopping")
        self.end_all("the end of what was issued before an update")
        self.borrowers.stop(self, attempt.epoch, attempt.resting)
        self.hooks.update("stopped")
        return self.moved()

    def end_all(self, what: str) -> None:
        """Wait for all that was issued, whoever issued it; `what` says so in errors. With the lock held."""
        self.follow_caller()
        self._leave_last_use()
        self.synchronize()
        awaited = Awaited(what, self._num_steps, str)
        for stream in self._streams.values():
            if not self._alignment.wait(stream.synchronize, awaited):
                raise self.late_error(awaited.what, "")

    # --- write ---

    def _write(self, attempt: _Attempt, staging: Staging, is_done: Verdict) -> None:
        """All is written on all ranks, or the epoch stays odd and GraphshardError says why."""
        self._torn = CommError(f"the update from epoch {attempt.epoch} was broken off")
        with attempt.timed("writing"):
            failure = self._failure_of(lambda: self._write_together(attempt, staging))
            verdict = is_done.settle(failure)
        if verdict is not None:
            self._torn = verdict
            raise type(verdict)(f"{verdict}; {self._torn_text()}") from failure
        assert attempt.checksums is not None
        self._admission.renew(attempt.checksums.by_rank)
        if self._embedding is not None:
            self._embedding.hand_over_prefetch()
        self._torn = None
        self._control.mine.set_epoch((attempt.epoch | 1) + 1)

    def _write_together(self, attempt: _Attempt, staging: Staging) -> None:
        group = attempt.group
        checksums = group.agree(
            "update: writing", lambda: self._write_here(attempt, staging.pieces), progress=lambda: attempt.num_written
        )
        attempt.checksums = ChunkChecksums.exchange(group, self.layout, checksums)
        self._transport.adopt_checksums(attempt.checksums)
        self._slots.forget()
        moved = group.agree(
            "update: check of gathered units", self._check_here, progress=lambda: self._slots.num_primes
        )
        self._refuse_moved(group, moved)

    def _write_here(self, attempt: _Attempt, pieces: Iterable[StagedPiece]) -> list[int]:
        """Write this rank's pieces; the checksum of each of its chunks."""
        self.hooks.update("decided")
        for place, data in pieces:
            if place.area == "outside":
                writing = self.outside.writing(place)
            else:
                writing = self._memory.writing(place.area, place.begin, place.num_bytes)
            with writing as out:
                out[:] = data.numpy().data
            attempt.num_written += 1
            self.hooks.update("writing")
        self.hooks.update("written")
        checksums = []
        for unit in self.layout.units:
            checksums.append(checksum_of(self._memory.chunk(unit)))
            attempt.num_written += 1
        return checksums

    def _check_here(self) -> list[str]:
        """Gather every unit once; what moved of what this rank's graphs see."""
        torn, self._torn = self._torn, None  # the lock is held: nobody else takes that for a version
        try:
            self.check_gathers()
        finally:
            self._torn = torn
        self.hooks.update("checked")
        return self.moved()

    # --- what graphs see ---

    def note_visible(self) -> None:
        """Graphs were captured, or a module attached: what they see may not move from now on. With the lock held."""
        self._visible = self.buffer_table()

    def moved(self) -> list[str]:
        """What moved of what captured graphs, or an attached module, see. With the lock held."""
        return moved_rows(self._visible, self.buffer_table())

    def close_graphs(self) -> None:
        """Give all captured graphs back; a replay says so, and `Runtime.capture` makes new ones. With the lock held."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._eager.clear()
        self._visible = tuple(row for row in self._visible if row.role == PARAMETER)

    def _refuse_moved(self, group: Group, moved: list[str]) -> None:
        """DeviceError if something moved on a rank (collective). That rank's graphs are closed: they read what is gone.

        Under a collective transport all ranks' are, since they capture alike.
        """
        told = [value for value, _ in group.all_gather(moved, name="update: buffers that graphs see")]
        ranks = [rank for rank, rows in enumerate(told) if rows]
        if not ranks:
            return
        if self.rank in ranks or self._transport.is_collective:
            self.close_graphs()
        rows = told[ranks[0]]
        assert isinstance(rows, list)
        raise DeviceError(
            f"update: on {which_ranks(ranks)} {moved_text(rows)}. Graphs there are closed: put back what was moved of "
            "a module, call Runtime.capture, and update again"
        )

    # --- failures ---

    def _failure_of(self, step: Callable[[], None]) -> GraphshardError | None:
        """What `step` raised; peers wait for this rank's word, so nothing gets past."""
        try:
            step()
        except GraphshardError as error:
            return error
        except BaseException as error:
            failure = CommError(f"update: rank {self.rank} was interrupted: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return failure
        return None
