"""Faults of windows: counts that stay flat, mappings that changed, memory that is no window."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from fault_tools import alone, collect
from ranks import run_on_ranks

import graphshard
from graphshard._core import DriverError, Memory, OpList, Stream
from graphshard.comm.group import Group, LocalGroup
from graphshard.comm.windows import WindowTable
from graphshard.device import open_device

LAYERS = [[3000], [4000], [5000]]


def num_mappings() -> int:
    """Mappings of the host driver's memory."""
    return sum("memfd:graphshard" in line for line in Path("/proc/self/maps").read_text().splitlines())


# --- registered again and again ---


def test_windows_registered_1000_times_are_one() -> None:
    """Registered again and again, and with deregistering between: one window, no descriptor, no mapping."""
    device = open_device()
    memory = device.allocate(8192, exportable=True)
    with LocalGroup(1) as groups:
        table = WindowTable(device, groups[0])
        table.register({"a": memory})
        with no_growth():
            before = num_mappings()
            for _ in range(1000):
                table.register({"a": memory})
                assert table.num_registrations == 1
            for _ in range(1000):
                table.deregister("a")
                assert table.num_registrations == 0
                table.register({"a": memory})
            assert num_mappings() == before
        table.close()


def open_and_close(group: Group, num_times: int, transport: str) -> tuple[int, int]:
    """Mappings at first and at last."""
    model = ByteModel(LAYERS)
    counts = []
    for _ in range(num_times):
        with compile_bytes(group, model, units="layer", prefetch_depth=1, transport=transport) as runtime:
            if runtime.is_collective:
                assert len(runtime._transport.generations()) == 2, "shards, and slots, which peers write to"
            else:
                assert runtime._transport.num_registrations == 1, "all units lie in one window"
            runtime.graph(1).replay()
        del runtime
        group.barrier()
        counts.append(num_mappings() if group.rank == 0 else 0)
        group.barrier()
    return counts[1], counts[-1]


@pytest.mark.parametrize("num_times", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_runtimes_opened_again_and_again_hold_nothing(num_times: int, transport: str) -> None:
    """Compile, step and close; descriptors, threads and mappings as before."""
    run_on_ranks(open_and_close, 2, 2, transport)
    with no_growth():
        (first, last), _ = run_on_ranks(open_and_close, 2, num_times, transport, timeout_s=600.0)
        assert last <= first + 4, "mappings do not add up (a peer may not have let go of its last ones)"
    collect()


# --- mappings that changed ---


def remap_a_peer(group: Group, same_bytes: bool) -> list[str]:
    """Rank 1 lends other memory than before; rank 0 maps it, and goes on only over what it has bound again."""
    model = ByteModel(LAYERS)
    wrong: list[str] = []
    with compile_bytes(group, model, units="layer", prefetch_depth=1, head="tail") as runtime:
        graph, transport = runtime.graph(1), runtime._transport
        wrong += wrong_after(runtime, model, graph.replay)
        own, fresh = [], None
        if group.rank == 1:
            shards = memoryview(runtime._memory.shards)
            fresh = open_device().allocate(len(shards), exportable=True)
            memoryview(fresh)[:] = shards if same_bytes else bytes(len(shards))
            own = [fresh.export_fd()]
        fds = group.all_gather(None, own)[1][1]
        if group.rank == 0:
            before = transport.generations()
            transport.remap(1, fds[0])
            assert [a != b for a, b in zip(before, transport.generations(), strict=True)] == [False, True]
            uses: list[Callable[[], object]] = [graph.replay, lambda: runtime.run(1), lambda: runtime.prefetch(1)]
            for use in uses:
                with pytest.raises(graphshard.DeviceError, match=r"remapped .* addresses are stale; call Runtime\.c"):
                    use()
            if same_bytes:
                runtime.capture()
                for act in (runtime.graph(1).replay, lambda: runtime.run(1), runtime.graph(1).replay):
                    wrong += wrong_after(runtime, model, act)
            else:
                with pytest.raises(graphshard.CommError, match=r"rank 0 gathered other bytes of unit 0 .* from rank 1"):
                    runtime.capture()
        for fd in fds + own:
            os.close(fd)
        group.barrier()
    return wrong


def test_a_remapped_window_refuses_steps_until_it_is_captured_again() -> None:
    """Same offsets, other memory: a graph's addresses are those of the old mapping."""
    assert run_on_ranks(remap_a_peer, 2, True) == [[], []]


def test_a_remapped_window_with_other_bytes_is_named() -> None:
    """What came back does not hold what its owner loaded, and no graph is captured over it."""
    assert run_on_ranks(remap_a_peer, 2, False) == [[], []]


def test_a_new_mapping_at_an_old_address_is_another_generation() -> None:
    """Generations tell mappings apart where addresses do not."""
    device = open_device()
    seen: set[int] = set()
    addresses: list[int] = []
    for _ in range(50):
        memory = device.allocate(8192)
        assert memory.generation not in seen
        seen.add(memory.generation)
        addresses.append(memory.address)
        del memory
    assert len(set(addresses)) < len(addresses), "no address came twice, so that nothing was shown"


# --- memory that is no window ---


def test_what_no_driver_allocated_is_refused_by_address() -> None:
    """Ordinary memory, aligned or not, as the source or the destination of any op."""
    driver = open_device().driver
    memory, stream = Memory(driver, 8192), Stream(driver)
    ordinary = np.zeros(16384, dtype=np.uint8)
    aligned = -(-ordinary.ctypes.data // 4096) * 4096
    for address in (aligned, aligned + 64):  # what lies beside a memory may be another
        for op in (
            ("copy", 0, memory.address, address, 64),
            ("copy", 0, address, memory.address, 64),
            ("fill", 0, address, 1, 64),
            ("write_value", 0, address, 1),
            ("wait_value", 0, address, 1),
        ):
            with pytest.raises(DriverError, match=f"{address:#x}.*at op 0 of 1 on stream 0"):
                OpList(driver, [stream], 0, [op])
    with pytest.raises(DriverError, match="at op 0 of 1 on stream 0"):
        OpList(driver, [stream], 0, [("write_value", 0, memory.address + 2, 1)])


def test_a_window_is_a_whole_allocation_made_for_it() -> None:
    """Private memory and a peer's mapping are no windows, and the error says what is."""
    device = open_device()
    exportable = device.allocate(8192, exportable=True)
    fd = exportable.export_fd()
    mapped = device.import_memory(fd, 8192)
    os.close(fd)
    for memory in (device.allocate(8192), mapped):
        with LocalGroup(1) as groups:
            table = WindowTable(device, groups[0])
            with pytest.raises(graphshard.DeviceError, match="a window is an allocation of its own, made exportable"):
                table.register({"shard": memory})
            table.register({"shard": exportable})
            assert table.window("shard", 0).address % 4096 == 0
            table.close()


def test_the_shard_window_is_whole_aligned_and_alone() -> None:
    """What a runtime lends is one exportable allocation; slots and buffers are never lent."""
    with alone(ByteModel(LAYERS)) as runtime:
        rows = {row.name: row for row in runtime.buffer_table()}
        assert rows["shards"].address % 4096 == 0 and rows["shards"].address != rows["slots"].address
        assert runtime._transport._windows.window("shard", 0).address == rows["shards"].address
        with pytest.raises(DriverError, match="is not exportable"):
            runtime._memory.slots.export_fd()
