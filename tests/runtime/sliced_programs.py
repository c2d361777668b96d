"""What ranks of the slices' tests do; apart from the tests, so that a rank process need not import pytest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import joint_programs as joint
from block_model import BlockModel
from byte_steps import wrong_after
from load_rig import ANY, load
from sliced_model import SlicedModel, sliced_units
from update_programs import version_of

import graphshard
from graphshard.comm.group import Group
from graphshard.core.layout import chunk_pieces
from graphshard.load.checkpoint import Checkpoint
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.runtime.bind import Hooks
from graphshard.runtime.compiled import compile_plan
from graphshard.runtime.evidence.inspection import traced_run
from graphshard.runtime.evidence.sequence import compare_runs
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.whole import whole_weight
from graphshard.schedule.auto import make_plan

SQUARE = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=16, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8,
)  # fmt: skip
Layers = Sequence[tuple[int, Sequence[int]]]


def compiled(group: Group, model: SlicedModel, policy: str = "layer", **choices: Any) -> Runtime:
    """The model on this rank, blocks in slices where they can be and always gathered."""
    defaults: dict[str, Any] = {
        "checkpoint": model.tensors(),
        "dual": "gather",
        "units": policy,
        "min_shard_bytes": 0,
        "capture_sizes": [1],
        "hooks": Hooks(poison=True),
        "timeout_s": 30.0,
    }
    return graphshard.compile(model, group, **(defaults | choices))


def chunks_wrong(runtime: Runtime, model: SlicedModel, version: int = 0) -> list[str]:
    """Sliced units whose bytes in this rank's shard window are not its rows of each weight, or not zero between."""
    found = []
    tensors = model.tensors(version)
    for unit in runtime.layout.units:
        if not unit.is_sliced:
            continue
        chunk = bytearray(runtime.memory.chunk(unit))
        for one in unit.slices:
            rows = one.shape[0]
            mine = tensors[one.weight][runtime.rank * rows : (runtime.rank + 1) * rows]
            place = slice(one.offset, one.offset + one.num_bytes)
            if bytes(chunk[place]) != mine.contiguous().numpy().tobytes():
                found.append(one.weight)
            chunk[place] = bytes(one.num_bytes)
        if any(chunk):
            found.append(f"padding of unit {unit.unit}")
    return found


def mixed_steps(group: Group, layers: Layers, choices: Mapping[str, Any]) -> list[str]:
    """Eager steps and replays in turn, over slots whose padding is poison or another unit's bytes."""
    model = SlicedModel(layers)
    with compiled(group, model, **choices) as runtime:
        replay, eager = runtime.graph(1).replay, lambda: runtime.run(1)
        wrong = [line for act in (eager, replay, replay, eager, replay) for line in wrong_after(runtime, model, act)]
        runtime.check_gathers()
        wrong += chunks_wrong(runtime, model)
        wrong += [
            name
            for name, tensor in model.tensors().items()
            if bytes(whole_weight(runtime, name).numpy()) != bytes(tensor.numpy())
        ]
        return wrong


def mixed_steps_of_each(group: Group, layers: Layers, choices: Sequence[Mapping[str, Any]]) -> list[str]:
    """`mixed_steps` of several plans, one after another in the same processes."""
    return [line for choice in choices for line in mixed_steps(group, layers, choice)]


def save_square(group: Group, folder: Path, is_dual: bool) -> None:
    """Save shards of a llama whose down_proj is square: its shape is the same either way round."""
    model, weights = random_llama(SQUARE, dual=is_dual)
    with graphshard.compile(model, group, checkpoint=weights, min_shard_bytes=0) as runtime:
        runtime.save_shards(folder)
        group.barrier("saved")


def load_square(group: Group, folder: Path, is_dual: bool) -> None:
    """Load what `save_square` wrote."""
    model, _ = random_llama(SQUARE, dual=is_dual)
    with graphshard.compile(model, group, checkpoint=folder):
        group.barrier("loaded")


class _Noting(Checkpoint):
    """Notes the ranges of bytes that are read of each tensor."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: dict[str, list[tuple[int, int]]] = {}

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        self.read.setdefault(name, []).append((begin, begin + len(out)))
        super().read_into(name, begin, out)


def reads_of_a_load(group: Group, folder: Path, layers: Layers) -> list[str]:
    """Weights of which a load reads more, less or other bytes than this rank keeps."""
    spec = SlicedModel(layers).spec()
    plan = make_plan(spec, group.world_size, ANY, placed=sliced_units(spec, group.world_size))
    made, checkpoint = compile_plan(spec, plan), _Noting(folder)
    loaded = load(group, made, checkpoint)
    kept: dict[str, set[int]] = {view.weight: set(range(view.num_bytes)) for view in made.layout.resident}
    for unit in made.layout.units:
        for name, begin, end, _ in chunk_pieces(unit, group.rank):
            kept.setdefault(name, set()).update(range(begin, end))
    read = {
        name: [byte for begin, end in ranges for byte in range(begin, end)] for name, ranges in checkpoint.read.items()
    }
    wrong = [name for name in kept.keys() | read.keys() if sorted(read.get(name, [])) != sorted(kept.get(name, ()))]
    report = loaded.filler.report
    if not report.bytes_read == report.kept_bytes == sum(map(len, kept.values())):
        wrong.append(f"{report.bytes_read} read, {report.kept_bytes} kept, {sum(map(len, kept.values()))} due")
    return wrong


def updates(group: Group, layers: Layers, transport: str) -> list[Any]:
    """Whole and partial updates of weights in slices: versions seen, and what is wrong of chunks."""
    model = SlicedModel(layers)
    with compiled(group, model, transport=transport) as runtime:
        found: list[Any] = [version_of(runtime, model, [0, 1, 2])]
        runtime.update(model.tensors(1))
        found += [version_of(runtime, model, [0, 1, 2]), chunks_wrong(runtime, model, 1)]
        name = model.blocks_specs[0].rows[0]
        runtime.update({name: model.tensors(2)[name]}, only=name)
        rest = model.tensors(1) | {name: model.tensors(2)[name]}
        model.tensors = lambda version=0: rest  # type: ignore[method-assign, assignment]
        found += [version_of(runtime, model, [0]), chunks_wrong(runtime, model), runtime.epoch]
        runtime.check_gathers()
        return found


def save(group: Group, folder: Path, layers: Layers, dual: str = "gather") -> list[str]:
    """Save shards; the names of what lies in the folder."""
    model = SlicedModel(layers)
    with compiled(group, model, dual=dual) as runtime:
        runtime.save_shards(folder)
        group.barrier("saved")
    return sorted(path.name for path in folder.iterdir())


def load_saved(group: Group, folder: Path, layers: Layers, choices: Mapping[str, Any]) -> list[str]:
    """What is wrong after a load of shard files whose own units are taken."""
    model = SlicedModel(layers)
    with graphshard.compile(model, group, checkpoint=folder, capture_sizes=[1], **choices) as runtime:
        assert any(unit.is_sliced for unit in runtime.plan.units) == (group.world_size != 5)
        return wrong_after(runtime, model, runtime.graph(1).replay) + chunks_wrong(runtime, model)


def report(group: Group, layers: Layers, transport: str) -> dict[str, Any]:
    """The captured graph's report, and how what it saw compares with an eager run's calls."""
    model = SlicedModel(layers)
    with compiled(group, model, transport=transport, hooks=Hooks()) as runtime:
        step = runtime.graph(1)
        told = step.report()
        difference = compare_runs(traced_run(runtime, step.shape), step.look().seen())
        group.barrier("looked at")
        return {
            **asdict(told),
            "bytes": [
                sum(view.num_bytes for view in unit.views) if unit.is_sliced else unit.num_bytes
                for unit in runtime.layout.units
            ],
            "parts": [max(1, len(unit.slices)) for unit in runtime.layout.units],
            "units": [gather.unit for gather in told.gathers],
            "difference": difference and difference.text("eager", "graph"),
        }


def change_after_load(group: Group, layers: Layers, transport: str) -> str:
    """Rank 1's slice of the last weight of the first block changes in place: what is said, and by whom."""
    model = SlicedModel(layers)
    with compiled(group, model, transport=transport) as runtime:
        if group.rank == 1:
            unit = next(unit for unit in runtime.layout.units if unit.is_sliced)
            one = unit.slices[-1]
            with runtime.memory.writing_shard(unit.chunk_offset + one.offset, 1) as out:
                out[0] ^= 1
        group.barrier("changed")
        try:
            runtime.check_gathers()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            group.barrier("looked at")
    return ""


def updates_in_both_modes(group: Group, transport: str) -> list[Any]:
    """Steps on slices and on gathered weights, captured and eager, before and after whole and partial updates."""
    model = BlockModel()
    with joint.compiled(group, model, transport) as runtime:
        wrong = _both_modes(runtime, model, 0)
        runtime.update(model.tensors(1))
        wrong += _both_modes(runtime, model, 1)
        names = ("1.up", "2.down")
        runtime.update({name: model.tensors(2)[name] for name in names}, only=names)
        mixed = model.tensors(1) | {name: model.tensors(2)[name] for name in names}
        model.tensors = lambda version=0: mixed  # type: ignore[method-assign, assignment]
        wrong += _both_modes(runtime, model, 0)
        runtime.check_gathers()
        return [wrong, runtime.epoch]


def _both_modes(runtime: Runtime, model: BlockModel, version: int) -> list[str]:
    """What is wrong with steps of the smallest and the largest step shape."""
    found = []
    for number, shape in enumerate((min(runtime.programs), max(runtime.programs))):
        for run in ("graph", "eager", "graph"):
            found.append(joint.step_wrong(runtime, model, shape, number, run, version))
    return [text for text in found if text]


def save_in_both_modes(group: Group, folder: Path) -> None:
    """Save what tensor-parallel and gathered steps share."""
    model = BlockModel()
    with joint.compiled(group, model, "pull", checkpoint=model.tensors(3)) as runtime:
        runtime.save_shards(folder)
        group.barrier("saved")


def load_in_both_modes(group: Group, folder: Path, transport: str, dual: str) -> list[Any]:
    """Steps of weights that were saved; how many blocks the smallest step computes on slices."""
    model = BlockModel()
    choices = {"dual": dual, "chooser": joint.UpTo(4) if dual == "auto" else None}
    with joint.compiled(group, model, transport, checkpoint=folder, **choices) as runtime:
        wrong = _both_modes(runtime, model, 3)
        group.barrier("stepped")
        return [wrong, len(runtime.programs[min(runtime.programs)].blocks)]
