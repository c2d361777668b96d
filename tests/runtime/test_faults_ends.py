"""Faults of ends: flags and payloads, teardown in any order, exits and forks; nobody hangs."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from fault_tools import LIMIT_S, InThread, alone, collect, is_mapped, memory_addresses
from ranks import rank_environment, run_on_ranks

import graphshard
from graphshard._core import ControlPage, Memory, Stream, Word
from graphshard.comm.group import Group, LocalGroup
from graphshard.device import open_device
from graphshard.runtime.runtime import Runtime

LAYERS = [[3000], [4000], [5000]]


# --- payload before flag ---


@pytest.mark.parametrize("num_words", [16, 1024])
def test_what_a_step_announces_is_there(num_words: int) -> None:
    """Payload before flag, from a stream through a word to the host and back; csrc/tests does it 10^7 times.

    Flags are written by C++ alone, with release, and read with acquire: words and control pages.
    """
    driver = open_device().driver
    stream, memory, flag, page = Stream(driver), Memory(driver, 4 * num_words), Word(Memory(driver, 4)), ControlPage()
    payload = memoryview(memory).cast("I")
    for step in range(1, 1001):
        stream.fill(memory.address, step & 0xFF, 4 * num_words)
        stream.write_value(flag.address, step)
        assert flag.wait(step, LIMIT_S)
        assert payload[0] == payload[num_words - 1] == (step & 0xFF) * 0x01010101
        page.set_progress(step, num_words)
        assert (page.step, page.op) == (step, num_words)
    assert stream.synchronize(LIMIT_S)


# --- ends in any order ---


def lent_to(group: Group) -> tuple[Runtime, ByteModel] | None:
    """Rank 0's runtime with a graph; rank 1 lent its window and is gone."""
    model = ByteModel(LAYERS)
    runtime = compile_bytes(group, model, units="layer", prefetch_depth=1, head="tail")
    if group.rank == 0:
        return runtime, model
    runtime.close()
    return None


def test_every_order_of_ends_ends() -> None:
    """Graph, windows, runtime, group, in all 24 orders; what is used too late says so."""

    def lent() -> tuple[Runtime, ByteModel]:
        found = run_on_ranks(lent_to, 2)[0]
        assert isinstance(found, tuple)
        return found

    end_in_every_order(lent)


def end_in_every_order(make: Callable[[], tuple[Runtime, ByteModel]]) -> None:
    """`make` gives a runtime with a graph; whatever went first, what is used after says so, and all ends."""
    for order in itertools.permutations(("graph", "windows", "runtime", "group")):
        runtime, model = make()
        graph, transport, group = runtime.graph(1), runtime._transport, runtime.group
        assert wrong_after(runtime, model, graph.replay) == []
        ends: dict[str, Callable[[], None]] = {
            "graph": graph.close,
            "windows": transport.close,
            "runtime": runtime.close,
            "group": group.close,
        }
        gone: list[str] = []
        for name in order:
            InThread(ends[name]).result()
            gone.append(name)
            assert refusal_of(graph.replay) == expected_refusal(gone), gone
        for end in ends.values():
            end()


def expected_refusal(gone: list[str]) -> str:
    """The kind of error of a replay when `gone` are gone; empty: it works."""
    if "runtime" in gone:
        return "ProgramError: this runtime is closed"
    if "graph" in gone:
        return "DeviceError: the graph of step shape 1x1 is closed"
    if "windows" in gone:
        return "DeviceError: step shape 1x1 was bound to windows that have been remapped or closed"
    return ""


def refusal_of(use: Callable[[], Any]) -> str:
    try:
        use()
    except graphshard.GraphshardError as error:
        text = f"{type(error).__name__}: {error}"
        return next((start for start in KNOWN if text.startswith(start)), text)
    return ""


KNOWN = [expected_refusal([name]) for name in ("runtime", "graph", "windows")]


def test_dropped_runtimes_leave_nothing_behind() -> None:
    """Nobody calls close; references go in any order, and everything goes with the last of them."""
    run_on_ranks(lent_to, 2)
    with no_growth():
        for order in itertools.permutations(range(3)):
            (runtime, _), _ = run_on_ranks(lent_to, 2)
            graph, outputs = runtime.graph(1), runtime.graph(1).outputs
            graph.replay()
            addresses = memory_addresses(runtime)
            held: list[Any] = [runtime, graph, outputs]
            del runtime, graph, outputs
            gc.collect()
            assert all(map(is_mapped, addresses))
            for index in order:
                held[index] = None
                collect()
            assert not any(map(is_mapped, addresses))


EXIT = """
    import gc, os, sys
    from byte_model import ByteModel
    from byte_steps import compile_bytes, wrong_after
    from fault_tools import Latch, gemms_of, alone, InThread, until
    from ranks import run_on_ranks
    from test_faults_ends import lent_to
    from graphshard.runtime.bind import Hooks
    from graphshard.core.specs import StepShape

    (runtime, model), _ = run_on_ranks(lent_to, 2)
    graph = runtime.graph(1)
    assert wrong_after(runtime, model, graph.replay) == []
    latch = Latch()
    stalled = alone(model, hooks=Hooks(stalls=latch.stalls(gemms_of(runtime.programs[StepShape(1)])[0])))
    stalled.timeout_s = 0.1
    try:
        stalled.graph(1).replay()
    except Exception as error:
        print(type(error).__name__)
    gc.disable()
    graph.replay()
    print("done")
    sys.exit(7)
"""


def test_the_interpreter_may_end_with_everything_alive() -> None:
    """Graphs, windows, a step that never ends; the process ends at once, silently, with its own code."""
    command = [sys.executable, "-c", textwrap.dedent(EXIT)]
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.join(os.path.dirname(here), "verify"), rank_environment()["PYTHONPATH"]])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (7, "CommError\ndone\n", "")


# --- forks ---


def test_use_in_a_forked_child_is_refused_and_disturbs_nobody() -> None:
    """The child may not step, capture, gather or compile; its closing closes nothing of the parent's."""
    model = ByteModel(LAYERS)
    groups = LocalGroup(1)
    runtime = compile_bytes(groups[0], model, units="layer", prefetch_depth=1, head="tail")
    graph = runtime.graph(1)
    runtime._done.store(5)  # what a child must not touch: it is in memory that both share
    uses: list[Callable[[], object]] = [
        graph.replay,
        lambda: runtime.run(1),
        runtime.capture,
        lambda: runtime.prefetch(1),
        groups[0].barrier,
        lambda: compile_bytes(groups[0], model, units="layer"),
        lambda: alone(model),
    ]
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT_S))
        try:
            os.write(write_end, "\n".join(map(error_in_child, uses)).encode())
            runtime.close()
            graph.close()
            groups.close()
        finally:
            os._exit(0)
    os.close(write_end)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    errors = os.read(read_end, 100_000).decode().splitlines()
    os.close(read_end)
    assert len(errors) == len(uses) and all("fork" in error for error in errors), errors
    assert runtime._done.value == 5 and runtime._control.mine.state == 1
    assert [wrong_after(runtime, model, act) for act in (graph.replay, lambda: runtime.run(1))] == [[], []]
    groups[0].barrier()
    runtime.close()


def error_in_child(use: Callable[[], object]) -> str:
    try:
        use()
    except Exception as error:
        return str(error).replace("\n", " ")
    return "no error"
