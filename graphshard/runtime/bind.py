"""Binding: a program's lowered ops become driver calls on this rank's addresses, streams and events.

A `BoundProgram` is one list for both modes: `OpList.issue` runs it eagerly, `OpList.capture` records the same calls.
What a compute op does is not part of the list; it is handed over at issue or capture, by index (`_core.Calls`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphshard._core import Communicator, Driver, OpList, Stream, Word
from graphshard.comm.alignment import JointStep, ProgressWords
from graphshard.comm.transport import Activations, BoundOp, Transport
from graphshard.core.lowering import ActOp, ActSum, Compute, CopyRun, Lowered, LoweredOp, Record, lower
from graphshard.core.ops import ActGather, AgLaunch, ReduceScatter
from graphshard.core.program import Program
from graphshard.core.specs import StepShape
from graphshard.runtime.activations import ActivationMemory, joint_step
from graphshard.runtime.compute import ComputeOp
from graphshard.runtime.memory import RuntimeMemory
from graphshard.verify.ranks import collectives_of

if TYPE_CHECKING:
    from graphshard.runtime.cuda.torch_cuda import TorchCuda

POISON = 0xFF
"""NaN as float32, bfloat16, float16 and both FP8 formats: a missed wait never shows plausible numbers."""


def _nothing(stage: str) -> None:
    """What happens at a stage of an update unless a test asks for more."""


@dataclass(frozen=True)
class Hooks:
    """What tests insert into a bound list; part of no plan, digest or certificate.

    `stalls[op index]` is the address of a 32-bit word: what the op becomes waits on its stream until the word is >= 1.
    """

    poison: bool = False
    stalls: Mapping[int, int] = field(default_factory=dict)
    seed: int = -1
    """Order of the captured graph's nodes on `host`, see `_core.Graph.instantiate`."""
    skip: frozenset[int] = frozenset()
    """Units whose gathers the list lacks; waits and records for them stay."""
    fold_stall: int = 0
    """Address of a 32-bit word: folds wait on the compute stream until it is >= 1. 0: they do not."""
    prefetch_stream: Stream | None = None
    """What gathers outside programs are issued on, instead of a stream of their own."""
    torch_cuda: TorchCuda | None = None
    """What plays torch.cuda on a CUDA device without one."""
    look_s: float = 0.05
    """How often a watchdog looks."""
    update: Callable[[str], None] = field(default=_nothing)
    """Called on the updating thread as an update comes to each of its stages (`runtime.update.updating.STAGES`)."""


@dataclass(frozen=True)
class BoundProgram:
    """A program on this rank's memory and streams."""

    program: Program
    lowered: Lowered
    op_list: OpList
    computes: tuple[ComputeOp, ...]
    """What the calls given to issue or capture must do, by index."""
    sources: tuple[int, ...]
    """The program's op that each bound op comes from (-1: fork or join)."""
    streams: tuple[Stream, ...]
    gathers: tuple[int, ...]
    """The units that the list gathers, in the order in which they are issued."""
    is_collective: bool
    """Whether a gather is one collective instead of a copy a rank."""
    joint: JointStep | None = None
    """What ranks take together, if it has tensor-parallel blocks: then all step alike, whatever the transport."""

    def name_gather(self, op: int) -> str:
        """`unit 12`, for the program's op that gathers it."""
        launch = self.program.ops[op]
        if isinstance(launch, ActGather | ReduceScatter):
            return f"block {launch.block}"
        return f"unit {launch.unit}" if isinstance(launch, AgLaunch) else f"op {op}"

    def first_pending(self) -> str:
        """`; the first op that is not done is op 3 ...` of the list's latest eager issue; empty if all are done."""
        for op in self.lowered.ops:
            if isinstance(op, Record) and op.op >= 0 and not self.op_list.event_done(op.event):
                return f"; the first op that is not done is op {op.op} {self.program.ops[op.op]}"
        return ""


@dataclass(frozen=True)
class Ground:
    """What programs and gathers are bound to: one rank's memory, its streams, and how chunks come to it."""

    driver: Driver
    memory: RuntimeMemory
    transport: Transport
    streams: Mapping[str, Stream]
    """By the names that lowered lists use."""
    done: Word
    """Set to 1 by a program at its outputs."""
    num_copy_streams: int = 1
    hooks: Hooks = field(default_factory=Hooks)
    progress: ProgressWords | None = None
    """Each gather writes its op index + 1 to one word when it begins, to the other when it has ended."""
    blocks: BlockGround | None = None
    """What tensor-parallel blocks have beside that."""

    @property
    def collectives(self) -> tuple[Communicator, ...]:
        """What collective ops of a list count by index."""
        return (*self.transport.collectives, *(self.blocks.exchange.collectives if self.blocks is not None else ()))


@dataclass(frozen=True)
class BlockGround:
    """Where activations of tensor-parallel blocks lie on this rank, and how they come to the others."""

    memory: ActivationMemory
    exchange: Activations


def bind_program(program: Program, ground: Ground, shape: StepShape | None = None) -> BoundProgram:
    """Bind `program`: one list for eager runs and captures; with tensor-parallel blocks it is of one `shape`."""
    transport, hooks, progress = ground.transport, ground.hooks, ground.progress
    lowered = lower(program, num_copies=transport.num_copies, num_copy_streams=ground.num_copy_streams)
    index = {name: i for i, name in enumerate(lowered.streams)}
    ops: list[BoundOp] = []
    sources: list[int] = []
    computes: list[ComputeOp] = []
    stalled: set[int] = set()
    for op in lowered.ops:
        stream = index[op.stream]
        bound: list[BoundOp]
        if op.op in hooks.stalls and op.op not in stalled and not isinstance(op, Record):
            stalled.add(op.op)
            ops.append(("wait_value", stream, hooks.stalls[op.op], 1))
            sources.append(op.op)
        if isinstance(op, CopyRun):
            bound = _gather_ops(op, stream, ground)
            if progress is not None:
                begun, ended = (("write_value", stream, word, op.op + 1) for word in (progress.begun, progress.ended))
                bound = [begun, *bound, ended]
        elif isinstance(op, Compute | ActSum):
            bound = [("call", stream, len(computes))]
            computes.append(op)
        elif isinstance(op, ActOp):
            bound = _act_ops(op, stream, ground, shape)
        else:
            bound = [("record" if isinstance(op, Record) else "wait", stream, op.event)]
            if isinstance(op, Record) and op.event == lowered.outputs_event:
                bound.append(("write_value", stream, ground.done.address, 1))
        for one in bound:
            ops.append(one)
            sources.append(op.op)
    used = tuple(ground.streams[name] for name in lowered.streams)
    op_list = OpList(ground.driver, used, lowered.num_events, ops, ground.collectives)
    gathers = tuple(op.unit for op in program.ops if isinstance(op, AgLaunch))
    joint = joint_step(shape, program) if shape is not None else None
    return BoundProgram(
        program, lowered, op_list, tuple(computes), tuple(sources), used, gathers, transport.is_collective, joint
    )


def gathers_text(program: Program) -> str:
    """The gathers of a step, one a line, in issue order: what ranks compare before they capture (rule R10)."""
    return "\n".join(collective.text for collective in collectives_of(program))


def bind_programs(programs: Mapping[StepShape, Program], ground: Ground) -> dict[StepShape, BoundProgram]:
    """Bind each of `programs`; step shapes whose programs are equal share one list, unless activations are moved."""
    bound: dict[tuple[str, StepShape | None], BoundProgram] = {}
    keys = {shape: (program.digest, shape if program.blocks else None) for shape, program in programs.items()}
    for shape, key in keys.items():
        if key not in bound:
            bound[key] = bind_program(programs[shape], ground, key[1])
    return {shape: bound[key] for shape, key in keys.items()}


def bind_gathers(launches: Sequence[AgLaunch], ground: Ground) -> OpList:
    """Gathers that the host issues outside a program, one after another on the prefetch stream."""
    transport = ground.transport
    ops: list[BoundOp] = []
    for launch in launches:
        ops += _gather_ops(CopyRun(launch.unit, launch.slot, 0, transport.num_copies, launch.stream, -1), 0, ground)
    return OpList(ground.driver, (ground.streams["prefetch"],), 0, ops, transport.collectives)


def _gather_ops(run: CopyRun, stream: int, ground: Ground) -> list[BoundOp]:
    if run.unit in ground.hooks.skip and run.op >= 0:
        return []
    address = ground.memory.slot_address(run.slot)
    ops = ground.transport.gather_ops(run.unit, address, stream, run.begin, run.end)
    if not ground.hooks.poison:
        return ops
    # each branch poisons what it will write: branches run side by side
    return [one for op in ops for one in (_poison(op, ground.transport.world_size), op)]


def _act_ops(op: LoweredOp, stream: int, ground: Ground, shape: StepShape | None) -> list[BoundOp]:
    assert isinstance(op, ActOp) and not isinstance(op, ActSum), op
    assert ground.blocks is not None and shape is not None, "a plan with tensor-parallel blocks has memory for them"
    ops = ground.blocks.exchange.ops(op, ground.blocks.memory.place(shape, op.block), stream)
    if not ground.hooks.poison:
        return ops
    is_moving = ("copy", "all_gather")
    return [
        one for op in ops for one in ((_poison(op, ground.transport.world_size), op) if op[0] in is_moving else (op,))
    ]


def _poison(op: BoundOp, world_size: int) -> BoundOp:
    """Fill what the gather op is about to write."""
    if op[0] == "all_gather":  # peers write only when this rank's stream has come to the op
        _, stream, _, destination, _, num_bytes = op
        assert isinstance(num_bytes, int)
        return ("fill", stream, destination, POISON, num_bytes * world_size)
    _, stream, destination, *rest = op
    return ("fill", stream, destination, POISON, rest[-1] if op[0] == "copy" else rest[-2])
