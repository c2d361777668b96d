"""What rank processes of the host NCCL's tests do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import graphshard._core as _core
from graphshard.comm.group import Group

LIBRARIES = Path(_core.__file__).parent / "lib"
CHUNK_BYTES = 8192
LIMIT_S = 30.0


def open_rank(group: Group) -> tuple[_core.Driver, _core.Communicator]:
    """The host driver, and this rank's communicator over the host NCCL."""
    driver = _core.Driver(str(LIBRARIES / "libgraphshard_hostcuda.so"))
    library = _core.NcclLibrary(str(LIBRARIES / "libgraphshard_hostnccl.so"), driver)
    made = library.unique_id().hex() if group.rank == 0 else ""
    unique_id = bytes.fromhex(str(group.all_gather(made)[0][0]))
    return driver, _core.Communicator(library, unique_id, group.world_size, group.rank, "test", LIMIT_S)


def stage(spec: str) -> int:
    """What the host NCCL of this process is to do wrong from now on."""
    return int(ctypes.CDLL(str(LIBRARIES / "libgraphshard_hostnccl.so")).gshost_nccl_stage(spec.encode()))


class Unit:
    """One gather's two windows: this rank's chunk, and where all chunks go."""

    def __init__(self, communicator: _core.Communicator) -> None:
        world_size = communicator.world_size
        self.communicator = communicator
        self.shard = communicator.allocate(CHUNK_BYTES)
        self.slot = communicator.allocate(CHUNK_BYTES * world_size)
        for memory in (self.shard, self.slot):
            communicator.register(memory, LIMIT_S)

    def fill(self, value: int) -> None:
        memoryview(self.shard).cast("B")[:CHUNK_BYTES] = bytes([value + self.communicator.rank]) * CHUNK_BYTES

    def gather(self, stream: _core.Stream, timeout_s: float | None = None) -> None:
        self.communicator.all_gather(self.slot.address, self.shard.address, CHUNK_BYTES, stream, timeout_s)

    def is_right(self, value: int) -> bool:
        found = bytes(memoryview(self.slot).cast("B")[: CHUNK_BYTES * self.communicator.world_size])
        return found == b"".join(bytes([value + r]) * CHUNK_BYTES for r in range(self.communicator.world_size))


def gather_across_processes(group: Group) -> dict[str, Any]:
    """Eager and captured gathers between processes; what the graph shows; what is left when all is destroyed."""
    before = segment_descriptors()
    driver, communicator = open_rank(group)
    stream = _core.Stream(driver)
    unit = Unit(communicator)
    wrong = []
    unit.fill(0)
    unit.gather(stream, LIMIT_S)
    op = ("all_gather", 0, 0, unit.slot.address, unit.shard.address, CHUNK_BYTES)
    graph = _core.OpList(driver, [stream], 0, [op], [communicator]).capture(_core.Calls([]))
    executable = graph.instantiate("threaded" if group.rank else "cooperative")
    for value in range(1, 100):
        assert stream.synchronize(LIMIT_S)
        unit.fill(value)
        if value % 3:
            executable.launch(stream)
        else:
            unit.gather(stream)
        assert stream.synchronize(LIMIT_S)
        wrong += [] if unit.is_right(value) else [value]
    nodes = graph.num_nodes()
    del graph, executable
    ended = communicator.destroy(LIMIT_S)
    del unit, communicator
    return {"wrong": wrong, "nodes": nodes, "destroyed": ended, "left": segment_descriptors() - before}


def segment_descriptors() -> int:
    """Open descriptors of this process that are a communicator's shared segment or exported memory."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the listing's own
            continue
    return sum("graphshard-nccl" in link for link in links)


def outlive_a_killed_rank(group: Group) -> dict[str, Any]:
    """Rank 1 is killed between gathers; the others are stuck in one, are told who is gone, and get free."""
    driver, communicator = open_rank(group)
    stream = _core.Stream(driver)
    unit = Unit(communicator)
    unit.gather(stream, LIMIT_S)
    assert stream.synchronize(LIMIT_S)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    unit.gather(stream)
    error = await_error(communicator)
    return {"error": error, "aborted": communicator.abort(LIMIT_S), "drained": stream.synchronize(LIMIT_S)}


def skip_a_captured_gather(group: Group) -> dict[str, Any]:
    """Rank 1 leaves one of four gathers out of its graph: no rank gets wrong bytes, each is told, none can be freed."""
    driver, communicator = open_rank(group)
    stream = _core.Stream(driver)
    units = [Unit(communicator) for _ in range(4)]
    for value, unit in enumerate(units):
        unit.fill(1 + value)
        unit.gather(stream, LIMIT_S)
    assert stream.synchronize(LIMIT_S)
    for unit in units:
        unit.fill(101)
    assert stage("skip:rank=1,call=3") == 0
    ops = [("all_gather", 0, 0, unit.slot.address, unit.shard.address, CHUNK_BYTES) for unit in units]
    graph = _core.OpList(driver, [stream], 0, ops, [communicator]).capture(_core.Calls([]))
    stage("")
    graph.instantiate().launch(stream)
    error = await_error(communicator)
    group.barrier()
    expected = [101, 101, 3, 4]
    wrong = [i for i, unit in enumerate(units) if not unit.is_right(expected[i])]
    return {"error": error, "wrong": wrong, "aborted": communicator.abort(0.2), "drained": stream.synchronize(0.0)}


def await_error(communicator: _core.Communicator) -> str:
    """What the library found out by itself; polled, bounded."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        error = communicator.async_error()
        if error is not None:
            return error
        time.sleep(0.005)
    return "no error was found"
