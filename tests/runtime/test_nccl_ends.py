"""How a runtime with communicators ends: in any order, dropped, or with its process; nobody hangs."""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import Census
from fault_tools import LIMIT_S, alone, collect, is_mapped, memory_addresses, until
from ranks import rank_environment, run_on_ranks
from test_faults_ends import LAYERS, end_in_every_order

from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.runtime.runtime import Runtime


def test_every_order_of_ends_ends() -> None:
    """Graph, windows, runtime, group in all 24 orders; what comes too late is refused by name."""

    def one_rank() -> tuple[Runtime, ByteModel]:
        model = ByteModel(LAYERS)
        return alone(model, transport="nccl", head="tail"), model

    end_in_every_order(one_rank)


def opened(group: Group, run: str) -> tuple[Runtime, ByteModel]:
    """A runtime that has made steps, eager ones alone or captured ones too."""
    model = ByteModel(LAYERS)
    sizes = [1] if run == "graph" else []
    runtime = compile_bytes(group, model, units="layer", prefetch_depth=1, transport="nccl", capture_sizes=sizes)
    for act in (lambda: runtime.run(1), runtime.graph(1).replay if sizes else lambda: runtime.run(1)):
        assert wrong_after(runtime, model, act) == []
    return runtime, model


def drop(run: str, order: Sequence[int]) -> None:
    """Open two ranks, and let references to them go in `order`."""
    held: list[list[Any]] = [[], [], []]
    addresses: list[int] = []
    for runtime, _ in run_on_ranks(opened, 2, run):
        addresses += memory_addresses(runtime)
        held[0].append(runtime)
        held[1].append(runtime._graphs.get(StepShape(1)))
        held[2].append(runtime.buffers(StepShape(1), "output"))
    del runtime
    gc.collect()
    assert all(map(is_mapped, addresses))
    for index in order:
        held[index].clear()
        collect()
    until(lambda: not any(map(is_mapped, addresses)), "shards, slots and buffers are gone")


@pytest.mark.parametrize("run", ["eager", "graph"])
def test_dropped_runtimes_leave_nothing_behind(run: str) -> None:
    """Nobody calls close; runtime, graph and outputs go in any order, and the communicators are aborted.

    Of one that was captured NCCL keeps its flag words: nothing says that no replay uses them.
    """
    drop(run, (0, 1, 2))
    before = Census.take()
    for order in itertools.permutations(range(3)):
        drop(run, order)
    kept = r"fds: \{'/memfd:graphshard \(deleted\)': \d+\}" if run == "graph" else ""
    until(lambda: re.fullmatch(kept, Census.take().growth(before)) is not None, "threads and descriptors are gone")


EXIT = """
    import gc, sys, threading
    from byte_model import ByteModel
    from byte_steps import compile_bytes, wrong_after
    from fault_tools import Latch, gemms_of, InThread
    from ranks import run_on_ranks
    from test_nccl_ends import opened
    from graphshard.core.errors import CommError

    (first, _), (second, _) = run_on_ranks(opened, 2, sys.argv[1])
    first.timeout_s = 0.2
    try:
        first.graph(1).replay() if sys.argv[1] == "graph" else first.run(1)  # alone
    except CommError as error:
        print(str(error).split(":")[1].strip())
    if sys.argv[2] == "closed":
        first.close(), second.close()
        print((first.must_exit or "").split(":")[-1].strip())
    gc.disable()
    sys.exit(7)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("run", "how"), [("eager", "closed"), ("graph", "open"), ("graph", "closed")])
def test_a_process_with_a_stuck_gather_ends_with_its_own_code(run: str, how: str) -> None:
    """A captured gather that waits for a peer cannot be aborted; the process ends at once.

    Closing says in one line that it must; nothing else is said.
    """
    command = [sys.executable, "-c", textwrap.dedent(EXIT), run, how]
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.path.join(os.path.dirname(here), "verify"), rank_environment()["PYTHONPATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, "PYTHONPATH": path}
    )
    lines = done.stdout.splitlines()
    said = r"rank 0: this process must exit: .*; end this process \(rank 0 waited 0\.2 s for step 3 .*\)\n"
    assert done.returncode == 7, done
    assert re.fullmatch(said if (run, how) == ("graph", "closed") else "", done.stderr), done
    assert lines[0] == "rank 0 came to it, rank 1 did not; it last finished op 12 of step 2"
    if how == "closed":
        stuck = "a captured gather that waits for a peer cannot be aborted; end this process"
        assert lines[1] == (stuck if run == "graph" else "")
