"""Saving shards: every rank writes what it keeps, so that the next start reads it back as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from graphshard.comm.checksums import checksum_of
from graphshard.comm.group import Group
from graphshard.core.counts import by_value
from graphshard.core.errors import CommError, SpecError
from graphshard.core.layout import UnitLayout
from graphshard.load.shard_file import ShardFileWriter
from graphshard.load.shard_folder import commit_manifest, open_folder, remove_strays
from graphshard.load.shard_manifest import ShardManifest, read_manifest
from graphshard.runtime.compute import refuse_inside_segment
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.stepping import Stepping

ROUND_BYTES = 2**30
"""What a rank writes before it looks after the others: their disks may differ, their waits are bounded."""


class Saving(Stepping):
    """The base of `Runtime` that writes its weights to disk."""

    group: Group

    def save_shards(self, folder: str | Path) -> ShardManifest:
        """Write this rank's chunks and resident weights to `folder`, for `compile(checkpoint=folder)`. Collective.

        What `folder` held is replaced at the very end, as a whole; until then, and where anything fails on any rank,
        it stays loadable as it was. Returns what the manifest says.

        Order:   after the last step; steps of other threads wait until it has ended.
        Blocks:  the host: a rank is waited for as long as the group says, for each GiB that it writes.
        Capture: no.

        Raises:
            SpecError: a checkpoint or a file lies at `folder`, or ranks were given different folders.
            DeviceError: a file cannot be written: the disk is full, say.
            CommError: a rank is missing or came back, or ranks have unlike resident weights or epochs.
            ProgramError: a step of this thread is open, or the runtime is closed.
        """
        refuse_inside_segment("save_shards")
        with self.turn.lock:
            self.check_weights()
            self.turn.wait_until_free()
            bare = ShardManifest.of(self.model, self.plan, self._control.mine.epoch)
            return _save(self.group, bare, self._memory, Path(folder))


def _save(group: Group, bare: ShardManifest, memory: RuntimeMemory, folder: Path) -> ShardManifest:
    """Write all, then the manifest: the only moment at which the folder changes for those who load it."""
    group.agree("save_shards", lambda: open_folder(folder))
    _check_alike(group, bare, folder)
    with contextlib.ExitStack() as stack:
        stack.callback(remove_strays, folder, group.rank)  # what the manifest does not name when this ends
        writer = stack.enter_context(group.agree("save_shards", lambda: ShardFileWriter(folder, bare, group.rank)))
        chunks: list[int] = []
        for units in _rounds(bare.layout.units):
            chunks += group.agree("save_shards", partial(_write_chunks, writer, memory, units))
        resident = group.agree("save_shards", lambda: _write_resident(writer, memory))
        manifest = _agreed_manifest(group, bare, chunks, resident)
        group.agree("save_shards", lambda: writer.end(manifest))
        group.agree("save_shards", lambda: commit_manifest(folder, manifest) if group.rank == 0 else None)
        group.agree("save_shards", lambda: _check_manifest(folder, manifest))
        if group.rank == 0:
            remove_strays(folder)
    return manifest


def _check_alike(group: Group, bare: ShardManifest, folder: Path) -> None:
    """SpecError or CommError, on every rank, if ranks were given different folders or have unlike weights."""
    stat = folder.stat()
    told: list[Any] = [
        value
        for value, _ in group.all_gather(
            [stat.st_dev, stat.st_ino, str(folder.absolute()), bare.epoch, bare.layout_digest], name="save_shards"
        )
    ]
    if len({(one[0], one[1]) for one in told}) > 1:
        raise SpecError(
            f"save_shards: ranks were given different folders: {by_value([one[2] for one in told])}; give all of them "
            "one that they share"
        )
    for what, values in (("epochs", [one[3] for one in told]), ("layouts", [one[4][:12] for one in told])):
        if len(set(values)) > 1:
            raise CommError(f"save_shards: ranks have unlike {what}: {by_value(values)}; start all ranks anew")


def _rounds(units: Sequence[UnitLayout]) -> list[list[UnitLayout]]:
    """Units one after the other, up to `ROUND_BYTES` of chunks together, or one that is larger."""
    rounds: list[list[UnitLayout]] = []
    filled = ROUND_BYTES
    for unit in units:
        if filled + unit.chunk_bytes > ROUND_BYTES:
            rounds.append([])
            filled = 0
        rounds[-1].append(unit)
        filled += unit.chunk_bytes
    return rounds


def _write_chunks(writer: ShardFileWriter, memory: RuntimeMemory, units: Sequence[UnitLayout]) -> list[int]:
    checksums = []
    for unit in units:
        chunk = memory.chunk(unit)
        writer.write("shards", unit.chunk_offset, chunk)
        checksums.append(checksum_of(chunk))
    writer.sync()
    return checksums


def _write_resident(writer: ShardFileWriter, memory: RuntimeMemory) -> list[int]:
    checksums = []
    for view in memory.layout.resident:
        data = memory.resident_bytes(view)
        writer.write("resident", view.offset, data)
        checksums.append(checksum_of(data))
    writer.sync()
    return checksums


def _agreed_manifest(
    group: Group, bare: ShardManifest, chunks: Sequence[int], resident: Sequence[int]
) -> ShardManifest:
    """The manifest with everybody's checksums; CommError, on every rank, if resident weights differ."""
    told: list[Any] = [value for value, _ in group.all_gather([list(chunks), list(resident)], name="save_shards")]
    for index, view in enumerate(bare.layout.resident):
        values = [f"{one[1][index]:016x}" for one in told]
        if len(set(values)) > 1:
            raise CommError(
                f"save_shards: resident weight {view.weight} is not the same on all ranks: its checksum is "
                f"{by_value(values)}; start all ranks anew from one checkpoint"
            )
    return replace(bare, chunks=tuple(tuple(one[0]) for one in told), resident=tuple(told[0][1]))


def _check_manifest(folder: Path, manifest: ShardManifest) -> None:
    found = read_manifest(folder)
    if found != manifest:
        raise CommError(
            f"save_shards: {folder} holds another manifest (epoch {found.epoch}) than was just written (epoch "
            f"{manifest.epoch}): somebody else saves there; give a folder of this job's own"
        )
