"""Filling from shard files: a rank's window is read as it was saved, in the order in which it lies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from graphshard.comm.checksums import Checksum
from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.counts import by_value
from graphshard.core.errors import LoadError, SpecError
from graphshard.core.layout import UnitLayout, WeightView
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load.reshard import reshard_command
from graphshard.load.shard_file import ShardFile
from graphshard.load.shard_folder import ShardFolder, find_shards
from graphshard.load.shard_manifest import ShardManifest, rows_of
from graphshard.runtime.compiled import Compiled
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.fill import NUM_THREADS, PIECE_BYTES, WINDOW_BYTES, windows_of
from graphshard.runtime.weights.report import LoadedWeight, LoadReport, kept_bytes_of
from graphshard.runtime.weights.watch import LoadWatch, OnLoad
from graphshard.runtime.weights.workers import Workers


def open_shards(group: Group, checkpoint: object, spec: Callable[[], ModelSpec]) -> ShardFolder | None:
    """The folder of shard files that `checkpoint` is, if its manifest fits `spec`; None if it is something else.

    Collective; alone on a rank that came back.

    Raises:
        SpecError: on every rank: `checkpoint` is neither a path nor a mapping.
        LoadError: on every rank: the files are for another number of ranks or other weights, the manifest is damaged,
            or ranks load unlike things.
    """
    found = group.agree("checkpoint", lambda: _open(checkpoint, spec, group.world_size))
    if isinstance(group, Newcomer):
        return found
    kinds = [
        str(kind) for kind, _ in group.all_gather("" if found is None else _kind(found.manifest), name="checkpoint")
    ]
    if len(set(kinds)) > 1:
        said = by_value([kind or "something else than shard files" for kind in kinds])
        raise LoadError(f"ranks load unlike checkpoints: {said}; give all of them the same folder")
    return found


class ShardFiller:
    """Fills a rank's memory from its own file."""

    def __init__(self, folder: ShardFolder, on_load: OnLoad | None = None) -> None:
        """`on_load` is called a few times a second, and at the end, in the thread that fills."""
        self._folder, self._on_load = folder, on_load
        self._file: ShardFile | None = None
        self._report: LoadReport | None = None

    def prepare(self, compiled: Compiled, group: Group) -> None:
        """See Filler. Ranks hold the same manifest (`open_shards`), whose checksums cover every byte of every rank."""
        group.agree("checkpoint", lambda: self._open(compiled, group.rank))

    def fill(self, compiled: Compiled, group: Group, memory: RuntimeMemory) -> list[int]:
        """See Filler. Other ranks wait for one that is slow, as long as bytes still come; see `Group.agree`."""
        assert self._file is not None, "fill comes after prepare"
        reading, started = _Reading(compiled, group, memory, self._file, self._on_load), time.monotonic()
        checksums = group.agree("load", reading.run, progress=reading.progress)
        self._report = _report_of(compiled, group.rank, reading.progress(), time.monotonic() - started)
        return checksums

    @property
    def report(self) -> LoadReport:
        """See Filler."""
        assert self._report is not None, "nothing was filled"
        return self._report

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()

    def _open(self, compiled: Compiled, rank: int) -> None:
        manifest = self._folder.manifest
        if not manifest.has_layout(compiled.layout):
            raise LoadError(
                f"the shard files in {self._folder.path} have another layout than this plan (units "
                f"{compiled.plan.unit_policy}): {_layout_difference(manifest, compiled)}. Leave out the plan, and what "
                "is said of units, patterns and alignment: then the files' own units are taken. Or load the checkpoint "
                "under this plan and save the shards again"
            )
        self._file = ShardFile(self._folder.path, manifest, rank)


class _Reading:
    """One rank's read: every byte of its file once, hashed while it is in the cache, straight to where it stays."""

    def __init__(
        self, compiled: Compiled, group: Group, memory: RuntimeMemory, file: ShardFile, on_load: OnLoad | None
    ) -> None:
        self._layout, self._memory, self._file = compiled.layout, memory, file
        total_bytes = self._layout.shard_bytes + sum(view.num_bytes for view in self._layout.resident)
        self._watch = LoadWatch(group, total_bytes, on_load)
        self._workers: Workers[int] = Workers(NUM_THREADS)

    def progress(self) -> int:
        """The bytes that have come."""
        return self._watch.num_bytes

    def run(self) -> list[int]:
        """Read and verify everything; the checksum of each chunk, by unit."""
        tasks = [partial(self._fill_unit, unit) for unit in self._layout.units]
        tasks += [partial(self._fill_resident, i, view) for i, view in enumerate(self._layout.resident)]
        checksums = self._workers.run(tasks, lambda index: None, lambda: self._watch.look(self.progress()))
        self._file.check_unchanged()
        self._watch.tell()
        return checksums[: len(self._layout.units)]

    def _fill_unit(self, unit: UnitLayout) -> int:
        checksum = Checksum()
        for begin in range(0, unit.chunk_bytes, WINDOW_BYTES):
            at, num_bytes = unit.chunk_offset + begin, min(WINDOW_BYTES, unit.chunk_bytes - begin)
            with self._memory.writing_shard(at, num_bytes) as window:
                self._read("shards", at, window, checksum)
        self._file.check_chunk(unit.unit, checksum.value)
        return checksum.value

    def _fill_resident(self, index: int, view: WeightView) -> int:
        checksum = Checksum()
        for part in windows_of(view):
            with self._memory.writing_resident(part) as window:
                self._read("resident", part.offset, window, checksum)
        self._file.check_resident(index, checksum.value)
        return checksum.value

    def _read(self, area: str, begin: int, out: memoryview, checksum: Checksum) -> None:
        for at in range(0, len(out), PIECE_BYTES):
            self._workers.check()
            part = out[at : at + PIECE_BYTES]
            self._file.read_into(area, begin + at, part)
            checksum.update(part)
            self._watch.add(len(part))


def _open(checkpoint: object, spec: Callable[[], ModelSpec], world_size: int) -> ShardFolder | None:
    if not isinstance(checkpoint, (str, os.PathLike, Mapping)):
        raise SpecError(f"checkpoint={checkpoint!r} is no checkpoint: give a path, or tensors by name")
    found = None if isinstance(checkpoint, Mapping) else find_shards(Path(checkpoint))
    if found is None:
        return None
    path, manifest = found.path, found.manifest
    if manifest.world_size != world_size:
        raise LoadError(
            f"the shard files in {path} are for {manifest.world_size} ranks, this group has {world_size}: start as "
            f"many ranks, or make files for {world_size} with: {reshard_command(path, world_size)}"
        )
    _check_model(path, manifest, spec())
    return found


def _check_model(path: Path, manifest: ShardManifest, model: ModelSpec) -> None:
    """LoadError naming the first weight that is not as it was saved."""
    if manifest.weights == model.owned:
        _check_turns(path, manifest, model)
        return
    saved, asked = {w.name: w for w in manifest.weights}, {w.name: w for w in model.owned}
    for name in [*asked, *(name for name in saved if name not in asked)]:
        if saved.get(name) != asked.get(name):
            files, wanted = _spec_text(saved.get(name)), _spec_text(asked.get(name))
            what = f"weight {name} is {files} in the files, and the model asks for {wanted}"
            break
    else:
        what = f"the weights are in another order, {manifest.weights[0].name} first instead of {model.owned[0].name}"
    raise LoadError(
        f"the shard files in {path} are of another model ({manifest.model}) than {model.name}: {what}. Give the folder "
        "that was saved of this model, or load its checkpoint and save the shards again"
    )


def _check_turns(path: Path, manifest: ShardManifest, model: ModelSpec) -> None:
    """LoadError naming a square weight that lies the other way round: its shape does not tell."""
    turned = set(manifest.rows) ^ set(rows_of(model))
    for weight in manifest.weights:
        if weight.name in turned and len(weight.shape) == 2 and weight.shape[0] == weight.shape[1]:
            ways = ("[in, out]", "[out, in]")
            files, wanted = ways if weight.name in manifest.rows else ways[::-1]
            raise LoadError(
                f"the shard files in {path} have weight {weight.name} {files}, and the model asks for {wanted}: make "
                "the model with dual as it was when they were saved, or load its checkpoint and save the shards again"
            )


def _layout_difference(manifest: ShardManifest, compiled: Compiled) -> str:
    """What differs first, causes before what follows from them."""
    saved, asked = manifest.layout, compiled.layout
    if saved.alignment_bytes != asked.alignment_bytes:
        return f"alignment_bytes is {saved.alignment_bytes} in the files, {asked.alignment_bytes} in the plan"
    for mine, theirs in zip(manifest.units, compiled.plan.units, strict=False):
        if mine.weights != theirs.weights:
            files, planned = _unit_text(mine.weights), _unit_text(theirs.weights)
            return f"unit {mine.index} is {files} in the files, {planned} in the plan"
        if mine.is_sliced != theirs.is_sliced:
            files, planned = (("flat", "in slices")[is_sliced] for is_sliced in (mine.is_sliced, theirs.is_sliced))
            return f"unit {mine.index} ({mine.name}) lies {files} in the files, {planned} in the plan"
    return f"{len(saved.units)} units in the files, {len(asked.units)} in the plan"


def _spec_text(spec: WeightSpec | None) -> str:
    if spec is None:
        return "nothing"
    strides = "" if spec.strides is None else f" with strides {list(spec.strides)}"
    return f"{spec.dtype}{list(spec.shape)}{strides}"


def _unit_text(weights: Sequence[str]) -> str:
    return weights[0] if len(weights) == 1 else f"{weights[0]} to {weights[-1]} ({len(weights)} weights)"


def _kind(manifest: ShardManifest) -> str:
    return f"shard files {manifest.digest[:12]} (epoch {manifest.epoch})"


def _report_of(compiled: Compiled, rank: int, bytes_read: int, seconds: float) -> LoadReport:
    kept = kept_bytes_of(compiled.layout, rank)
    rows = [LoadedWeight(w.name, "shard file", w.num_bytes, kept.get(w.name, 0)) for w in compiled.model.owned]
    checkpoint_bytes = sum(weight.num_bytes for weight in compiled.model.owned)
    return LoadReport(tuple(rows), bytes_read, checkpoint_bytes, 0, seconds)
