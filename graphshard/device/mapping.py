"""Which device a rank computes on: a pure function of what the driver shows, and the table that ranks compare.

Three numberings meet here and must not be mixed: *physical* (nvidia-smi's), *visible* (what the driver shows this
process under CUDA_VISIBLE_DEVICES, from 0 on; `cuda:1` means this one) and *local rank*. Only visible indices and UUIDs
are used; entries of CUDA_VISIBLE_DEVICES are never read as numbers, so that UUIDs of GPUs and MIG instances will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphshard.core.errors import DeviceError

MASK = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DeviceRow:
    """The device of one rank, as it tells the others."""

    rank: int
    name: str
    """`cuda:1`, by the numbering of that rank's process."""
    uuid: str
    """Of the GPU, or of the MIG instance."""
    mask: str | None = None
    """What CUDA_VISIBLE_DEVICES is there; None: not set."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.name} {self.uuid} ({mask_text(self.mask)})"


def mask_text(mask: str | None) -> str:
    """`CUDA_VISIBLE_DEVICES=3,1`, for errors."""
    return f"{MASK} not set" if mask is None else f"{MASK}={mask!r}" if not mask.strip() else f"{MASK}={mask}"


def choose_index(uuids: Sequence[str], mask: str | None, local_rank: int, *, same_gpu: bool = False) -> int:
    """The visible index of the device of `local_rank`.

    A process that sees one device uses it, whatever its rank: each rank has a mask of its own then (two ranks that see
    the same one are found when the table is compared). Otherwise local rank r has visible device r.

    Args:
        uuids: what the driver shows this process, by visible index.
        mask: CUDA_VISIBLE_DEVICES; None if it is not set.
        local_rank: this rank's place among the ranks of its machine.
        same_gpu: whether ranks may share a device; they are dealt out in turn then.

    Raises:
        DeviceError: no device is visible, more ranks than devices, or the mask is not the one the driver went by.
    """
    if not uuids:
        hint = f"unset {MASK} or name a device in it" if mask is not None else "is there a GPU in this machine?"
        raise DeviceError(f"local rank {local_rank} has no device: the driver shows none ({mask_text(mask)}); {hint}")
    check_mask(uuids, mask)
    if local_rank < 0:
        raise DeviceError(f"local rank {local_rank} is no rank: ranks of a machine count from 0")
    if len(uuids) == 1:
        return 0
    if same_gpu:
        return local_rank % len(uuids)
    if local_rank >= len(uuids):
        raise DeviceError(
            f"local rank {local_rank} has no device: the driver shows {len(uuids)} ({mask_text(mask)}); start at most "
            f"{len(uuids)} ranks on this machine, or let ranks share devices with same_gpu=True (for tests)"
        )
    return local_rank


def check_mask(uuids: Sequence[str], mask: str | None) -> None:
    """DeviceError if the driver cannot have gone by `mask`: it was changed after the process had begun to use CUDA.

    Then the mask of the environment names other devices than `cuda:0`, `cuda:1`, ... are.
    """
    if mask is None:
        return
    entries = mask_entries(mask)
    late = f"{mask_text(mask)} was changed after CUDA was initialised here; set it before the process starts"
    if len(uuids) > len(entries):
        raise DeviceError(f"the driver shows {len(uuids)} devices where {len(entries)} are named: {late}")
    for index, (uuid, entry) in enumerate(zip(uuids, entries, strict=False)):
        if _is_uuid(entry) and not _digits(uuid).startswith(_digits(entry)):
            raise DeviceError(f"visible device {index} is {uuid}, where {entry} is named: {late}")


def mask_entries(mask: str) -> tuple[str, ...]:
    """The entries of a mask, as text: indices, `GPU-...`, `MIG-...`. Nothing counts from an empty entry or `-1` on."""
    entries: list[str] = []
    for entry in mask.split(","):
        entry = entry.strip()
        if not entry or entry == "-1":
            break
        entries.append(entry)
    return tuple(entries)


def refuse_shared(rows: Sequence[DeviceRow], *, same_gpu: bool = False) -> None:
    """DeviceError naming every pair of ranks on one device, unless `same_gpu` allows it."""
    if same_gpu:
        return
    first: dict[str, DeviceRow] = {}
    pairs = []
    for row in rows:
        other = first.setdefault(row.uuid, row)
        if other is not row:
            pairs.append(f"ranks {other.rank} and {row.rank} are both on {row.uuid} ({other.name} and {row.name})")
    if pairs:
        table = "; ".join(map(str, rows))
        raise DeviceError(
            f"{len(pairs)} device{'s are' if len(pairs) > 1 else ' is'} used twice: {'; '.join(pairs)}. Give each "
            f"rank a device of its own, or allow sharing with same_gpu=True (for tests). The table: {table}"
        )


def _is_uuid(entry: str) -> bool:
    """Whether `entry` is `GPU-<uuid>` or `MIG-<uuid>`; `MIG-GPU-<uuid>/<gi>/<ci>` names no instance's own UUID."""
    return entry.startswith(("GPU-", "MIG-")) and not entry.startswith("MIG-GPU-")


def _digits(uuid: str) -> str:
    """The hexadecimal digits: prefixes and dashes are written in more than one way."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
