"""Windows: memory that peers may address. Each rank exports its own and maps everybody's, in one agreed order.

One allocation is registered once, under one name, whole (offsets are added to its address afterwards). The order is
that of the sorted names; lists are compared before anything is mapped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from graphshard._core import DriverError, Memory
from graphshard.comm.group import Group
from graphshard.core.errors import CommError, DeviceError
from graphshard.device.base import Device

WINDOW_ALIGNMENT_BYTES = 4096


class WindowTable:
    """All windows of a group: this rank's own, and its mappings of the peers'."""

    def __init__(self, device: Device, group: Group) -> None:
        self._device = device
        self._group = group
        self._windows: dict[str, list[Memory]] = {}
        self._retired: list[tuple[str, int, Memory]] = []
        self._is_closed = False

    @property
    def num_registrations(self) -> int:
        """Windows registered now; each is one allocation of this rank and one mapping a peer."""
        return len(self._windows)

    def register(self, windows: Mapping[str, Memory], *, read_only: bool = True) -> None:
        """Register `windows` by name (collective). Those registered already, with the same memory, stay as they are.

        Without `read_only` peers may write to them.

        Raises:
            DeviceError: an allocation cannot be a window: not exportable, or not on a 4096 B border.
            CommError: ranks name other windows or sizes, or one allocation has two names.
        """
        names = sorted(windows)
        new = self._group.agree("window check", lambda: [name for name in names if self._is_new(name, windows[name])])
        fds: list[int] = []
        try:
            self._group.agree("window export", lambda: _export(new, windows, fds))
            listed = [[name, windows[name].num_bytes, name in new] for name in names]
            gathered: list[Any] = self._group.all_gather(listed, fds, name="window list")
        finally:
            _close_all(fds)
        try:
            _compare([rows for rows, _ in gathered])
            columns = [peer_fds for _, peer_fds in gathered]
            self._group.agree("window import", lambda: self._import(new, windows, columns, read_only))
        finally:
            for _, peer_fds in gathered:
                _close_all(peer_fds)

    def window(self, name: str, rank: int) -> Memory:
        """Rank `rank`'s window `name` as mapped here."""
        if self._is_closed:
            raise CommError(f"window {name} of rank {rank}: the windows of rank {self._group.rank} are closed")
        if name not in self._windows:
            raise CommError(f"window {name} is not registered; known: {', '.join(self._windows) or 'none'}: register()")
        return self._windows[name][rank]

    def generations(self, name: str) -> tuple[int, ...]:
        """One number a rank: another one means another mapping, even at the same address."""
        return tuple(self.window(name, rank).generation for rank in range(self._group.world_size))

    def remap(self, name: str, rank: int, fd: int) -> None:
        """Map `fd` (stays the caller's) as the window of a peer that came back.

        Graphs bound before hold the old addresses: the old mapping stays until `drop_retired`, and `generations`
        changes.
        """
        old = self.window(name, rank)
        if rank == self._group.rank:
            raise CommError(f"window {name}: rank {rank} cannot remap its own window; register it anew")
        self._windows[name][rank] = self._device.import_memory(fd, old.num_bytes, read_only=True)
        self._retired.append((name, rank, old))

    def undo_remap(self, name: str, rank: int) -> None:
        """Go back to the mapping that was before the last `remap` of this window."""
        index = max(i for i, (other, peer, _) in enumerate(self._retired) if (other, peer) == (name, rank))
        self._windows[name][rank] = self._retired.pop(index)[2]

    def drop_retired(self) -> None:
        """Unmap what was remapped; lists and graphs that still hold such memory keep it until they go."""
        self._retired.clear()

    def adopt(self, name: str, own: Memory, fds: Sequence[int | None]) -> None:
        """Map the windows of all peers from `fds`, by rank, which stay the caller's. Local: for a rank that came back.

        Raises:
            CommError: a peer shows none.
            DeviceError: an allocation cannot be a window, or a peer's cannot be mapped.
        """
        self._is_new(name, own)
        mapped: list[Memory] = []
        for rank, fd in enumerate(fds):
            if rank == self._group.rank:
                mapped.append(own)
            elif fd is None:
                raise CommError(f"window {name}: rank {rank} shows none, rank {self._group.rank} shards its weights")
            else:
                mapped.append(self._device.import_memory(fd, own.num_bytes, read_only=True))
        self._windows[name] = mapped

    def deregister(self, name: str) -> None:
        """Forget a window, here only; nothing may use its addresses any more."""
        self.window(name, self._group.rank)
        del self._windows[name]

    def close(self) -> None:
        """Unmap the peers' windows. Local, idempotent; graphs that read them must be gone."""
        self._is_closed = True
        self._windows.clear()
        self._retired.clear()

    def _is_new(self, name: str, memory: Memory) -> bool:
        if self._is_closed:
            raise CommError(f"window {name}: the windows of rank {self._group.rank} are closed")
        if memory.address % WINDOW_ALIGNMENT_BYTES:
            raise DeviceError(
                f"window {name} at {memory.address:#x} is not on a {WINDOW_ALIGNMENT_BYTES} B border: "
                "register the whole allocation, and add offsets to its address"
            )
        for other, mapped in self._windows.items():
            is_same = mapped[self._group.rank].generation == memory.generation
            if is_same and other != name:
                raise CommError(f"window {name} is the allocation that is registered as {other}: one name each")
            if other == name and not is_same:
                raise CommError(f"window {name} is registered with other memory: deregister it on all ranks first")
        return name not in self._windows

    def _import(
        self, names: list[str], windows: Mapping[str, Memory], columns: list[list[int]], read_only: bool
    ) -> None:
        imported: dict[str, list[Memory]] = {}
        for index, name in enumerate(names):
            own = windows[name]
            imported[name] = [
                own if rank == self._group.rank else self._device.import_memory(fds[index], own.num_bytes, read_only)
                for rank, fds in enumerate(columns)
            ]
        self._windows.update(imported)


def _export(names: list[str], windows: Mapping[str, Memory], fds: list[int]) -> None:
    for name in names:
        try:
            fds.append(windows[name].export_fd())
        except DriverError as error:
            raise DeviceError(
                f"window {name} ({windows[name].num_bytes} B) cannot be exported ({error}): "
                "a window is an allocation of its own, made exportable"
            ) from error


def _compare(listed: list[list[list[object]]]) -> None:
    """CommError naming the first difference between the ranks' lists of (name, bytes, is new)."""
    for rank, rows in enumerate(listed):
        for index in range(max(len(rows), len(listed[0]))):
            mine = listed[0][index] if index < len(listed[0]) else None
            theirs = rows[index] if index < len(rows) else None
            if mine != theirs:
                raise CommError(
                    f"windows differ: number {index} is {_row_text(mine)} on rank 0 and {_row_text(theirs)} on rank "
                    f"{rank}; register the same windows on all ranks"
                )


def _row_text(row: list[object] | None) -> str:
    if row is None:
        return "nothing"
    name, num_bytes, is_new = row
    return f"{name} ({num_bytes} B{'' if is_new else ', registered before'})"


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
