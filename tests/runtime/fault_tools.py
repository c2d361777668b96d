"""What fault tests share: a latch that stalls an op, another order for a captured graph, bounded waits, one rank."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes

from graphshard._core import Memory, Word
from graphshard.comm.group import LocalGroup
from graphshard.core.ops import Gemm
from graphshard.core.program import Program
from graphshard.device import open_device
from graphshard.runtime.graphs import StepGraph
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

LIMIT_S = 60.0


class Latch:
    """A word at which an op waits; `word.store(1)` opens it. Open at first if `is_open`."""

    def __init__(self, is_open: bool = False) -> None:
        self.word = Word(Memory(open_device().driver, 4))
        self.word.store(int(is_open))

    def stalls(self, *ops: int) -> dict[int, int]:
        """For `Hooks.stalls`: these ops of the program wait for the latch."""
        return dict.fromkeys(ops, self.word.address)

    def open(self) -> None:
        self.word.store(1)

    def close(self) -> None:
        self.word.store(0)


class InThread(threading.Thread):
    """A call on a thread of its own; `result()` waits for it, bounded, and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(LIMIT_S)
        assert not self.is_alive(), f"the call did not end within {LIMIT_S} s"
        if self._error is not None:
            raise self._error
        return self._value


def until(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition` holds, which something else brings about; AssertionError if it never does."""
    deadline = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{LIMIT_S} s passed, and still not: {what}"
        pause.wait(0.0005)


def reorder(graph: StepGraph, seed: int, executor: str = "cooperative") -> None:
    """From now on the captured graph runs in the orders of `seed`, or by a thread a stream."""
    captured = graph._captured
    assert captured is not None
    graph._captured = dataclasses.replace(captured, exec=captured.graph.instantiate(executor, seed))


def alone(model: ByteModel, **choices: Any) -> Runtime:
    """The model on one rank, sharded nevertheless: gathers are copies of the rank's own chunk."""
    return compile_bytes(LocalGroup(1)[0], model, **({"units": "layer", "prefetch_depth": 1} | choices))


def gemms_of(program: Program) -> list[int]:
    """The indices of the gemm ops."""
    return [index for index, op in enumerate(program.ops) if isinstance(op, Gemm)]


def with_run(model: ByteModel, index: int, wrap: Callable[[Segment, StepState], None]) -> None:
    """Segment `index` of `model` becomes `wrap(the segment as it was, state)`."""
    segment = model.segments[index]
    changed = dataclasses.replace(segment, run=lambda state: wrap(segment, state))
    model.segments = (*model.segments[:index], changed, *model.segments[index + 1 :])


def collect() -> None:
    """What nobody refers to is gone, also what a stream was just done with."""
    gc.collect()
    driver = open_device().driver
    until(lambda: driver.num_retired == 0, "what was dropped is gone")


def is_mapped(address: int) -> bool:
    """Whether `address` lies in a mapping of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return True
    return False


def is_window(address: int) -> bool:
    """Whether a window (a mapped memfd) lies at `address`; anonymous memory comes and goes at any free address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return "/memfd:graphshard" in line
    return False


def memory_addresses(runtime: Runtime) -> Sequence[int]:
    """Where shards, slots, resident weights and buffers begin."""
    return [row.address for row in runtime.buffer_table()]
