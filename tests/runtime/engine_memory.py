"""Run as a program: four ranks, threads of this process, load and finalize; prints what lay in memory when, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ranks import run_on_ranks
from torch import nn

import graphshard
from graphshard.comm.group import Group
from graphshard.runtime.engine.filler import RowFiller

NUM_RANKS, NUM_LAYERS, SHAPE = 4, 8, (2048, 1024)


def pss_bytes() -> int:
    """Anonymous and shared memory of this process, each page once however often it is mapped."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(int(lines[key].split()[0]) * 1024 for key in ("Pss_Anon", "Pss_Shmem"))


def layers() -> nn.Sequential:
    found = nn.Sequential(*(nn.Linear(*reversed(SHAPE), bias=False) for _ in range(NUM_LAYERS)))
    return found.requires_grad_(False)


def rank(group: Group, samples: list[int], marks: dict[str, int]) -> None:
    def mark(name: str) -> None:
        group.barrier()
        if group.rank == 0:
            marks[name] = pss_bytes()
        group.barrier()

    with torch.device("meta"):
        module = layers()
    prepared = graphshard.prepare(module, group, layers="")
    mark("prepared")
    for name in prepared.rows:
        prepared.load(name, torch.ones(1).expand(SHAPE))  # a whole tensor of which nobody holds more than an element
    mark("loaded")
    attached = prepared.finalize(prefetch_depth=0, units="layer")
    mark("finalized")
    assert prepared.held_bytes == 0
    if group.rank == 0:
        marks["freed"], marks["peak_beside"] = prepared.freed_bytes, prepared.peak_bytes
        marks["chunks"], marks["slots"] = attached.runtime.layout.shard_bytes, attached.runtime.layout.slot_bytes
    group.barrier()
    attached.close()


def main() -> dict[str, Any]:
    samples: list[int] = []
    marks: dict[str, int] = {}
    bring = RowFiller._bring

    def sampled(self: RowFiller, *arguments: Any) -> None:
        samples.append(pss_bytes())
        bring(self, *arguments)

    run_on_ranks(nothing, NUM_RANKS)
    base = pss_bytes()
    with mock.patch.object(RowFiller, "_bring", sampled):
        run_on_ranks(rank, NUM_RANKS, samples, marks)
    steps = {name: marks[name] - base for name in ("prepared", "loaded", "finalized")}
    told = {name: marks[name] for name in ("freed", "peak_beside", "chunks", "slots")}
    return {**steps, **told, "peak": max(samples) - base, "samples": [sample - base for sample in samples]}


def nothing(group: Group) -> None:
    """Warm up what all ranks need anyway: loaded code, allocators."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).requires_grad_(False)
    prepared = graphshard.prepare(module, group, layers="", min_shard_bytes=0)
    for name, parameter in module.named_parameters():
        prepared.load(name, torch.zeros(parameter.shape))
    prepared.finalize(min_shard_bytes=0).close()


if __name__ == "__main__":
    json.dump(main(), sys.stdout)
