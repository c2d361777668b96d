"""The pull transport: peers' memory is really read, and every disagreement has a name."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
from census import no_growth
from pull_programs import (
    CHUNK_SIZES,
    WindowScope,
    change_after_load,
    gather_all,
    gather_beside_a_lost_peer,
    gather_rows,
    map_and_die,
    register_again_and_again,
    register_many,
    remap_a_rank,
)
from ranks import MODES, run_on_ranks, start_processes, try_on_ranks
from windows_model import Shard, chunk, flat_layout

from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group, LocalGroup
from graphshard.comm.launch import free_port
from graphshard.comm.pull import BoundCopy, PullTransport
from graphshard.comm.windows import WindowTable
from graphshard.core.errors import CommError, DeviceError
from graphshard.device import open_device


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_units_are_gathered_bit_for_bit(mode: str, world_size: int) -> None:
    run_on_ranks(gather_all, 1)  # the driver, opened once, stays
    with no_growth():
        assert run_on_ranks(gather_all, world_size, mode=mode) == ["right"] * world_size


def test_rows_are_gathered_by_2d_copies() -> None:
    assert run_on_ranks(gather_rows, 3) == ["right"] * 3


def test_bound_copies() -> None:
    assert BoundCopy(10, 0, 20, 0, 5, 1, 0, True).bound(2) == ("copy", 2, 10, 20, 5)
    assert BoundCopy(10, 8, 20, 5, 5, 3, 0, True).bound(2) == ("copy2d", 2, 10, 8, 20, 5, 5, 3)


@pytest.mark.parametrize("mode", MODES)
def test_other_bytes_name_reader_source_and_unit(mode: str) -> None:
    damaged = bytearray(chunk(1, 1, 4096))
    damaged[77] ^= 1
    pair = f"{checksum_of(damaged):016x} from rank 1 instead of {checksum_of(chunk(1, 1, 4096)):016x}"
    for outcome in try_on_ranks(change_after_load, 3, mode=mode):
        text = f"rank {outcome.rank} gathered other bytes of unit 1 than their owners loaded: checksum {pair};"
        assert outcome.error_type == "CommError" and text in outcome.error


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_peer_holds_nobody_up(number: int) -> None:
    """Its memory stays mapped: gathers from a dead or stopped rank are right."""
    with no_growth():
        outcomes = try_on_ranks(gather_beside_a_lost_peer, 3, int(number), mode="processes")
    expected = ["", "was killed by SIGKILL" if number == signal.SIGKILL else "", ""]
    assert [outcome.error for outcome in outcomes] == expected
    assert [outcomes[0].value, outcomes[2].value] == ["right", "right"]


def test_restarts_after_kills_with_mapped_windows() -> None:
    """Windows are nowhere in a file system, so that nothing can stay."""
    port = free_port()
    with no_growth():
        for victims in ([1], [0, 1], []) * 2:
            with start_processes(map_and_die, 2, victims, run_id="always the same", master_port=port) as ranks:
                results = ranks.wait(60.0)
            killed = [result.rank for result in results if result.error == "was killed by SIGKILL"]
            assert killed == victims
            assert all(result.value == "closed" for result in results if result.rank not in victims)


def test_empty_units_have_no_copies() -> None:
    layout = flat_layout(1, [0, 256])
    with LocalGroup(1) as groups:
        shard = Shard.connect(groups[0], layout)
        assert shard.transport.copies(0, shard.slot.address) == []
        shard.transport.verify_unit(0, memoryview(shard.slot))
        assert len(shard.transport.copies(1, shard.slot.address)) == 1


def test_nothing_sharded_needs_no_window() -> None:
    layout = replace(flat_layout(1, [256]), units=(), shard_bytes=0)
    with LocalGroup(1) as groups:
        transport = PullTransport(open_device(), groups[0], layout, None, [])
        assert transport.generations() == () and transport.num_registrations == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_came_back_is_remapped(mode: str) -> None:
    with no_growth():
        assert run_on_ranks(remap_a_rank, 3, mode=mode) == ["right"] * 3


def test_registrations_do_not_grow() -> None:
    assert run_on_ranks(register_again_and_again, 2, mode="processes") == [[1], [1]]


@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_windows_is_agreed(mode: str) -> None:
    first, *others = run_on_ranks(register_many, 3, mode == "processes", mode=mode)
    assert len(first) == 20 and all(other == first for other in others)


def register_unlike(group: Group, what: str) -> None:
    device = open_device()
    odd = group.rank == 2
    windows: dict[str, Any] = {"b": device.allocate(8192 if odd and what == "size" else 4096, exportable=True)}
    if odd and what == "name":
        windows["a"] = device.allocate(4096, exportable=True)
    if odd and what == "private":
        windows["b"] = device.allocate(4096)
    if odd and what == "inside":
        windows["b"] = Inside(windows["b"])
    if odd and what == "ordinary":
        windows["b"] = Ordinary(windows["b"])
    table = WindowTable(device, group)
    table.register(windows)


class Inside:
    """Somebody's idea of a window that begins inside an allocation."""

    def __init__(self, memory: Any) -> None:
        self.address, self.num_bytes, self.generation = memory.address + 64, 64, memory.generation


class Ordinary:
    """Memory that no driver allocated: on a border, yet without a descriptor."""

    def __init__(self, memory: Any) -> None:
        self.address, self.num_bytes, self.generation = memory.address, 4096, memory.generation

    def export_fd(self) -> int:
        return open_device().allocate(4096).export_fd()


@pytest.mark.parametrize(
    ("what", "error_type", "words"),
    [
        ("size", "CommError", "windows differ: number 0 is b (4096 B) on rank 0 and b (8192 B) on rank 2"),
        ("name", "CommError", "windows differ: number 0 is b (4096 B) on rank 0 and a (4096 B) on rank 2"),
        ("private", "DeviceError", "window export failed on rank 2: window b (4096 B) cannot be exported"),
        ("ordinary", "DeviceError", "a window is an allocation of its own, made exportable"),
        ("inside", "DeviceError", "is not on a 4096 B border: register the whole allocation"),
    ],
)
def test_what_cannot_be_a_window(what: str, error_type: str, words: str) -> None:
    """The ranks whose windows are right raise the same."""
    run_on_ranks(gather_all, 1)
    with no_growth():
        outcomes = try_on_ranks(register_unlike, 3, what)
    for outcome in outcomes:
        assert outcome.error_type == error_type and words in outcome.error


def test_one_allocation_has_one_name() -> None:
    device = open_device()
    memory, other = device.allocate(4096, exportable=True), device.allocate(4096, exportable=True)
    with LocalGroup(1) as groups, WindowScope(device, groups[0]) as table:
        table.register({"a": memory})
        with pytest.raises(CommError, match="window b is the allocation that is registered as a"):
            table.register({"b": memory})
        with pytest.raises(CommError, match="window a is registered with other memory"):
            table.register({"a": other})
        with pytest.raises(CommError, match=r"window z is not registered; known: a: register\(\)"):
            table.window("z", 0)


def bring_another_layout(group: Group, what: str) -> None:
    sizes = CHUNK_SIZES
    if group.rank == 1 and what == "units":
        sizes = [4096, 256, *CHUNK_SIZES[2:]]
    layout = flat_layout(4 if group.rank == 1 and what == "world size" else group.world_size, sizes)
    device = open_device()
    is_short = group.rank == 1 and what == "window"
    window = device.allocate(4096 if is_short else layout.shard_bytes, exportable=True)
    checksums = [0] * (1 if group.rank == 1 and what == "checksums" else len(sizes))
    PullTransport(device, group, layout, window, checksums)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("units", "layouts differ: rank"),
        ("world size", "on rank 1: the layout is for 4 ranks, the group has 2"),
        ("window", "on rank 1: the shard window of rank 1 has 4096 B, the layout needs 17664 B"),
        ("checksums", "on rank 1: rank 1 has 1 checksums for 4 units"),
    ],
)
def test_unlike_layouts_are_named(what: str, words: str) -> None:
    for outcome in try_on_ranks(bring_another_layout, 2, what):
        assert outcome.error_type == "CommError" and words in outcome.error


def test_peers_windows_are_read_only() -> None:
    with LocalGroup(2) as groups:
        device = open_device()
        memory = device.allocate(4096, exportable=True)
        fd = memory.export_fd()
        mapped = device.import_memory(fd, 4096)
        os.close(fd)
        assert memoryview(mapped).readonly
        with pytest.raises(TypeError):
            memoryview(mapped)[0] = 1
        assert groups[0].world_size == 2


def test_a_window_that_is_too_small_is_refused() -> None:
    fd = os.memfd_create("small")
    os.ftruncate(fd, 4096)
    try:
        with pytest.raises(DeviceError, match="8192"):
            open_device().import_memory(fd, 8192)
    finally:
        os.close(fd)
