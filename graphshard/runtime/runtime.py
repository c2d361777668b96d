"""The runtime: a plan's programs bound to one rank's memory, run eagerly or captured and replayed.

    verify -> reserve -> load -> bind -> capture -> step

All sizes are known from the plan; a step allocates nothing. One lock serialises threads; the compute stream orders
runs, replays and prefetches.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from types import TracebackType

from torch import Tensor

from graphshard._core import Calls, Driver, DriverError
from graphshard.comm.alignment import Alignment
from graphshard.comm.control import CLOSED, ControlTable
from graphshard.comm.doorkeeper import Doorkeeper
from graphshard.comm.group import Group
from graphshard.comm.transport import Transport
from graphshard.core.errors import GraphshardError, SpecError
from graphshard.core.specs import BufferRole, StepShape
from graphshard.runtime.admission import Admission
from graphshard.runtime.bind import BlockGround, Hooks, gathers_text
from graphshard.runtime.binding import leave_behind
from graphshard.runtime.borrowing import Borrowers
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.compute import ComputeTable, refuse_inside_segment
from graphshard.runtime.cuda.compute import CudaCompute
from graphshard.runtime.cuda.in_flight import InFlight
from graphshard.runtime.cuda.torch_cuda import TorchCuda
from graphshard.runtime.cuda.watchdog import Watchdog
from graphshard.runtime.folding import Folding
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.loop import StepLoop, StepObserver, StepPieces, StepTurn
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.model import StepState
from graphshard.runtime.saving import Saving

_log = logging.getLogger("graphshard")


class Runtime(Folding, Saving):
    """One rank's runtime. Built by `graphshard.compile`; close it, or use it as a context manager."""

    def __init__(
        self,
        compiled: Compiled,
        *,
        group: Group,
        driver: Driver,
        memory: RuntimeMemory,
        transport: Transport,
        alignment: Alignment,
        control: ControlTable,
        compute: ComputeTable,
        hooks: Hooks,
        torch_cuda: TorchCuda | None = None,
        blocks: BlockGround | None = None,
    ) -> None:
        """With `torch_cuda` compute is torch's on a GPU; else it is the host's."""
        super().__init__(
            compiled,
            rank=group.rank,
            driver=driver,
            memory=memory,
            transport=transport,
            alignment=alignment,
            hooks=hooks,
            blocks=blocks,
        )
        self.group = group
        self._control, self._compute = control, compute
        self.turn = StepTurn(self.timeout_s)
        if torch_cuda is not None:
            self._cuda = CudaCompute(compute, torch_cuda, tuple(self._streams.values()), timeout_s=self.timeout_s)
            self._in_flight = InFlight(driver)
            if alignment.watched is not None:
                watched = alignment.watched
                self._watchdog = Watchdog(self.turn.lock, self._in_flight, watched, self.timeout_s, hooks.look_s)
        self.observer: StepObserver | None = None
        """Told of the layers of steps that run as loops (`begin_step`); set by `attach`."""
        self._graphs: dict[StepShape, StepGraph] = {}
        self._eager: dict[StepShape, Calls] = {}
        self._pieces: dict[StepShape, StepPieces] = {}
        self._must_exit: str | None = None
        self.borrowers = Borrowers()
        self._bind_folds()
        self.let_in(None)

    # --- stepping ---

    def run(self, batch_size: int, tokens_per_sequence: int = 1) -> dict[str, Tensor]:
        """Run one step eagerly on what the inputs hold now; returns the outputs (static tensors).

        Order, blocking and errors are those of `StepGraph.replay`: it is the same list, issued instead of launched.
        """
        refuse_inside_segment("run")
        shape = self._known(StepShape(batch_size, tokens_per_sequence))
        with self.turn.lock:
            self._check_ready()
            self.at_step_boundary()
            bound = self._bound[shape]
            if shape not in self._eager:
                told = self._tell_of_compute(shape, bound)
                self._eager[shape] = Calls([]) if self._cuda else self._compute.eager(shape, bound.computes, told)
            calls, cuda = self._eager[shape], self._cuda
            self.step(shape, bound, lambda: cuda.issue(shape, bound) if cuda else bound.op_list.issue(calls), calls)
        return self.buffers(shape, "output")

    def capture(self, shapes: Iterable[StepShape] = ()) -> None:
        """Capture the step shapes (all of the plan's if none are given), largest first; captured ones are kept.

        A model's folds are captured beside each.

        Local under `pull`. Under a collective transport, and for step shapes with tensor-parallel blocks, all ranks
        call it alike, and compare what they capture.

        Raises:
            DeviceError: a segment does what no capture permits, or another capture is open in this process.
            CommError: a window was remapped, and does not hold what its owner loaded; or ranks capture unlike
                gathers, or a rank gave up.
        """
        refuse_inside_segment("capture")
        with self.turn.lock:
            self._check_ready()
            self.turn.wait_until_free()
            if self._generations != self._transport.generations():
                self._bind_again()
            if self.moved():
                self.close_graphs()
            asked = sorted(map(self._known, shapes or self.programs), reverse=True)
            due = [shape for shape in asked if shape not in self._graphs or self._graphs[shape].is_closed]
            self.agree_on_capture(due)
            for shape in due:
                bound = self._bound[shape]
                self._capture_fold(shape)
                self._graphs[shape] = StepGraph(self, shape, bound, self._capturer(shape, bound))
            self.note_visible()

    def agree_on_capture(self, shapes: Sequence[StepShape]) -> None:
        """Segments of `shapes` are about to be recorded, or captured: meet and compare where `capture` is collective.

        Used by captures, with the lock held.
        """
        if any(self._bound[shape].joint is not None for shape in shapes):
            self.synchronize()  # peers record over what this rank's steps read
        self._alignment.check("a capture")
        told = [(str(shape), gathers_text(self.programs[shape])) for shape in shapes]
        self._alignment.agree_on_capture(self.group, told)

    def graph(self, batch_size: int, tokens_per_sequence: int = 1) -> StepGraph:
        """The smallest captured step that fits `batch_size` sequences of `tokens_per_sequence` tokens.

        Raises:
            SpecError: none was captured that is large enough, or that is no step shape.
        """
        self.check_open()
        wanted = StepShape(batch_size, tokens_per_sequence)
        fitting = [
            shape
            for shape in self._graphs
            if shape.batch_size >= wanted.batch_size and shape.tokens_per_sequence == wanted.tokens_per_sequence
        ]
        if not fitting:
            known = ", ".join(map(str, sorted(self._graphs))) or "none"
            raise SpecError(
                f"no captured step fits {wanted}; captured: {known}. Add it to capture_sizes, or call Runtime.capture"
            )
        return self._graphs[min(fitting)]

    def begin_step(self, batch_size: int | None = None, tokens_per_sequence: int = 1) -> StepLoop:
        """Begin a step whose layers the caller computes: `before_layer(i)`, compute, `after_layer(i)`, ..., `end()`.

        Without a batch size the plan's smallest step shape is meant. A context manager, or call `end` or `abort`; a
        step that its thread left open is given up when the thread begins the next one.

        Blocks:  while another thread's step is open, bounded by the runtime's timeout.

        Raises:
            ProgramError: this plan waits inside a layer, or shards weights outside the layers.
        """
        refuse_inside_segment("begin_step")
        shape = min(self.programs) if batch_size is None else StepShape(batch_size, tokens_per_sequence)
        with self.turn.lock:
            self._check_ready()
            self.turn.wait_for_others()
            self.at_step_boundary()
            bound = self._bound[self._known(shape)]
            if shape not in self._pieces:
                self._pieces[shape] = StepPieces(self.model, self.plan, bound)
            return StepLoop(self, shape, bound, self._pieces[shape])

    # --- ranks that come back ---

    def admit(self) -> tuple[int, ...]:
        """Take in the ranks that came back: drain, map their windows, capture again (the next step primes).

        Steps do it by themselves when they begin. Local and bounded. Step graphs and buffers that are held stay as they
        are; memory of the dead is freed when their last peer has done this. Returns the ranks taken in.

        Raises:
            CommError, DeviceError: a window cannot be mapped, or does not hold what its owner told: that rank was left
                out, and steps go on with what was mapped before.
        """
        refuse_inside_segment("admit")
        with self.turn.lock:
            self._check_ready()
            self.turn.wait_until_free()
            if not self._admission.has_news:
                return ()
            self._drain()
            admitted, failures = self._admission.take_in(self.check_gathers)
            if self._generations != self._transport.generations():
                self._bind()
                for shape, graph in self._graphs.items():
                    graph.capture_again(self._bound[shape])
                self._admission.drop_retired()
            if failures:
                raise failures[0]
            return admitted

    def at_step_boundary(self) -> None:
        """No step runs: `admit` whoever came back, and warn of one that is not as it should be. Used by steps."""
        self.check_open()
        if self._admission.has_news and self.turn.is_free:
            try:
                self.admit()
            except (GraphshardError, DriverError) as error:
                warnings.warn(f"rank {self.rank} goes on without a rank that came back: {error}", stacklevel=3)

    def let_in(self, doorkeeper: Doorkeeper | None) -> None:
        """Own `doorkeeper`, whose newcomers are taken in from now on."""
        self._admission = Admission(doorkeeper, self._control, self._transport.remappable, self._slots)

    def pinned_by_dead(self) -> dict[int, int]:
        """The bytes of windows of ranks that died, by rank: their memory lives on while a peer maps it."""
        self.check_open()
        return dict.fromkeys(self._control.dead(), self.layout.shard_bytes)

    # --- what is where ---

    @property
    def num_steps(self) -> int:
        """Steps launched so far, eager and captured."""
        return self._num_steps

    @property
    def num_primes(self) -> int:
        """Gathers that the host issued outside programs so far."""
        self.check_open()
        return self._slots.num_primes

    @property
    def held(self) -> tuple[int | None, ...]:
        """The unit that each slot holds between steps (None: nothing can be relied on)."""
        self.check_open()
        return self._slots.held

    def buffers(self, shape: StepShape, role: BufferRole) -> dict[str, Tensor]:
        """The static tensors of one role as a step of `shape` sees them."""
        self.check_open()
        return self._memory.buffers(self._known(shape), role)

    def state(self, shape: StepShape) -> StepState:
        """The tensors of steps of `shape`, as segments see them."""
        self.check_open()
        return self._compute.state(self._known(shape))

    @property
    def memory(self) -> RuntimeMemory:
        """What was reserved; slots show a unit's bytes during its residency only."""
        self.check_open()
        return self._memory

    # --- the end ---

    def close(self) -> None:
        """Give everything back. Local, bounded, idempotent; peers may go on.

        What was enqueued ends first. If it does not, because it needs a peer that is gone, say, that is logged (logger
        `graphshard`), and so is what cannot be given back then (`must_exit`).

        # Note [teardown order]: graphs hold addresses, so they go first; then the op lists with their streams, then
        # peers' windows, then our own memory (its views keep it mapped until the last of them dies).
        """
        refuse_inside_segment("close")
        if os.getpid() != self._owner_pid:  # a fork: streams, words and the control page are the parent's
            self._closed = True
            return
        with self.turn.lock:
            if self._closed:
                return
            if self._watchdog is not None:
                self._watchdog.close()
            self.turn.give_up()
            self._closed = True
            self._admission.close()
            alone = self._alignment.broken if self._is_cut_off else None
            if alone is None:  # else what is enqueued waits for peers that will not come
                self.follow_caller()  # who may read outputs still
                alone = self._drain()
                if alone is not None:
                    _log.warning("rank %d closes before what it enqueued has ended: %s", self.rank, alone)
            for graph in self._graphs.values():
                graph.close()
            self._graphs.clear()
            self._close_folds()
            if self._cuda is not None:
                self._cuda.close()
            self._eager.clear()
            self._bound.clear()
            self._control.mine.set_state(CLOSED)
            self._embedding = None
            if self._blocks is not None:
                self._blocks.exchange.close()
            self._transport.close()
            self._must_exit = self._transport.must_exit
            if self._must_exit is not None:
                _log.error("rank %d: this process must exit: %s (%s)", self.rank, self._must_exit, alone)
                leave_behind(
                    self._blocks, self._streams, self._memory, self._done, self._slots, self._in_flight, self._folds
                )
            self._streams.clear()
            self._folds = self._lender = self._blocks = None
            del self._admission, self._slots, self._compute, self._ground, self._done, self._memory

    @property
    def must_exit(self) -> str | None:
        """Why this process must end to be rid of what its closed runtime left; None if it need not."""
        return self._must_exit

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _bind_again(self) -> None:
        """Bind to the windows as they are mapped now; what was captured over other mappings is closed."""
        self.close_graphs()
        self._slots.rebind()
        self._bind()
        self.check_gathers()
