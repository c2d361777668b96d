"""A process whose four ranks, threads, load a checkpoint while it looks at its own memory after every read."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from load_rig import Loaded, compiled_of, load, model_of
from ranks import run_on_ranks

from graphshard.bench.memory import read_pss, settle
from graphshard.comm.group import Group
from graphshard.core.specs import ModelSpec, WeightSpec
from graphshard.load.checkpoint import SINGLE_NAME, Checkpoint
from graphshard.load.writer import write_safetensors

WORLD_SIZE, NUM_LAYERS, LAYER_BYTES, RESIDENT_BYTES = 4, 8, 12 << 20, 1 << 20


def synthetic() -> ModelSpec:
    layers = [WeightSpec(f"layers.{i}", (LAYER_BYTES,), "uint8") for i in range(NUM_LAYERS)]
    return model_of(layers, [WeightSpec("norm", (RESIDENT_BYTES,), "uint8")])


def write(folder: Path) -> None:
    model = synthetic()
    write_safetensors(
        folder / SINGLE_NAME, model.weights, (bytes([i + 1]) * w.num_bytes for i, w in enumerate(model.weights))
    )


class _Measured(Checkpoint):
    """Notes the most that this process holds after any read."""

    lock = threading.Lock()
    most = 0

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        super().read_into(name, begin, out)
        with self.lock:
            _Measured.most = max(self.most, held())


def held() -> int:
    """Private memory and windows."""
    pss = read_pss()
    return pss.anon_bytes + pss.shmem_bytes


def rank(group: Group, folder: str) -> Loaded:
    return load(group, compiled_of(synthetic(), WORLD_SIZE), _Measured(Path(folder)))


def main() -> None:
    """Print what was held at most, beside what was held before."""
    settle()
    before = held()
    loaded = run_on_ranks(rank, WORLD_SIZE, sys.argv[1])
    layouts = [one.compiled.layout for one in loaded]
    kept = sum(layout.shard_bytes + layout.resident_bytes for layout in layouts)
    slots = sum(layout.slot_bytes for layout in layouts)
    first = [one.memory.resident(one.compiled.layout.resident[0])[0].item() for one in loaded]
    json.dump({"most": _Measured.most - before, "kept": kept, "slots": slots, "first": first}, sys.stdout)


if __name__ == "__main__":
    main()
