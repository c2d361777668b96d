"""How ranks end, at idle, in waits and in captures, as processes."""

from __future__ import annotations

import gc
import os
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from mini import held

from graphshard._core import Memory
from graphshard.comm.group import Group
from graphshard.core.errors import GraphshardError
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

LAYERS = [[5000, 300], [6000, 400], [7000, 100]]
CHOICES: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "head": "tail"}


def fail_to_reserve(group: Group) -> list[dict[str, Any]]:
    """Rank 2 may make no file larger than a limit: its window does not fit, then its slots do not."""
    model = ByteModel(LAYERS)
    found = []
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    with compile_bytes(group, model, **CHOICES) as runtime:
        sizes = runtime.layout.shard_bytes, runtime.layout.slot_bytes
    assert sizes[0] < sizes[1]
    for limit in (sizes[0] - 1, sizes[1] - 1):
        gc.collect()
        before = held()
        if group.rank == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            compile_bytes(group, model, **CHOICES)
            error = ""
        except GraphshardError as failure:
            error = f"{type(failure).__name__}: {failure}"
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        gc.collect()
        after = held()
        with compile_bytes(group, model, **CHOICES) as runtime:
            wrong = wrong_after(runtime, model, runtime.graph(1).replay)
        found.append({"error": error, "before": before, "after": after, "wrong": wrong, "sizes": sizes})
    return found


def capture_drop_and_fork(group: Group) -> dict[str, Any]:
    """Captures, memory and forks, one after the other in two processes; each part returns what went wrong."""
    model = ByteModel(LAYERS)
    warm_up(group, model)
    with no_growth():  # once the last reference is dropped: nobody closes the runtime
        runtime = compile_bytes(group, model, **CHOICES, capture_sizes=[])
        report = {
            "captures": failed_captures(runtime, model),
            "pool": memory_asked_for_again(runtime, model),
            "fork": fork_beside_running_threads(runtime, model),
        }
        group.barrier()
        del runtime
    return report


def warm_up(group: Group, model: ByteModel) -> None:
    with compile_bytes(group, model, **CHOICES) as runtime:
        for act in (runtime.graph(1).replay, lambda: runtime.run(1)):
            assert wrong_after(runtime, model, act) == []


def failed_captures(runtime: Runtime, model: ByteModel) -> list[str]:
    """Captures that fail at the first, a middle and the last segment, twelve times each; then a good one."""
    segments = runtime._compute._segments
    problems = []
    before = None
    for at in (0, len(segments) // 2, len(segments) - 1):

        def fail(state: StepState) -> None:
            raise ZeroDivisionError("as asked")

        broken = list(segments)
        broken[at] = Segment(segments[at].spec, fail)
        for turn in range(12):
            runtime._compute._segments = tuple(broken)
            try:
                runtime.capture()
                problems.append(f"segment {at}: the capture did not fail")
            except ZeroDivisionError:
                pass
            runtime._compute._segments = segments
            if turn % 6:
                continue
            gc.collect()
            now = (held(), runtime.driver.num_retired, runtime.held)
            before = before or now
            if now != before:
                problems.append(f"segment {at}: {now} instead of {before}")
        problems += wrong_after(runtime, model, lambda: runtime.run(1))
        before = None
    runtime.capture()
    return problems + wrong_after(runtime, model, runtime.graph(1).replay)


def memory_asked_for_again(runtime: Runtime, model: ByteModel) -> list[str]:
    """Whoever asks for memory of any size that the graph uses gets other memory."""
    graph = runtime.graph(1)
    gc.collect()
    taken = []
    for row in runtime.buffer_table():
        memory = Memory(runtime.driver, row.num_bytes)
        memoryview(memory)[:] = b"\xff" * row.num_bytes
        taken.append(memory)
    return [line for _ in range(3) for line in wrong_after(runtime, model, graph.replay)]


def fork_beside_running_threads(runtime: Runtime, model: ByteModel) -> list[str]:
    """A fork while streams' threads run; the child is refused everything, and ends; the parent goes on."""
    graph, problems = runtime.graph(1), []
    stop = threading.Event()

    def step_until_told() -> None:
        while not stop.is_set():
            problems.extend(wrong_after(runtime, model, graph.replay))

    stepping = threading.Thread(target=step_until_told)
    stepping.start()
    begin = runtime.num_steps
    while runtime.num_steps < begin + 3:
        pass
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        uses: list[Callable[[], object]] = [graph.replay, lambda: runtime.run(1), runtime.admit, runtime.group.barrier]
        told = [_error_of(use) for use in uses]
        os.write(write_end, "\n".join(told).encode())
        runtime.close()
        os._exit(0)
    os.close(write_end)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    told = os.read(read_end, 1 << 16).decode().splitlines()
    os.close(read_end)
    stop.set()
    stepping.join()
    if code != 0 or len(told) != 4 or not all("fork" in line for line in told):
        problems.append(f"the child ended with {code} and said {told}")
    return problems + wrong_after(runtime, model, graph.replay)


def _error_of(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:
        return str(error).replace("\n", " ")
    return "no error"
