"""Which device a rank gets, over lists of devices that a driver might show under each kind of mask."""

from __future__ import annotations

import pytest

from graphshard.core.errors import DeviceError
from graphshard.device.mapping import DeviceRow, choose_index, mask_entries, refuse_shared

PHYSICAL = [f"GPU-{digit * 8}-0000-4000-8000-{digit * 12}" for digit in "0123"]
MIG = "MIG-abcdef01-2345-5678-9abc-def012345678"


def shown(mask: str | None) -> list[str]:
    """What a driver shows under `mask` on a machine with `PHYSICAL` and one MIG instance."""
    if mask is None:
        return PHYSICAL
    devices = []
    for entry in mask_entries(mask):
        if entry.isdigit():
            named = [PHYSICAL[int(entry)]] if int(entry) < len(PHYSICAL) else []
        else:
            named = [uuid for uuid in [*PHYSICAL, MIG] if uuid.startswith(entry)]
        if not named:
            break  # nothing counts after an entry that names nothing
        devices += named
    return devices


def mapped(mask: str | None, num_ranks: int, *, same_gpu: bool = False) -> list[str]:
    """The UUID of each rank's device, all ranks with one mask."""
    uuids = shown(mask)
    return [uuids[choose_index(uuids, mask, rank, same_gpu=same_gpu)] for rank in range(num_ranks)]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, PHYSICAL[:2]),
        ("0,1", PHYSICAL[:2]),
        ("3,1", [PHYSICAL[3], PHYSICAL[1]]),
        (" 3 , 1 ", [PHYSICAL[3], PHYSICAL[1]]),
        (f"{PHYSICAL[2]},{PHYSICAL[0]}", [PHYSICAL[2], PHYSICAL[0]]),
        (f"{MIG},{PHYSICAL[0]}", [MIG, PHYSICAL[0]]),
        ("GPU-3,GPU-0", [PHYSICAL[3], PHYSICAL[0]]),  # a UUID may be cut short
    ],
)
def test_local_rank_is_an_index_into_what_is_visible(mask: str | None, expected: list[str]) -> None:
    assert mapped(mask, 2) == expected


@pytest.mark.parametrize("own", ["2", PHYSICAL[2], "GPU-2", MIG])
def test_one_device_each_is_used_whatever_the_rank(own: str) -> None:
    uuids = shown(own)
    assert len(uuids) == 1
    assert [choose_index(uuids, own, rank) for rank in (0, 3, 7)] == [0, 0, 0]


@pytest.mark.parametrize("mask", ["", " ", "-1", "-1,0", "9", "no-such"])
def test_no_visible_device_names_the_mask(mask: str) -> None:
    with pytest.raises(DeviceError, match="local rank 1 has no device: the driver shows none") as caught:
        choose_index(shown(mask), mask, 1)
    assert "CUDA_VISIBLE_DEVICES=" in str(caught.value)


def test_no_device_at_all() -> None:
    with pytest.raises(DeviceError, match=r"CUDA_VISIBLE_DEVICES not set.*is there a GPU"):
        choose_index([], None, 0)


def test_more_ranks_than_devices_are_refused_or_share() -> None:
    with pytest.raises(DeviceError, match=r"local rank 2 has no device: the driver shows 2 .*=3,1.*at most 2 ranks"):
        mapped("3,1", 3)
    with pytest.raises(DeviceError, match=r"shows 4 .*not set"):
        mapped(None, 5)
    with pytest.raises(DeviceError, match="local rank -1 is no rank"):
        choose_index(PHYSICAL, None, -1)
    assert mapped("3,1", 4, same_gpu=True) == [PHYSICAL[3], PHYSICAL[1]] * 2


@pytest.mark.parametrize(
    ("uuids", "mask", "reason"),
    [
        (PHYSICAL, "3,1", "shows 4 devices where 2 are named"),
        (PHYSICAL[:2], f"{PHYSICAL[1]},{PHYSICAL[0]}", "visible device 0 is GPU-0.*, where GPU-1"),
        (PHYSICAL[:1], MIG, "where MIG-"),
    ],
)
def test_a_mask_set_too_late_is_refused(uuids: list[str], mask: str, reason: str) -> None:
    with pytest.raises(DeviceError, match=reason) as caught:
        choose_index(uuids, mask, 0)
    assert "set it before the process starts" in str(caught.value)


def test_drivers_write_uuids_in_more_than_one_way() -> None:
    assert choose_index(["GPU-" + MIG.removeprefix("MIG-").upper()], MIG, 0) == 0
    assert choose_index([MIG], f"MIG-{PHYSICAL[0]}/1/0", 5) == 0  # the old form names no UUID of the instance


def row(rank: int, uuid: str, name: str = "cuda:0", mask: str | None = None) -> DeviceRow:
    return DeviceRow(rank, name, uuid, mask)


def test_ranks_on_one_device_are_refused_and_both_named() -> None:
    rows = [row(0, PHYSICAL[0]), row(1, PHYSICAL[1], "cuda:1"), row(2, PHYSICAL[0], "cuda:0", "0")]
    with pytest.raises(DeviceError, match=f"ranks 0 and 2 are both on {PHYSICAL[0]}") as caught:
        refuse_shared(rows)
    assert f"rank 1: cuda:1 {PHYSICAL[1]} (CUDA_VISIBLE_DEVICES not set)" in str(caught.value)
    refuse_shared(rows, same_gpu=True)


def test_instances_of_one_gpu_and_equal_names_are_no_duplicates() -> None:
    refuse_shared([row(0, MIG, mask=MIG), row(1, PHYSICAL[0]), row(2, PHYSICAL[1])])


def test_every_pair_is_named() -> None:
    with pytest.raises(DeviceError, match=r"2 devices are used twice: ranks 0 and 2 .*; ranks 1 and 3 "):
        refuse_shared([row(rank, PHYSICAL[rank % 2]) for rank in range(4)])
