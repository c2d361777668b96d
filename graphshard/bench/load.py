"""Loading a checkpoint by byte ranges: the memory that ranks hold at most, the bytes they read, and how long it takes.

Memory is sampled while `graphshard.compile` builds a runtime, to its last check. Time is taken of what brings bytes
from files to where they stay: open, account for every name, reserve, fill, all ranks from a barrier on; in turns with
plain reads of as many bytes. The files are in the page cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import graphshard
from graphshard.bench.load_peers import Share, private_memory
from graphshard.bench.memory import read_pss, settle
from graphshard.bench.peak import Held, SampledMemory, held_now
from graphshard.bench.synthetic import Content, SyntheticModel
from graphshard.comm.group import Group
from graphshard.core.layout import chunk_pieces
from graphshard.core.specs import BufferSpec, StepShape
from graphshard.device import open_device
from graphshard.load.checkpoint import Checkpoint
from graphshard.runtime.compiled import Compiled, compile_plan
from graphshard.runtime.memory import RuntimeMemory
from graphshard.runtime.weights.fill import NUM_THREADS, SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.schedule.auto import make_plan

ALLOWANCE_BYTES = 64 * 2**20
"""What a rank may hold at most beside its chunks and resident weights: slots, buffers, Python."""


@dataclass(frozen=True)
class LoadRequest:
    """What to measure; the same on all ranks."""

    folder: str
    """Of the checkpoint."""
    width: int
    num_layers: int
    num_repeats: int
    """Of what is timed."""

    @property
    def model(self) -> SyntheticModel:
        """What the checkpoint was made for."""
        return SyntheticModel(self.width, self.num_layers)

    @cached_property
    def paths(self) -> list[Path]:
        """The checkpoint's files."""
        return sorted(Path(self.folder).glob("*.safetensors"))


def measure_load(group: Group, request: LoadRequest) -> dict[str, Any]:
    """What this rank held, read and waited for (collective). Times are seconds, a sample a repeat."""
    model = request.model
    baseline, before = baseline_held(group), read_pss()
    with SampledMemory() as sampled:
        runtime = graphshard.compile(
            model,
            group,
            checkpoint=request.folder,
            recipes=model.recipes(),
            capture_sizes=(),
            units="weight",
            prefetch_depth=1,
        )
        group.barrier("loaded")
    settle()
    group.barrier("settled")
    after = read_pss()
    group.barrier("looked at")
    layout, report = runtime.layout, runtime.load_report
    runtime.close()
    found = {
        "checkpoint_bytes": model.num_bytes,
        "baseline": baseline,
        "pss_bytes": after.anon_bytes + after.shmem_bytes - before.anon_bytes - before.shmem_bytes,
        "sampled": sampled.samples,
        "chunk_bytes": layout.shard_bytes,
        "slot_bytes": layout.slot_bytes,
        "resident_bytes": layout.resident_bytes,
        "limit_bytes": layout.shard_bytes + layout.resident_bytes + ALLOWANCE_BYTES,
        "bytes_read": report.bytes_read,
        "temporary_bytes": report.temporary_bytes,
        "ways": sorted({weight.way for weight in report.weights}),
    }
    del runtime
    loading = _Loading(group, request)
    found |= loading.time()
    return found | {"num_threads": loading.num_threads, "num_wrong": loading.num_wrong}


def baseline_held(group: Group) -> dict[int, Held]:
    """What this rank holds when all that it needs is imported, as samples of one time (collective)."""
    settle()
    group.barrier("imported")
    return {0: held_now()}


class _Loading:
    """The parts of `compile` that load, apart from all others, so that they can be timed."""

    def __init__(self, group: Group, request: LoadRequest) -> None:
        self._group, self._request = group, request
        self._device = open_device("host", num_ranks=group.world_size, local_rank=group.local_rank)
        spec = request.model.spec()
        plan = make_plan(spec, group.world_size, self._device.spec(), units="weight", prefetch_depth=1)
        self._compiled: Compiled = compile_plan(spec, plan)
        self.num_threads = NUM_THREADS
        self.num_wrong = 0
        """Pieces of chunks and resident weights whose bytes were not the checkpoint's, over all repeats."""

    def time(self) -> dict[str, Any]:
        """Seconds and CPU seconds of a load and of the plain reads, in turns; each holds its bytes till it is timed."""
        paths, group = self._request.paths, self._group
        share = Share(paths, group.rank, group.world_size, self.num_threads)
        runs: dict[str, Callable[[], Any]] = {
            "load": self._load,
            "read": lambda: share.read(lambda num_bytes: memoryview(self._device.allocate(num_bytes, exportable=True))),
            "private": lambda: share.read(private_memory),
            "again": share.read_again,
        }
        samples: dict[str, list[float]] = {f"{run}{what}": [] for run in runs for what in ("_s", "_cpu_s")}
        for turn in range(self._request.num_repeats):
            for run in runs if turn % 2 == 0 else reversed(runs):
                group.barrier("before loading")
                begin, cpu = time.perf_counter(), time.process_time()
                held = runs[run]()
                samples[f"{run}_s"].append(time.perf_counter() - begin)
                samples[f"{run}_cpu_s"].append(time.process_time() - cpu)
                group.barrier("loaded")  # nobody checks or frees while others still load
                if isinstance(held, RuntimeMemory):
                    self.num_wrong += self._count_wrong(held)
                del held
                settle()
        return {"samples_s": samples}

    def _load(self) -> RuntimeMemory:
        with closing(Checkpoint(Path(self._request.folder))) as store:
            filler = SourceFiller(RecipeSource(store, self._request.model.recipes()))
            filler.prepare(self._compiled, self._group)
            memory = RuntimeMemory(self._device, self._compiled.layout, self._buffers())
            filler.fill(self._compiled, self._group, memory)
        return memory

    def _buffers(self) -> Mapping[StepShape, Sequence[BufferSpec]]:
        return {shape: self._request.model.buffers(shape) for shape in self._compiled.plan.step_shapes}

    def _count_wrong(self, memory: RuntimeMemory) -> int:
        content, layout, wrong = Content(), self._compiled.layout, 0
        for unit in layout.units:
            with memory.writing_shard(unit.chunk_offset, unit.chunk_bytes) as chunk:
                for piece in chunk_pieces(unit, self._group.rank):
                    end = piece.chunk_offset + piece.weight_end - piece.weight_begin
                    found = chunk[piece.chunk_offset : end]
                    wrong += not self._is_right(content, piece.weight, piece.weight_begin, found)
        for view in layout.resident:
            with memory.writing_resident(view) as resident:
                wrong += not self._is_right(content, view.weight, 0, resident)
        return wrong

    def _is_right(self, content: Content, weight: str, begin: int, found: memoryview) -> bool:
        at = 0
        for expected in content.of_weight(self._request.model, weight, begin, begin + len(found)):
            if not np.array_equal(np.frombuffer(found[at : at + len(expected)], np.uint8), expected):
                return False
            at += len(expected)
        return at == len(found)
