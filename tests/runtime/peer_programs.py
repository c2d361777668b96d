"""What ranks do beside one that fails them, in every way, eagerly and captured; for threads and processes alike.

The last rank is the one that fails. Under `nccl` all are told why; under `pull` only that rank has lost anything.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from byte_model import ByteModel
from byte_steps import wrong_after
from fault_tools import InThread, Latch, gemms_of, until
from lockstep_programs import LAYERS, PATIENT_S, compiled, outcome, stepper

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import DeviceSpec
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime

OTHER = {"eager": "graph", "graph": "eager"}


def beside(group: Group, fault: str, run: str, transport: str, limit_s: float) -> dict[str, Any]:
    """Two good steps, then `fault` on the last rank: skips, unlike, stalls, dies, stops.

    Returns what this rank was told and after how many seconds, what it was refused then, and how long closing took.
    """
    model, latch = ByteModel(LAYERS), Latch(is_open=True)
    failing = group.world_size - 1
    stalls = latch.stalls(_first_gemm(model, group.world_size, transport)) if group.rank == failing else {}
    hooks = Hooks(poison=True, stalls=stalls)
    runtime = compiled(group, model, transport, timeout_s=PATIENT_S, hooks=hooks)
    try:
        act = stepper(runtime, run)
        wrong = [line for _ in range(2) for line in wrong_after(runtime, model, act)]
        group.barrier("two steps")
        runtime.timeout_s = limit_s
        if group.rank == failing:
            told = _fail(group, runtime, fault, run, latch)
        else:
            told = outcome(lambda: [act() for _ in range(3)])
            if fault == "skips":
                group.barrier("the others are through")
            if fault == "stops" and group.rank == 0:
                os.kill(group.processes[failing].pid, signal.SIGKILL)
        if not runtime.is_collective:  # the late step ends, and nothing was lost
            latch.open()
            until(lambda: all(stream.is_idle() for stream in runtime._streams.values()), "the step has ended")
        refused = [outcome(call)[0] for call in (act, runtime.capture, lambda: runtime.prefetch(1))]
        if fault in ("skips", "unlike", "stalls"):
            group.barrier("all were told")
        latch.open()
    finally:
        begin = time.monotonic()
        runtime.close()
        closed_s = time.monotonic() - begin
    return {"told": told, "refused": refused, "wrong": wrong, "closed_s": closed_s, "must_exit": runtime.must_exit}


def _first_gemm(model: ByteModel, world_size: int, transport: str) -> int:
    """Of the program that `compiled` makes."""
    device = DeviceSpec("host", "any", memory_bytes=1 << 40)
    plan = graphshard.make_plan(
        model.spec(), world_size, device, units="layer", prefetch_depth=1, min_shard_bytes=0, transport=transport
    )
    return gemms_of(graphshard.emit(model.spec(), plan))[0]


def _fail(group: Group, runtime: Runtime, fault: str, run: str, latch: Latch) -> list[Any]:
    """What the failing rank does at its third step; what it is told when it comes back to the others."""
    act = stepper(runtime, run)
    if fault == "skips":
        group.barrier("the others are through")
        return outcome(act)
    if fault == "unlike":
        return outcome(stepper(runtime, OTHER[run]))
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
        raise AssertionError("this process went on")
    latch.close()
    if fault == "stalls":
        return outcome(act)
    assert fault == "dies", fault
    before, step = runtime.num_steps, InThread(act)
    until(lambda: runtime.num_steps > before, "the step is under way, and stands still at its first gemm")
    os.kill(os.getpid(), signal.SIGKILL)
    return list(step.result())
