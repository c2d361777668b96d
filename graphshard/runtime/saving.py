"""Saving shards: every rank writes what it keeps, so that the next start reads it back as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphshard.comm.checksums import Checksum
from graphshard.comm.group import Group
from graphshard.core.counts import by_value
from graphshard.core.errors import CommError, SpecError
from graphshard.load.shard_file import ShardFileWriter
from graphshard.load.shard_folder import commit_manifest, open_folder, remove_strays
from graphshard.load.shard_manifest import ShardManifest, read_manifest
from graphshard.runtime.compute import refuse_inside_segment
from graphshard.runtime.loop import StepObserver
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.stepping import Stepping

PIECE_BYTES = 4 << 20
"""What is written at a time, and hashed while it is in the cache."""

SYNC_BYTES = 1 << 30
"""What the disk may be behind: a rank that waits for its disk shows no progress."""


class Saving(Stepping):
    """The base of `Runtime` that writes its weights to disk."""

    group: Group
    observer: StepObserver | None

    def save_shards(self, folder: str | Path) -> ShardManifest:
        """Write this rank's chunks and resident weights to `folder`, for `compile(checkpoint=folder)`. Collective.

        What `folder` held is replaced at the very end, as a whole; until then, and where anything fails on any rank,
        it stays loadable as it was. Returns what the manifest says.

        Order:   after the last step; steps of other threads wait until it has ended.
        Blocks:  the host, as long as bytes are written; a rank that writes none is given up after some timeouts.
        Capture: no.

        Raises:
            SpecError: a checkpoint or a file lies at `folder`, ranks were given different folders, or this is the
                runtime of an attached module.
            DeviceError: a file cannot be written: the disk is full, say.
            CommError: a rank is missing or came back, or ranks have unlike resident weights or epochs.
            ProgramError: a step of this thread is open, or the runtime is closed.
        """
        refuse_inside_segment("save_shards")
        with self.turn.lock:
            self.check_open()
            self.turn.wait_until_free()
            self.check_weights()
            if self.observer is not None:
                raise SpecError(
                    "save_shards: this runtime belongs to an attached module, which keeps weights of its own beside, "
                    "and nothing would load the files; save the module's state_dict() instead"
                )
            bare = ShardManifest.of(self.model, self.plan, self._control.mine.epoch)
            return _save(self.group, bare, self._memory, folder)


def _save(group: Group, bare: ShardManifest, memory: RuntimeMemory, where: str | Path) -> ShardManifest:
    """Write all, then the manifest: the only moment at which the folder changes for those who load it."""
    folder, stat = group.agree("save_shards", lambda: _opened(where))
    _check_alike(group, bare, [stat.st_dev, stat.st_ino, str(folder.absolute())])
    with contextlib.ExitStack() as stack:
        stack.callback(remove_strays, folder, group.rank)  # what the manifest does not name when this ends
        writer = group.agree("save_shards", lambda: stack.enter_context(ShardFileWriter(folder, bare, group.rank)))
        writing = _Writing(group, writer, memory)
        chunks, resident = group.agree("save_shards", writing.run, progress=writing.progress)
        manifest = _agreed_manifest(group, bare, chunks, resident)
        group.agree("save_shards", lambda: writer.end(manifest))
        group.agree("save_shards", lambda: commit_manifest(folder, manifest) if group.rank == 0 else None)
        group.agree("save_shards", lambda: _check_manifest(folder, manifest))
        if group.rank == 0:
            remove_strays(folder)
    return manifest


def _opened(where: object) -> tuple[Path, os.stat_result]:
    if not isinstance(where, (str, os.PathLike)):
        raise SpecError(f"save_shards to {where!r}: give the path of a folder")
    return Path(where), open_folder(Path(where))


def _check_alike(group: Group, bare: ShardManifest, folder: Sequence[int | str]) -> None:
    """SpecError or CommError, on every rank, if ranks were given different folders or have unlike weights."""
    mine = [*folder, bare.epoch, bare.layout_digest]
    told: list[Any] = [value for value, _ in group.all_gather(mine, name="save_shards")]
    if len({(one[0], one[1]) for one in told}) > 1:
        raise SpecError(
            f"save_shards: ranks were given different folders: {by_value([one[2] for one in told])}; give all of them "
            "one that they share"
        )
    for what, values in (("epochs", [one[3] for one in told]), ("layouts", [one[4][:12] for one in told])):
        if len(set(values)) > 1:
            raise CommError(f"save_shards: ranks have unlike {what}: {by_value(values)}; start all ranks anew")


class _Writing:
    """One rank's bytes on their way to the disk, hashed as they go."""

    def __init__(self, group: Group, writer: ShardFileWriter, memory: RuntimeMemory) -> None:
        self._group, self._writer, self._memory = group, writer, memory
        self._num_bytes = self._num_synced = 0

    def progress(self) -> int:
        """A number that grows while bytes are written, and when the disk has them."""
        return self._num_bytes + self._num_synced

    def run(self) -> tuple[list[int], list[int]]:
        """The checksums of this rank's chunks, by unit, and of the resident weights."""
        layout, memory = self._memory.layout, self._memory
        chunks = [self._write("shards", unit.chunk_offset, memory.chunk(unit)) for unit in layout.units]
        resident = [self._write("resident", view.offset, memory.resident_bytes(view)) for view in layout.resident]
        self._writer.sync()
        return chunks, resident

    def _write(self, area: str, begin: int, data: memoryview) -> int:
        checksum = Checksum()
        for at in range(0, len(data), PIECE_BYTES):
            hopeless = self._group.why_hopeless("save_shards")
            if hopeless is not None:
                raise CommError(hopeless)
            part = data[at : at + PIECE_BYTES]
            self._writer.write(area, begin + at, part)
            checksum.update(part)
            self._num_bytes += len(part)
            if self._num_bytes - self._num_synced >= SYNC_BYTES:
                self._writer.sync()
                self._num_synced = self._num_bytes
        return checksum.value


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
