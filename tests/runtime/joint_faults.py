"""What ranks of the tests of faults in tensor-parallel steps do: what they raise, and what works afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from block_model import BlockModel
from fault_tools import until
from joint_programs import compiled, step_wrong

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import GraphshardError
from graphshard.core.specs import StepShape
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

JOINT, APART = StepShape(1, 1), StepShape(4, 3)
"""With blocks that are tensor-parallel, and with gathered ones."""
LIMIT_S = 1.0
PATIENT_S = 40.0


def outcome(call: Callable[[], object]) -> list[Any]:
    """The text of what `call` raises ("" if nothing), and the seconds until then."""
    begin = time.monotonic()
    try:
        call()
    except (GraphshardError, ArithmeticError) as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - begin]
    return ["", time.monotonic() - begin]


def _goes_on(runtime: Runtime, model: BlockModel, run: str, transport: str) -> list[str]:
    """What is wrong with a step without blocks, which needs nobody under pull; and a joint one is refused."""
    refused = outcome(lambda: step_wrong(runtime, model, JOINT, 90, run))[0]
    apart = step_wrong(runtime, model, APART, 91, run) if transport == "pull" else ""
    return [refused, apart]


def capture_after_a_failure(group: Group) -> str:
    """Rank 1 does not come to a step with blocks; then all capture one anew."""
    model = BlockModel()
    with compiled(group, model, "pull", timeout_s=LIMIT_S) as runtime:
        if group.rank == 0:
            outcome(lambda: step_wrong(runtime, model, JOINT, 1, "graph"))
        group.barrier()
        with runtime.turn.lock:
            runtime.close_graphs()
        told = outcome(lambda: runtime.capture([JOINT]))[0]
        group.barrier()
    return told


def skip_a_step(group: Group, skipping: int, run: str, transport: str) -> list[Any]:
    """Rank `skipping` does not come to the second step with blocks, and takes ones without."""
    model = BlockModel()
    with compiled(group, model, transport, timeout_s=LIMIT_S) as runtime:
        assert not step_wrong(runtime, model, JOINT, 1, run)
        group.barrier()
        if group.rank == skipping:
            told = ["", 0.0]
            if transport == "pull":
                assert not step_wrong(runtime, model, APART, 2, run)
            group.barrier()
        else:
            told = outcome(lambda: step_wrong(runtime, model, JOINT, 2, run))
            group.barrier()
        after = _goes_on(runtime, model, run, transport)
        group.barrier()
    return [*told, *after]


def lose_a_rank(group: Group, run: str, how: str) -> list[Any]:
    """The last rank is killed, or closes, between two steps with blocks."""
    model = BlockModel()
    with compiled(group, model, "pull", timeout_s=PATIENT_S) as runtime:
        assert not step_wrong(runtime, model, JOINT, 1, run)
        group.barrier()
        if group.rank == group.world_size - 1:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            runtime.close()
            return ["", 0.0]
        told = outcome(lambda: step_wrong(runtime, model, JOINT, 2, run))
        return [*told, *_goes_on(runtime, model, run, "pull")]


def unlike_shapes(group: Group, run: str, transport: str) -> list[Any]:
    """Rank 1 takes a step of another shape."""
    model = BlockModel()
    with compiled(group, model, transport, timeout_s=PATIENT_S) as runtime:
        shape = StepShape(2, 1) if group.rank == 1 else JOINT
        told = outcome(lambda: step_wrong(runtime, model, shape, 1, run))
        group.barrier()
    return told


def fail_in_compute(group: Group, part: str, transport: str) -> list[Any]:
    """A segment of rank 1 raises in the second eager step."""
    is_due: list[bool] = []

    def fail(where: str) -> None:
        if is_due and where == part:
            raise ArithmeticError(f"no {where} today")

    model = BlockModel(fail=fail)
    with compiled(group, model, transport, timeout_s=PATIENT_S) as runtime:
        assert not step_wrong(runtime, model, JOINT, 1, "eager")
        group.barrier()
        if group.rank == 1:
            is_due.append(True)
        told = outcome(lambda: step_wrong(runtime, model, JOINT, 2, "eager"))
        group.barrier()
        is_due.clear()
        told += _goes_on(runtime, model, "eager", transport)
        group.barrier()
    return told


def slow_to_compute(group: Group) -> list[Any]:
    """A segment of rank 1 computes until all have given up, and longer than a rank that gave up is in a hurry."""
    go_on, is_due = threading.Event(), []

    def fail(part: str) -> None:
        if is_due and part == "prepare":
            go_on.wait(PATIENT_S)

    model = BlockModel(fail=fail)
    with compiled(group, model, "pull", timeout_s=LIMIT_S) as runtime:
        assert not step_wrong(runtime, model, JOINT, 1, "eager")
        group.barrier()
        is_due += [True] if group.rank == 1 else []
        told = outcome(lambda: step_wrong(runtime, model, JOINT, 2, "eager"))
        group.barrier()
        is_due.clear()
        go_on.set()
        until(lambda: all(stream.is_idle() for stream in runtime._streams.values()), "what was given up has ended")
        told += _goes_on(runtime, model, "eager", "pull")
        group.barrier()
    return told


def interrupted(group: Group, shape: StepShape, is_broken: bool) -> list[Any]:
    """The wait for a step of `shape` is interrupted while a segment computes, or since rank 1 does not come to it: what
    the next steps without blocks raise, and what is wrong with them. With `is_broken` one with blocks failed before."""
    model, go_on, is_due = BlockModel(), threading.Event(), []
    last = model.segments[-1]

    def slow(state: StepState) -> None:
        if is_due:
            go_on.wait(PATIENT_S)
        last.run(state)

    model.segments = (*model.segments[:-1], Segment(last.spec, slow))
    with compiled(group, model, "pull", timeout_s=LIMIT_S) as runtime:
        if is_broken and group.rank == 0:
            outcome(lambda: step_wrong(runtime, model, JOINT, 1, "eager"))
        group.barrier()
        assert (outcome(lambda: step_wrong(runtime, model, JOINT, 1, "eager"))[0] != "") is is_broken
        if shape == APART or group.rank == 0:
            is_due += [True] if shape == APART else []
            _interrupt_a_wait(runtime, lambda: step_wrong(runtime, model, shape, 2, "eager"))
        is_due.clear()
        threading.Timer(0.2, go_on.set).start()
        found: list[Any] = []
        first = outcome(lambda: found.append(step_wrong(runtime, model, APART, 3, "eager")))[0]
        found.append(step_wrong(runtime, model, APART, 4, "eager"))
        group.barrier()
    return [first, *found]


def closed_while_it_computes(group: Group) -> list[bool]:
    """A step with blocks failed, the wait for one without is interrupted: whether graphs live until that has ended."""
    model, go_on = BlockModel(), threading.Event()
    due: list[Runtime] = []
    found: list[bool] = []
    last = model.segments[-1]

    def slow(state: StepState) -> None:
        last.run(state)
        if due:
            go_on.wait(PATIENT_S)
            found.append(bool(due[0]._graphs))

    model.segments = (*model.segments[:-1], Segment(last.spec, slow))
    with compiled(group, model, "pull", timeout_s=LIMIT_S) as runtime:
        if group.rank == 0:
            outcome(lambda: step_wrong(runtime, model, JOINT, 1, "eager"))
        group.barrier()
        outcome(lambda: step_wrong(runtime, model, JOINT, 1, "eager"))
        due.append(runtime)
        _interrupt_a_wait(runtime, lambda: step_wrong(runtime, model, APART, 2, "eager"))
        threading.Timer(0.2, go_on.set).start()
    return found


def _interrupt_a_wait(runtime: Runtime, call: Callable[[], object]) -> None:
    wait = runtime._alignment.wait

    def interrupt(*arguments: Any) -> bool:
        runtime._alignment.wait = wait  # type: ignore[method-assign]
        raise KeyboardInterrupt

    runtime._alignment.wait = interrupt  # type: ignore[method-assign, assignment]
    with suppress(KeyboardInterrupt):
        call()


def refusals(group: Group, transport: str) -> list[str]:
    """What cannot be done with such steps, and says so."""
    model = BlockModel()
    with compiled(group, model, transport) as runtime:
        said = [
            outcome(lambda: runtime.begin_step(1))[0],
            outcome(lambda: runtime.graph(1).handle)[0],
        ]
        with runtime.turn.lock:
            assert runtime.is_joint and runtime.is_collective
        assert transport == "nccl" or runtime.graph(4, 3).handle, "no block of it needs others"
        runtime.graph(1).promise_alike()
        assert runtime.graph(1).handle
        group.barrier()
    return said


def come_back(group: Group) -> list[Any]:
    """The last rank ends; a process in its place is told why it cannot come in."""
    with compiled(group, BlockModel(), "pull", timeout_s=PATIENT_S) as runtime:
        group.barrier()
        last = group.world_size - 1
        if group.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        until(lambda: runtime._control.state(last) == "dead", "the last rank has ended")
        return outcome(lambda: graphshard.rejoin_group(group.job, last, timeout_s=5.0))[:1]
