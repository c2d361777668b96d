"""Folds: the segments that a model runs between steps, on a step shape's buffers, eager or captured beside its graph.

# Note [folds and gathers]: a fold reads buffers and resident weights alone, so its list has one stream, compute, and no
# gather. It does not look at the slots, waits for no other stream and posts nothing to peers: gathers that were issued
# before it run beside it, and whoever waits for them is the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from graphshard._core import Calls, Driver, Memory, Word
from graphshard.comm.alignment import Awaited
from graphshard.core.errors import SpecError
from graphshard.core.ops import Gemm, RecordOutputs
from graphshard.core.program import Program
from graphshard.core.specs import ModelSpec, StepShape
from graphshard.runtime.bind import BoundProgram, Ground, bind_program
from graphshard.runtime.capturing import Capturing
from graphshard.runtime.compute import refuse_inside_segment
from graphshard.runtime.cuda.in_flight import InFlight
from graphshard.runtime.graphs import Captured

RunMode = Literal["graph", "eager"]
FOLD_OP = 0
"""The op of a fold's program that its first segment is."""


def fold_program(model: ModelSpec, num_slots: int, num_units: int) -> Program:
    """The op list of `model`'s folds: segments of their own, after those of a step. Slots are no matter of it."""
    first = len(model.segments)
    anything: tuple[int | None, ...] = (None,) * num_slots
    ops = [Gemm(first + i, first + i + 1, fold.layer, fold.name, ()) for i, fold in enumerate(model.folds)]
    return Program(
        ops=(*ops, RecordOutputs()),
        num_slots=num_slots,
        num_units=num_units,
        num_segments=first + len(ops),
        entry=anything,
        exit=anything,
    )


@dataclass
class FoldTable:
    """The bound list of a model's folds, and what runs it at each step shape."""

    bound: BoundProgram
    done: Word
    """Set to 1 where a fold ends."""
    in_flight: InFlight | None
    """On a GPU, folds whose end the host has not waited for."""
    captured: dict[StepShape, Captured] = field(default_factory=dict)
    eager: dict[StepShape, Calls] = field(default_factory=dict)

    @staticmethod
    def bind(model: ModelSpec, ground: Ground, driver: Driver, *, is_awaited: bool) -> FoldTable:
        """`is_awaited`: the host waits for each fold."""
        done = Word(Memory.allocate_host(driver, 4))
        stalls = {FOLD_OP: ground.hooks.fold_stall} if ground.hooks.fold_stall else {}
        own = replace(ground, done=done, hooks=replace(ground.hooks, stalls=stalls), progress=None)
        bound = bind_program(fold_program(model, len(ground.memory.layout.slots), 0), own)
        return FoldTable(bound, done, None if is_awaited else InFlight(driver))

    def close_graphs(self) -> None:
        """Give the graphs back."""
        for captured in self.captured.values():
            captured.close()
        self.captured.clear()
        self.eager.clear()


class Folding(Capturing):
    """The base of `Runtime` that folds."""

    _folds: FoldTable | None = None
    """None: the model has none."""
    _num_folds = 0

    @property
    def num_folds(self) -> int:
        """Folds launched so far, eager and captured."""
        return self._num_folds

    def fold(self, batch_size: int, tokens_per_sequence: int = 1, *, run: RunMode = "graph") -> None:
        """Run the model's folds on the buffers of steps of this shape, as they are after the last step.

        Nothing is gathered; slots, and gathers on their way to them, stay as they are. Local, under both transports.

        Order:   after the last step (a tail prefetch included) and before the next one, on the compute stream; beside
                 gathers that were issued outside (`prefetch`). Returns, and orders the caller's work, as
                 `StepGraph.replay` does.
        Blocks:  the host, bounded by the runtime's timeout; on `cuda` only while two folds are in flight.
        Capture: no.

        Raises:
            SpecError: the model has no fold, the step shape is unknown, or its fold was not captured.
            ProgramError: a step of this thread is open, or the runtime was closed.
            CommError: the fold did not end in time, or a peer gave up before.
        """
        refuse_inside_segment("fold")
        shape = self._known(StepShape(batch_size, tokens_per_sequence))
        if run not in get_args(RunMode):
            raise SpecError(f"run is {run!r}; known are {', '.join(get_args(RunMode))}")
        with self.turn.lock:
            self._check_ready()
            self.turn.wait_until_free()
            folds = self._open_folds()
            what = f"fold {self._num_folds + 1} of shape {shape} ({run}), after step {self._num_steps}"
            self._alignment.check(what)
            self._make_room(folds)
            folds.done.store(0)
            with self._handing_over():
                calls = self._launch_fold(folds, shape, run)
                self._num_folds += 1
                self._finish_fold(folds, calls, what)

    def synchronize(self) -> None:
        """Wait until every step and every fold that was launched has ended: the host may read outputs and caches.

        At once on `host`; else as steps are waited for, see `Stepping.synchronize`.
        """
        super().synchronize()
        with self.turn.lock:
            if self._folds is not None and self._folds.in_flight is not None:
                self._refuse_late(self._folds.in_flight.synchronize(self._alignment.wait))

    def warm_up(self) -> None:
        """Load every kernel of compute, before peers may wait for this rank in a gather. Local. Nothing on `host`.

        Buffers hold afterwards what they held.

        Raises:
            DeviceError: a segment does what no capture should hold.
        """
        refuse_inside_segment("warm_up")
        with self.turn.lock:
            self._check_ready()
            if self._cuda is not None:
                folds = () if self._folds is None else self._folds.bound.computes
                with self._unchanged_buffers(self._cuda, "what was enqueued before the warm-up"):
                    for shape in self.programs:
                        self._cuda.warm_up(shape, (*self._bound[shape].computes, *folds))

    def close_graphs(self) -> None:
        """See `Updating.close_graphs`; those of folds go too."""
        super().close_graphs()
        self._close_folds()

    # --- inside ---

    def _bind_folds(self) -> None:
        """Bind the model's folds, once: their list holds no address that a remapped window changes."""
        if self.model.folds:
            self._folds = FoldTable.bind(self.model, self._ground, self.driver, is_awaited=self._cuda is None)

    def _capture_fold(self, shape: StepShape) -> None:
        """Capture the folds at `shape`, in the place of an older capture. With the lock held."""
        if self._folds is not None:
            captured = self._capturer(shape, self._folds.bound)(self._folds.bound)
            old = self._folds.captured.get(shape)
            self._folds.captured[shape] = captured
            if old is not None:
                old.close()

    def _close_folds(self) -> None:
        if self._folds is not None:
            self._folds.close_graphs()

    def _open_folds(self) -> FoldTable:
        if self._folds is None:
            raise SpecError(f"model {self.model.name} has no fold: nothing runs between its steps (ModelSpec.folds)")
        return self._folds

    def _make_room(self, folds: FoldTable) -> None:
        if folds.in_flight is not None:
            self._refuse_late(folds.in_flight.make_room(self._alignment.wait))

    def _refuse_late(self, late: Awaited | None) -> None:
        if late is not None:
            raise self.late_error(late.what, late.detail())

    def _launch_fold(self, folds: FoldTable, shape: StepShape, run: RunMode) -> Calls:
        """Enqueue the fold; what its compute ops call, which may raise."""
        if run == "graph":
            captured = folds.captured.get(shape)
            if captured is None:
                known = ", ".join(map(str, sorted(folds.captured))) or "none"
                raise SpecError(
                    f"the fold of step shape {shape} was not captured; captured: {known}. Call Runtime.capture, add "
                    "the shape to capture_sizes, or fold with run='eager'"
                )
            captured.launch()
            return captured.calls
        if self._cuda is not None:
            self._cuda.issue(shape, folds.bound)
            return Calls([])
        if shape not in folds.eager:
            folds.eager[shape] = self._compute.eager(shape, folds.bound.computes)
        folds.bound.op_list.issue(folds.eager[shape])
        return folds.eager[shape]

    def _finish_fold(self, folds: FoldTable, calls: Calls, what: str) -> None:
        """All is enqueued: wait for its end. It needs no peer, and other gathers may be on their way: no batch ends."""
        if self._embedding is not None:
            self._embedding.hand_over()
        awaited = Awaited(what, self._num_folds, str, number=self._step_batch, is_all=False)
        if folds.in_flight is not None:
            folds.in_flight.launched(folds.bound.streams[0], awaited)
            return
        if not self._alignment.wait(lambda timeout_s: folds.done.wait(1, timeout_s), awaited):
            raise self.late_error(awaited.what, awaited.detail())
        calls.check()
