"""The runtime: a plan's programs bound to one rank's memory, run eagerly or captured and replayed.

    verify -> reserve -> load -> bind -> capture -> step

All sizes are known from the plan; a step allocates nothing. One lock serialises threads; the compute stream orders
runs, replays and prefetches.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from torch import Tensor

from graphshard._core import Calls, Driver, Memory, Stream, Word
from graphshard.comm.control import ControlTable
from graphshard.comm.group import Group
from graphshard.comm.pull import PullTransport
from graphshard.core.errors import CommError, DeviceError, ProgramError, SpecError
from graphshard.core.ops import AgLaunch
from graphshard.core.specs import BufferRole, StepShape
from graphshard.runtime.bind import BoundProgram, Hooks, bind_program
from graphshard.runtime.capture_lock import capture_lock
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.compute import ComputeTable
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.loop import StepLoop, StepObserver, StepPieces, StepTurn
from graphshard.runtime.memory import BufferRow, RuntimeMemory
from graphshard.runtime.model import StepState
from graphshard.runtime.slots import SlotTable


class Runtime:
    """One rank's runtime. Built by `graphshard.compile`; close it, or use it as a context manager."""

    def __init__(
        self,
        compiled: Compiled,
        *,
        group: Group,
        driver: Driver,
        memory: RuntimeMemory,
        transport: PullTransport,
        control: ControlTable,
        compute: ComputeTable,
        hooks: Hooks,
        timeout_s: float,
    ) -> None:
        self.model, self.plan, self.layout = compiled.model, compiled.plan, compiled.layout
        self.programs = dict(compiled.programs)
        self.group, self.driver, self.hooks, self.timeout_s = group, driver, hooks, timeout_s
        self._memory, self._transport, self._control, self._compute = memory, transport, control, compute
        self._lock = threading.RLock()
        self.turn = StepTurn(self._lock, timeout_s)
        self.observer: StepObserver | None = None
        """Told of the layers of steps that run as loops (`begin_step`); set by `attach`."""
        self._streams: dict[str, Stream] = {}
        self._graphs: dict[StepShape, StepGraph] = {}
        self._bound: dict[StepShape, BoundProgram] = {}
        self._eager: dict[StepShape, Calls] = {}
        self._pieces: dict[StepShape, StepPieces] = {}
        self._num_steps = 0
        self._closed = False
        self._owner_pid = os.getpid()
        self._late = False
        self._generations: tuple[int, ...] = ()
        self._reserve_streams()
        self._bind()

    # --- stepping ---

    def run(self, batch_size: int, tokens_per_sequence: int = 1) -> dict[str, Tensor]:
        """Run one step eagerly on what the inputs hold now; returns the outputs (static tensors).

        Order, blocking and errors are those of `StepGraph.replay`: it is the same list, issued instead of launched.
        """
        shape = self._known(StepShape(batch_size, tokens_per_sequence))
        with self._lock:
            self._check_ready()
            bound = self._bound[shape]
            if shape not in self._eager:
                self._eager[shape] = self._compute.eager(shape, bound.computes)
            calls = self._eager[shape]
            self.step(shape, bound, lambda: bound.op_list.issue(calls), calls)
        return self.buffers(shape, "output")

    def capture(self, shapes: Iterable[StepShape] = ()) -> None:
        """Capture the step shapes (all of the plan's if none are given), largest first; captured ones are kept.

        Raises:
            DeviceError: a segment does what no capture permits, or another capture is open in this process.
            CommError: a window was remapped, and does not hold what its owner loaded.
        """
        with self._lock:
            self._check_ready()
            self.turn.wait_until_free()
            if self._generations != self._transport.generations():
                self._bind_again()
            for shape in sorted(map(self._known, shapes or self.programs), reverse=True):
                if shape in self._graphs and not self._graphs[shape].is_closed:
                    continue
                bound = self._bound[shape]
                with capture_lock(f"step shape {shape}", self.timeout_s):
                    calls = self._compute.captured(shape, bound.computes)
                    self._graphs[shape] = StepGraph(self, shape, bound, calls, self.plan.executor)

    def graph(self, batch_size: int, tokens_per_sequence: int = 1) -> StepGraph:
        """The smallest captured step that fits `batch_size` sequences of `tokens_per_sequence` tokens.

        Raises:
            SpecError: none was captured that is large enough.
        """
        self.check_open()
        fitting = [
            shape
            for shape in self._graphs
            if shape.batch_size >= batch_size and shape.tokens_per_sequence == tokens_per_sequence
        ]
        if not fitting:
            known = ", ".join(map(str, sorted(self._graphs))) or "none"
            raise SpecError(
                f"no captured step fits {StepShape(batch_size, tokens_per_sequence)}; captured: {known}. "
                "Add it to capture_sizes, or call Runtime.capture"
            )
        return self._graphs[min(fitting)]

    def prefetch(self, batch_size: int, tokens_per_sequence: int = 1) -> None:
        """Gather what the next step of this shape expects in its slots, now, on a stream of its own.

        Order:   after the last step, beside whatever comes next on other streams; the step waits for it.
        Blocks:  no.
        Capture: no: it is the part of a step that lies outside its graph.
        """
        shape = self._known(StepShape(batch_size, tokens_per_sequence))
        with self._lock:
            self._check_ready()
            self.turn.wait_until_free()
            self._check_generations(shape)
            self._slots.prefetch(self.programs[shape])

    def begin_step(self, batch_size: int | None = None, tokens_per_sequence: int = 1) -> StepLoop:
        """Begin a step whose layers the caller computes: `before_layer(i)`, compute, `after_layer(i)`, ..., `end()`.

        Without a batch size the plan's smallest step shape is meant. A context manager, or call `end` or `abort`; a
        step that its thread left open is given up when the thread begins the next one.

        Blocks:  while another thread's step is open, bounded by the runtime's timeout.

        Raises:
            ProgramError: this plan waits inside a layer, or shards weights outside the layers.
        """
        shape = min(self.programs) if batch_size is None else StepShape(batch_size, tokens_per_sequence)
        with self._lock:
            self._check_ready()
            bound = self._bound[self._known(shape)]
            if shape not in self._pieces:
                self._pieces[shape] = StepPieces(self.model, self.plan, bound)
            return StepLoop(self, shape, bound, self._pieces[shape])

    def step(
        self,
        shape: StepShape,
        bound: BoundProgram,
        launch: Callable[[], None],
        calls: Calls,
    ) -> None:
        """One step, eager or captured: prime, launch, wait for the outputs. Used by `run` and `StepGraph.replay`."""
        with self._lock:
            self.turn.wait_until_free()
            self.enter_step(shape, bound)
            try:
                launch()
                self.finish_step(shape, bound, calls, calls is self._eager.get(shape))
            except BaseException:
                self._slots.forget()
                raise

    def enter_step(self, shape: StepShape, bound: BoundProgram) -> None:
        """Make the slots hold what the program expects. Used by steps, with the lock held."""
        self._check_ready()
        self._check_generations(shape)
        self._slots.enter(bound.program)
        self._done.store(0)

    def finish_step(self, shape: StepShape, bound: BoundProgram, calls: Calls, is_eager: bool) -> None:
        """All is enqueued: wait for the outputs. Used by steps, with the lock held."""
        self._slots.leave(bound.program)
        self._num_steps += 1
        if not self._done.wait(1, self.timeout_s):
            raise self.late_error(shape, bound, is_eager)
        calls.check()
        self._control.mine.set_progress(self._num_steps, len(bound.program.ops))

    def abort_step(self, bound: BoundProgram) -> None:
        """A part of the program was enqueued and no more will be. Used by loops, with the lock held.

        What slots hold is forgotten once the streams are done: the next gathers may run on other streams.
        """
        self._slots.forget()
        deadline = time.monotonic() + self.timeout_s
        for stream in () if self._late else bound.streams:
            if not stream.synchronize(max(0.0, deadline - time.monotonic())):
                self._late = True

    # --- what is where ---

    @property
    def rank(self) -> int:
        """This process's (or thread's) rank in the shard group."""
        return self.group.rank

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

    def buffer_table(self) -> tuple[BufferRow, ...]:
        """Everything a captured graph can see: name, role, address and bytes. Equal before and after any step."""
        self.check_open()
        return self._memory.buffer_table()

    # --- the end ---

    def close(self) -> None:
        """Give everything back. Local, bounded, idempotent; peers may go on.

        # Note [teardown order]: graphs hold addresses, so they go first; then the op lists with their streams, then
        # peers' windows, then our own memory (its views keep it mapped until the last of them dies).
        """
        if os.getpid() != self._owner_pid:  # a fork: streams, words and the control page are the parent's
            self._closed = True
            return
        with self._lock:
            if self._closed:
                return
            self.turn.give_up()
            self._closed = True
            deadline = time.monotonic() + self.timeout_s
            for stream in self._streams.values():
                stream.synchronize(max(0.0, deadline - time.monotonic()))
            for graph in self._graphs.values():
                graph.close()
            self._graphs.clear()
            self._eager.clear()
            self._bound.clear()
            self._control.mine.set_state(2)
            self._transport.close()
            self._streams.clear()
            del self._slots, self._compute, self._done, self._memory

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---

    def _reserve_streams(self) -> None:
        names = ["compute", "copy", *(f"copy{i}" for i in range(1, self.plan.num_copy_streams)), "copy_own", "prefetch"]
        self._streams = {name: Stream(self.driver) for name in names}
        self._done = Word(Memory(self.driver, 4))
        self._slots = SlotTable(
            self.driver,
            len(self.layout.slots),
            self._streams["compute"],
            self._streams["prefetch"],
            self._memory,
            self._transport,
            self.hooks,
        )

    def _bind(self) -> None:
        by_digest: dict[str, BoundProgram] = {}
        for shape, program in self.programs.items():
            if program.digest not in by_digest:
                by_digest[program.digest] = bind_program(
                    self.driver,
                    program,
                    self._streams,
                    self._memory,
                    self._transport,
                    num_copy_streams=self.plan.num_copy_streams,
                    done=self._done,
                    hooks=self.hooks,
                )
            self._bound[shape] = by_digest[program.digest]
        self._generations = self._transport.generations()

    def _bind_again(self) -> None:
        """Bind to the windows as they are mapped now; what was captured over other mappings is closed."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._eager.clear()
        self._slots.rebind()
        self._bind()
        self.check_gathers()

    def gather_now(self, unit: int, slot: int) -> None:
        """Have `unit` in `slot` between steps, with the lock held; the host waits for its bytes. Local."""
        self._check_ready()
        if self._slots.held[slot] != unit:
            self._slots.gather([AgLaunch(unit, slot, "prefetch")])
        for stream in (self._streams["compute"], self._streams["prefetch"]):
            if not stream.synchronize(self.timeout_s):
                raise CommError(
                    f"rank {self.rank} waited {self.timeout_s:.1f} s for unit {unit} outside a step; "
                    "a peer's memory does not answer"
                )

    def check_gathers(self) -> None:
        """Gather every unit once and compare each rank's chunk with its owner's checksum.

        Raises:
            CommError: naming the reading rank, the source rank and the unit.
        """
        for slot, unit in {r.unit: (r.slot, r.unit) for r in self.plan.residencies}.values():
            self.gather_now(unit, slot)
            self._transport.verify_unit(unit, self._memory.slot(slot).numpy().data)
        self._slots.forget()

    def _known(self, shape: StepShape) -> StepShape:
        if shape not in self.programs:
            known = ", ".join(map(str, sorted(self.programs)))
            raise SpecError(f"step shape {shape} is not among the plan's: {known}; add it to capture_sizes")
        return shape

    def check_open(self) -> None:
        """ProgramError if the runtime was closed, DeviceError in a forked child."""
        if os.getpid() != self._owner_pid:
            raise DeviceError(
                f"the runtime of process {self._owner_pid} was used in process {os.getpid()}, a fork of it: "
                "start ranks by spawn, and compile in each"
            )
        if self._closed:
            raise ProgramError("this runtime is closed; compile the model again")

    def _check_ready(self) -> None:
        self.check_open()
        if self._late:
            if not all(stream.is_idle() for stream in self._streams.values()):
                raise DeviceError(
                    f"rank {self.rank}: the step that did not end within {self.timeout_s:.1f} s is still running; "
                    "close the runtime, or wait for it"
                )
            self._late = False

    def _check_generations(self, shape: StepShape) -> None:
        if self._generations != self._transport.generations():
            raise DeviceError(
                f"step shape {shape} was bound to windows that have been remapped or closed since: its addresses are "
                "stale; call Runtime.capture, which binds and captures again"
            )

    def late_error(self, shape: StepShape, bound: BoundProgram, is_eager: bool) -> CommError:
        """The step did not get on in time; the next one is refused until it has ended."""
        self._late = True
        where = bound.first_pending() if is_eager else ""
        return CommError(
            f"rank {self.rank} waited {self.timeout_s:.1f} s for step {self._num_steps} of shape {shape} "
            f"({'eager' if is_eager else 'graph'}){where}; "
            f"peers: {self._control.describe()}"
        )
