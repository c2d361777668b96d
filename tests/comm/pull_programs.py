"""What the ranks of the window and pull tests do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from windows_model import Shard, chunk, flat_layout, interleaved_layout

from graphshard.comm.group import Group
from graphshard.comm.windows import WindowTable
from graphshard.core.errors import CommError
from graphshard.device import open_device

CHUNK_SIZES = [256, 4096, 512, 12_800]


def gather_all(group: Group) -> str:
    layout = flat_layout(group.world_size, CHUNK_SIZES)
    shard = Shard.connect(group, layout)
    for unit in layout.units:
        copies = shard.transport.copies(unit.unit, shard.slot.address)
        order = [(group.rank + 1 + i) % group.world_size for i in range(group.world_size)]
        assert [copy.source_rank for copy in copies] == order
        assert [copy.is_own for copy in copies] == [False] * (group.world_size - 1) + [True]
        whole = shard.gather(unit.unit)
        assert whole == b"".join(chunk(r, unit.unit, unit.chunk_bytes) for r in range(group.world_size))
        shard.transport.verify_unit(unit.unit, memoryview(shard.slot))
    assert len(shard.transport.generations()) == group.world_size
    group.barrier()
    shard.transport.close()
    shard.transport.close()
    assert f"the windows of rank {group.rank} are closed" in error_of(lambda: shard.transport.copies(0, 0))
    return "right"


def gather_rows(group: Group) -> str:
    rows, row_bytes = 7, 48
    shard = Shard.connect(group, interleaved_layout(group.world_size, rows, row_bytes))
    chunks = [chunk(rank, 0, rows * row_bytes) for rank in range(group.world_size)]
    expected = b"".join(c[row * row_bytes :][:row_bytes] for row in range(rows) for c in chunks)
    assert shard.gather(0) == expected
    shard.transport.verify_unit(0, memoryview(shard.slot))
    group.barrier()
    return "right"


def change_after_load(group: Group) -> None:
    shard = Shard.connect(group, flat_layout(group.world_size, CHUNK_SIZES))
    if group.rank == 1:
        memoryview(shard.window)[256 + 77] ^= 1
    group.barrier()
    shard.gather(0)
    shard.transport.verify_unit(0, memoryview(shard.slot))
    shard.gather(1)
    try:
        shard.transport.verify_unit(1, memoryview(shard.slot))
    finally:
        group.barrier()


def remap_a_rank(group: Group) -> str:
    """Rank 1 comes back with other memory; the old mapping stays readable, the generation tells."""
    shard = Shard.connect(group, flat_layout(group.world_size, CHUNK_SIZES))
    old_copies = shard.transport.copies(1, shard.slot.address)
    old_bytes, old_generations = shard.gather(1), shard.transport.generations()
    own = []
    if group.rank == 1:
        fresh = shard.device.allocate(shard.window.num_bytes, exportable=True)
        memoryview(fresh)[:] = b"\x05" * fresh.num_bytes
        own = [fresh.export_fd()]
    fds = group.all_gather(None, own)[1][1]
    if group.rank == 1:
        assert "cannot remap its own window" in error_of(lambda: shard.transport.remap(1, fds[0]))
    else:
        shard.transport.remap(1, fds[0])
        changed = [a != b for a, b in zip(old_generations, shard.transport.generations(), strict=True)]
        assert changed == [rank == 1 for rank in range(group.world_size)]
        new = shard.gather(1)
        assert new[4096 : 2 * 4096] == b"\x05" * 4096 and new[:4096] == old_bytes[:4096]
        assert shard.gather(1, old_copies) == old_bytes
    for fd in fds + own:
        os.close(fd)
    group.barrier()
    return "right"


def register_again_and_again(group: Group) -> list[int]:
    """One registration an allocation, however often it is asked for."""
    device = open_device()
    memory = device.allocate(8192, exportable=True)
    with WindowScope(device, group) as table:
        table.register({"a": memory})
        held = _held()
        for _ in range(100):
            table.register({"a": memory})
            assert table.num_registrations == 1 and _held() == held
        for _ in range(100):
            table.deregister("a")
            assert table.num_registrations == 0
            table.register({"a": memory})
            assert _held() == held
    return [1]


class WindowScope(WindowTable):
    def __enter__(self) -> WindowScope:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held() -> tuple[int, int]:
    """(descriptors, mappings of windows) of this process; the heap's mappings come and go."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("memfd:" in line for line in mappings)


def register_many(group: Group, seeded: bool) -> list[str]:
    """20 windows, named in another order on every rank."""
    device = open_device()
    names = [f"{model}.{layer}" for model in ("target", "draft") for layer in range(10)]
    names = names[group.rank :] + names[: group.rank]
    if seeded:
        names = list(set(names))  # processes have different hash seeds
    windows = {name: device.allocate(4096, exportable=True) for name in names}
    for name, memory in windows.items():
        memoryview(memory)[: len(name) + 1] = f"{name}{group.rank}".encode()
    table = WindowTable(device, group)
    table.register(windows)
    for name in names:
        for rank in range(group.world_size):
            found = bytes(memoryview(table.window(name, rank))[: len(name) + 1]).decode()
            assert found == f"{name}{rank}"
    group.barrier()
    return sorted(names)


def gather_beside_a_lost_peer(group: Group, number: int) -> str:
    """Rank 1 is killed or stopped once all is mapped; a stopped one is woken at the end, so that it can end."""
    layout = flat_layout(group.world_size, CHUNK_SIZES)
    shard = Shard.connect(group, layout)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), number)
        return "right"
    while group.processes[1].state() == "running":
        pass
    for unit in layout.units:
        whole = shard.gather(unit.unit)
        assert whole == b"".join(chunk(r, unit.unit, unit.chunk_bytes) for r in range(group.world_size))
        shard.transport.verify_unit(unit.unit, memoryview(shard.slot))
    others = group.subgroup([0, 2])
    assert others is not None
    others.barrier()  # a dead rank is missed only by those that wait for it
    if group.rank == 0 and number == signal.SIGSTOP:
        os.kill(group.processes[1].pid, signal.SIGCONT)
    return "right"


def map_and_die(group: Group, victims: list[int]) -> str:
    """`victims` are killed with all windows mapped; the others close."""
    shard = Shard.connect(group, flat_layout(group.world_size, CHUNK_SIZES))
    shard.gather(3)
    if group.rank in victims:
        os.kill(os.getpid(), signal.SIGKILL)
    shard.transport.close()
    return "closed"


def error_of(call: Callable[[], object]) -> str:
    """The text of the CommError that `call` raises; empty if it raises none."""
    try:
        call()
    except CommError as error:
        return str(error)
    return ""
