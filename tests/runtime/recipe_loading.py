"""Loading by recipes without a runtime: each rank's chunks, and the weights gathered from them again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from ranks import run_on_ranks
from recipe_trees import torch_dtype
from torch import Tensor

from graphshard.comm.group import Group
from graphshard.core.layout import Layout, build_layout, chunk_pieces
from graphshard.core.plan import Plan, Residency, Unit, WeightDecision
from graphshard.core.specs import ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.load.recipe_types import result_of
from graphshard.load.store import TensorStore
from graphshard.recipes import Recipe
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


def model_of(recipes: Mapping[str, Recipe], store: TensorStore) -> ModelSpec:
    """A model of what `recipes` make, one segment a weight."""
    weights = [WeightSpec(name, *result_of(recipe, store.entries)) for name, recipe in recipes.items()]
    segments = tuple(SegmentSpec(f"s{i}", i, (weight.name,)) for i, weight in enumerate(weights))
    return ModelSpec("recipes", tuple(weights), segments)


def layout_of(model: ModelSpec, world_size: int, per_unit: int, alignment_bytes: int) -> Layout:
    """Units of `per_unit` weights each; what has no bytes at all stays resident."""
    names = [weight.name for weight in model.weights]
    groups = [tuple(names[i : i + per_unit]) for i in range(0, len(names), per_unit)]
    groups = [group for group in groups if any(model.weight(name).num_bytes for name in group)]
    unit_of = {name: i for i, group in enumerate(groups) for name in group}
    plan = Plan(
        model=model.name,
        world_size=world_size,
        decisions=tuple(WeightDecision(name, unit_of.get(name), "test") for name in names),
        units=tuple(Unit(i, f"u{i}", group) for i, group in enumerate(groups)),
        residencies=tuple(Residency(i, i, i + 1, i % 2) for i in range(len(groups))),
        num_slots=2,
        prefetch_depth=1,
        head="inside",
        transport="pull",
        executor="cooperative",
        step_shapes=(StepShape(1),),
        unit_policy="placed",
        alignment_bytes=alignment_bytes,
    )
    return build_layout(model, plan)


def load_chunks(
    group: Group, store: TensorStore, recipes: Mapping[str, Recipe], model: ModelSpec, layout: Layout
) -> bytes:
    """This rank's shard window."""
    source = RecipeSource(store, recipes, ignore=["*"])
    source.prepare(model, group)
    window = bytearray(layout.shard_bytes)
    for unit in layout.units:
        for piece in chunk_pieces(unit, group.rank):
            at = unit.chunk_offset + piece.chunk_offset
            out = memoryview(window)[at : at + piece.weight_end - piece.weight_begin]
            source.read_into(model.weight(piece.weight), piece.weight_begin, out)
    return bytes(window)


def gathered(
    tensors: Mapping[str, Tensor] | TensorStore,
    recipes: Mapping[str, Recipe],
    world_size: int,
    *,
    per_unit: int = 2,
    alignment_bytes: int = 16,
) -> dict[str, Tensor]:
    """What `recipes` make, loaded by `world_size` ranks, each its chunks, and gathered; padding is checked to be 0."""
    store: TensorStore = TensorsInHand(tensors) if isinstance(tensors, Mapping) else tensors
    model = model_of(recipes, store)
    layout = layout_of(model, world_size, per_unit, alignment_bytes)
    windows = run_on_ranks(load_chunks, world_size, store, recipes, model, layout)
    made = {weight.name: torch.empty(weight.shape, dtype=torch_dtype(weight.dtype)) for weight in model.weights}
    for unit in layout.units:
        slot = bytearray(b"\xff" * unit.num_bytes)
        for copy in unit.copies:
            assert copy.rows == 1
            end = copy.source_offset + copy.row_bytes
            slot[copy.slot_offset : copy.slot_offset + copy.row_bytes] = windows[copy.source_rank][
                copy.source_offset : end
            ]
        for view in unit.views:
            assert view.offset % max(16, torch_dtype(view.dtype).itemsize) == 0
            if view.num_bytes:
                data = torch.frombuffer(slot[view.offset : view.offset + view.num_bytes], dtype=torch.uint8)
                made[view.weight] = data.view(torch_dtype(view.dtype)).view(view.shape)
            slot[view.offset : view.offset + view.num_bytes] = bytes(view.num_bytes)
        assert not any(slot)
    return made
