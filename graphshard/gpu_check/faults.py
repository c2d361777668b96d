"""Replays under pressure, and replays that read the memory of a process that is killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import graphshard
from graphshard.comm.group import Group
from graphshard.comm.launch import RankProcesses
from graphshard.core.errors import CommError
from graphshard.device.base import DeviceKind
from graphshard.gpu_check.naming import NamingModel, wrong
from graphshard.gpu_check.recorder import Recorder, Row
from graphshard.gpu_check.setup import TIMEOUT_S, Setup, on_threads
from graphshard.runtime.bind import Hooks
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.runtime import Runtime

VICTIM_ENTRY = "graphshard.gpu_check.faults:killed_rank"
VICTIM = 1
BLOCK = 1000
"""Replays between two looks at the bytes."""


def check_faults(recorder: Recorder, setup: Setup) -> None:
    """An exporter that is killed, and many replays without a wait."""
    recorder.run("an exporter is killed under replay", lambda row: _check_killed(row, setup))
    recorder.run("many replays, the host waits for none but the third", lambda row: _check_pressure(row, setup, False))
    recorder.run("many launches, the host waits for none of a thousand", lambda row: _check_pressure(row, setup, True))


def _compiled(group: Group, setup: Setup, model: NamingModel) -> Runtime:
    device = setup.device(group.local_rank, num_ranks=group.world_size)
    return graphshard.compile(
        model,
        group,
        checkpoint=model.tensors(),
        device=device,
        timeout_s=TIMEOUT_S,
        hooks=Hooks(poison=True),
        min_shard_bytes=0,
        units="layer",
        prefetch_depth=1,
    )


def killed_rank(group: Group, kind: DeviceKind, num_replays: int) -> dict[str, Any]:
    """Rank 0 replays, kills rank 1 while replays are in flight, and replays on over its window."""
    setup, model = Setup(kind), NamingModel()
    runtime = _compiled(group, setup, model)
    group.barrier("captured")
    if group.rank == VICTIM:
        time.sleep(4 * TIMEOUT_S)  # until it is killed
        return {}
    graph, truth = runtime.graph(batch_size=1), model.truth(setup.torch_device())
    found: list[str] = []

    def replays(count: int, when: str) -> None:
        for number in range(count):
            graph.replay()
            if number % 50 == 49:
                found.extend(f"{when}, replay {number}: {line}" for line in wrong(graph.outputs, truth))

    replays(num_replays, "before")
    for _ in range(10):
        graph.replay()
    os.kill(group.processes[VICTIM].pid, signal.SIGKILL)
    replays(num_replays, "while it dies")
    is_gone = _wait_until_gone(group.processes[VICTIM].pid)
    replays(num_replays, "after")
    runtime.close()
    return {"wrong": found[:10], "num_wrong": len(found), "is_gone": is_gone, "num_replays": 3 * num_replays + 10}


def _wait_until_gone(pid: int) -> bool:
    """Whether the process has ended within a limit; its parent has yet to collect it."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] in "ZX":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def _check_killed(row: Row, setup: Setup) -> None:
    arguments = [setup.kind, setup.pick(1000, 100)]
    with RankProcesses(VICTIM_ENTRY, 2, arguments=arguments, group_timeout_s=TIMEOUT_S) as processes:
        results = processes.wait(60.0)
    row.add(return_codes=[result.return_code for result in results])
    survivor, victim = results[0], results[VICTIM]
    if not survivor.is_good:
        row.add(traceback_of_survivor=survivor.traceback)
        row.require(False, survivor.line(2))
        return
    row.add(**survivor.value)
    row.require(survivor.value["is_gone"], "the killed process did not end")
    row.require(
        victim.return_code == -signal.SIGKILL, f"rank {VICTIM} ended with {victim.return_code}, not by the kill"
    )
    row.require(survivor.value["num_wrong"] == 0, f"wrong bytes: {'; '.join(survivor.value['wrong'][:3])}")


def _check_pressure(row: Row, setup: Setup, is_raw: bool) -> None:
    if is_raw:
        setup.need_card(row, "launching without a wait")
    row.add(num_blocks=setup.pick(100, 2), block=BLOCK)

    def rank(group: Group) -> None:
        model = NamingModel()
        with _compiled(group, setup, model) as runtime:
            if group.rank == 0:
                _pressure(row, setup, runtime, model, is_raw)
            group.barrier("before closing", timeout_s=3 * TIMEOUT_S)

    on_threads(rank, 2)


def _pressure(row: Row, setup: Setup, runtime: Runtime, model: NamingModel, is_raw: bool) -> None:
    """Blocks of replays; the bytes are looked at after each one."""
    graph, truth = runtime.graph(batch_size=1), model.truth(setup.torch_device())
    graph.replay()
    limit_s, began = setup.pick(60.0, 20.0), time.perf_counter()
    done = 0
    for block in range(row.values["num_blocks"]):
        for output in graph.outputs.values():
            output.zero_()
        for _ in range(BLOCK):
            if is_raw:
                _launch_alone(graph)
            else:
                graph.replay()
        _drain(runtime)
        found = wrong(graph.outputs, truth)
        done += BLOCK
        row.require(not found, f"after {done} replays: {'; '.join(found[:2])}")
        if found or time.perf_counter() - began > limit_s:
            row.require(bool(found), f"only {block + 1} blocks in {limit_s:.0f} s")
            break
    seconds = time.perf_counter() - began
    row.add(num_replays=done, us_per_replay=seconds * 1e6 / done)


def _launch_alone(graph: StepGraph) -> None:
    """A launch without the runtime's books: they would make the host wait. The step's slots hold nothing between."""
    captured = graph._captured
    assert captured is not None
    captured.launch()


def _drain(runtime: Runtime) -> None:
    """Wait for the device, bounded: what has stalled is an error."""
    for name, stream in runtime._streams.items():
        if not stream.synchronize(TIMEOUT_S):
            raise CommError(f"stream {name} did not get on within {TIMEOUT_S:.0f} s after {BLOCK} replays")
