"""Which device each rank has, and the probe before pull: over the group, on devices that the host plays."""

from __future__ import annotations

import os

import pytest
from ranks import MODES, run_on_ranks, try_on_ranks

from graphshard._core import Memory
from graphshard.comm.devices import PROBE_BYTES, compare_devices, probe_pull
from graphshard.comm.group import Group
from graphshard.core.errors import DeviceError
from graphshard.device import CudaDevice, open_device
from graphshard.device.host import library_path

TIMEOUT_S = 30.0
UUIDS = [f"GPU-0000000{digit}-0000-4000-8000-000000000000" for digit in range(3)]


class Played(CudaDevice):
    """A GPU with a UUID of its own; `refuses` and `swaps` are ranks whose windows it cannot map, or maps wrongly."""

    def __init__(self, uuid: str = UUIDS[0], same_gpu: bool = False, refuses: int = -1, swaps: int = -1) -> None:
        super().__init__(0, library=str(library_path()), same_gpu=same_gpu)
        self._uuid, self._bad = uuid, {refuses: "refuse", swaps: "swap"}
        self._others = 0

    def at(self, rank: int) -> Played:
        """Imports are made by source rank, this rank's own left out."""
        self._sources = iter([source for source in range(99) if source != rank])
        return self

    @property
    def uuid(self) -> str:
        return self._uuid

    def import_memory(self, fd: int, num_bytes: int, read_only: bool = True) -> Memory:
        bad = self._bad.get(next(self._sources))
        if bad == "refuse":
            raise DeviceError("cuda:0: peer access is not supported")
        return self.allocate(num_bytes) if bad == "swap" else super().import_memory(fd, num_bytes, read_only)


def table(group: Group, uuids: list[str], same_gpu: list[bool]) -> list[str]:
    return [str(row) for row in compare_devices(group, Played(uuids[group.rank], same_gpu[group.rank]))]


def test_every_rank_has_the_same_table() -> None:
    tables = run_on_ranks(table, 3, UUIDS, [False] * 3)
    assert tables[0] == tables[1] == tables[2]
    assert [line.split(" (")[0] for line in tables[0]] == [f"rank {r}: cuda:0 {UUIDS[r]}" for r in range(3)]


@pytest.mark.parametrize("same_gpu", [[False] * 3, [True, False, True]])
def test_ranks_on_one_gpu_are_named_on_every_rank(same_gpu: list[bool]) -> None:
    outcomes = try_on_ranks(table, 3, [UUIDS[0], UUIDS[1], UUIDS[0]], same_gpu)
    assert [o.error_type for o in outcomes] == ["DeviceError"] * 3
    assert all(f"ranks 0 and 2 are both on {UUIDS[0]}" in o.error for o in outcomes)


def test_ranks_may_share_a_gpu_if_all_say_so() -> None:
    assert len(run_on_ranks(table, 3, [UUIDS[0]] * 3, [True] * 3)[0]) == 3


def test_ranks_on_the_host_are_on_no_gpu() -> None:
    assert run_on_ranks(lambda group: compare_devices(group, open_device()), 2) == [(), ()]


def probe(group: Group, bad: dict[str, dict[str, int]]) -> None:
    probe_pull(group, Played(**bad.get(str(group.rank), {})).at(group.rank), TIMEOUT_S)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_copies_between_all_pairs_arrive(mode: str, world_size: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert run_on_ranks(probe, world_size, {}, mode=mode) == [None] * world_size
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_pairs_that_cannot_be_mapped_are_named_on_every_rank() -> None:
    outcomes = try_on_ranks(probe, 3, {"1": {"refuses": 2}, "2": {"refuses": 0}})
    for outcome in outcomes:
        assert outcome.error_type == "DeviceError"
        assert "2 of 6 copies between ranks failed" in outcome.error
        for pair in ("rank 1 from rank 2", "rank 2 from rank 0"):
            assert f"{pair}: cuda:0: peer access is not supported" in outcome.error


def test_bytes_that_arrive_as_others_are_found() -> None:
    for outcome in try_on_ranks(probe, 2, {"0": {"swaps": 1}}):
        assert f"rank 0 from rank 1: {PROBE_BYTES} of {PROBE_BYTES} bytes arrived as others" in outcome.error
        assert "rank 1 from rank 0" not in outcome.error
