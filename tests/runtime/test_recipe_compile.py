"""`compile(recipes=...)` from a real file: merged, tied, transposed and quantised weights reach their segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks, try_on_ranks
from recipe_trees import any_bytes, entries_of, finite, plain, raw
from torch import Tensor

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.load.recipe_types import result_of
from graphshard.load.writer import write_safetensors
from graphshard.recipes import Concat, QuantizeFp8, Read, Recipe, ScaleOf, Transpose
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Segment, StepState

HIDDEN, HEADS, KV, WIDE, TOKENS = 48, 64, 16, 72, 30


class ShowingModel:
    """A segment for each weight of `recipes`; it copies the weight it sees into an output buffer."""

    name = "showing"

    def __init__(self, weights: Mapping[str, WeightSpec]) -> None:
        self._weights = weights
        specs = [SegmentSpec(f"s{i}", i // 3, (name,)) for i, name in enumerate(weights)]
        self.segments = tuple(Segment(spec, _show(spec)) for spec in specs)

    def spec(self) -> ModelSpec:
        return ModelSpec(self.name, tuple(self._weights.values()), tuple(segment.spec for segment in self.segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        seen = [BufferSpec(name, weight.shape, weight.dtype, "output") for name, weight in self._weights.items()]
        return (BufferSpec("step", (shape.batch_size,), "int64", "input"), *seen)


def _show(spec: SegmentSpec) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        for name in spec.reads:
            state.buffer(name).copy_(state.weight(name))

    return run


def tensors() -> dict[str, Tensor]:
    """A checkpoint of one layer and its ends."""
    shapes = {
        "q": (HEADS, HIDDEN),
        "k": (KV, HIDDEN),
        "v": (KV, HIDDEN),
        "o": (HIDDEN, HEADS),
        "gate": (WIDE, HIDDEN),
        "up": (WIDE, HIDDEN),
        "down": (HIDDEN, WIDE),
        "embed": (TOKENS, HIDDEN),
    }
    made = {name: any_bytes(shape, "bfloat16", i) for i, (name, shape) in enumerate(shapes.items())}
    made["up"] = finite(shapes["up"], "bfloat16", 1)
    made["gate"] = finite(shapes["gate"], "bfloat16", 2)
    made["down"] = finite(shapes["down"], "float32", 3)
    return made | {"norm": any_bytes((HIDDEN,), "float32", 4)}


GATE_UP = [QuantizeFp8(Read(name), "tensor") for name in ("gate", "up")]
DOWN = QuantizeFp8(Transpose(Read("down")), "channel", "float8_e5m2")
RECIPES: dict[str, Recipe] = {
    "embed_in": Read("embed"),
    "qkv": Concat([Read("q"), Read("k"), Read("v")]),
    "o_transposed": Transpose(Read("o")),
    "gate_up": Concat(GATE_UP),
    "gate_up_scale": Concat([ScaleOf(node) for node in GATE_UP]),
    "down": DOWN,
    "down_scale": ScaleOf(DOWN),
    "head": Read("embed"),
}
WAYS = {
    "embed_in": "bytes",
    "qkv": "bytes",
    "o_transposed": "rows: transpose",
    "gate_up": "rows: quantize_fp8 per tensor",
    "gate_up_scale": "rows: quantize_fp8 per tensor, scale",
    "down": "rows: transpose, quantize_fp8 per channel",
    "down_scale": "rows: transpose, quantize_fp8 per channel, scale",
    "head": "bytes",
    "norm": "bytes",
}


def model_for(recipes: Mapping[str, Recipe], checkpoint: Mapping[str, Tensor]) -> ShowingModel:
    """The model of `recipes`, and of `norm`, which has none."""
    results = {name: result_of(recipe, entries_of(dict(checkpoint))) for name, recipe in recipes.items()}
    weights = {name: WeightSpec(name, *result) for name, result in results.items()}
    if "norm" in checkpoint:
        weights["norm"] = WeightSpec("norm", (HIDDEN,), "float32")
    return ShowingModel(weights)


def write(folder: Path, checkpoint: Mapping[str, Tensor]) -> Path:
    specs = [WeightSpec(entry.name, entry.shape, entry.dtype) for entry in entries_of(dict(checkpoint)).values()]
    write_safetensors(folder / "model.safetensors", specs, map(raw, checkpoint.values()))
    return folder


def seen_by(
    group: Group, model: ShowingModel, checkpoint: Path, recipes: Mapping[str, Recipe], choices: Mapping[str, Any]
) -> tuple[list[dict[str, bytes]], dict[str, str], int, int]:
    """What the segments saw in an eager step and in a replay; the ways; bytes read and bytes of the checkpoint."""
    more = {"min_shard_bytes": 0, "prefetch_depth": 1, "hooks": Hooks(poison=True)} | dict(choices)
    with graphshard.compile(model, group, checkpoint=checkpoint, recipes=recipes, **more) as runtime:
        seen = []
        for act in (lambda: runtime.run(1), runtime.graph(batch_size=1).replay):
            outputs = runtime.buffers(min(runtime.programs), "output")
            for tensor in outputs.values():
                tensor.view(torch.uint8).zero_()
            act()
            seen.append({name: raw(tensor) for name, tensor in outputs.items()})
        report = runtime.load_report
        assert all(weight.name in report.text() for weight in report.weights if weight.way != "bytes")
        return seen, {w.name: w.way for w in report.weights}, report.bytes_read, report.checkpoint_bytes


@pytest.mark.parametrize(("world_size", "units"), [(2, "layer"), (3, "weight")])
def test_segments_see_what_recipes_make(tmp_path: Path, world_size: int, units: str) -> None:
    checkpoint = tensors()
    expected = {name: raw(plain(recipe, checkpoint)) for name, recipe in RECIPES.items()}
    expected["norm"] = raw(checkpoint["norm"])
    path = write(tmp_path, checkpoint)
    for seen, ways, _, checkpoint_bytes in run_on_ranks(
        seen_by, world_size, model_for(RECIPES, checkpoint), path, RECIPES, {"units": units}
    ):
        assert seen == [expected, expected] and ways == WAYS
        assert checkpoint_bytes == sum(tensor.nbytes for tensor in checkpoint.values())


def test_bytes_are_read_once_over_all_ranks_where_they_only_move(tmp_path: Path) -> None:
    checkpoint = {name: tensor for name, tensor in tensors().items() if name in ("q", "k", "v")}
    recipes: dict[str, Recipe] = {"qkv": RECIPES["qkv"], "vk": Concat([Read("v"), Read("k")], 1)}
    path = write(tmp_path, checkpoint)
    model = model_for(recipes, checkpoint)
    found = run_on_ranks(seen_by, 3, model, path, recipes, {"units": "weight"})
    merged = checkpoint["k"].nbytes + checkpoint["v"].nbytes
    assert sum(bytes_read for _, _, bytes_read, _ in found) == found[0][3] + merged  # k and v go to two weights


def refused(group: Group, model: ShowingModel, checkpoint: Path, recipes: Mapping[str, Recipe]) -> None:
    graphshard.compile(model, group, checkpoint=checkpoint, recipes=recipes, min_shard_bytes=0).close()


@pytest.mark.parametrize("per", ["tensor", "channel"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_values_without_a_scale_are_refused_alike_on_every_rank(tmp_path: Path, per: Any, value: float) -> None:
    checkpoint = {"w": torch.ones(90, 40)}
    checkpoint["w"][70, 2] = value  # in the share of one rank
    node = QuantizeFp8(Read("w"), per)
    recipes: dict[str, Recipe] = {"proj": node, "scale": ScaleOf(node)}
    outcomes = try_on_ranks(refused, 3, model_for(recipes, checkpoint), write(tmp_path, checkpoint), recipes)
    assert {outcome.error_type for outcome in outcomes} == {"LoadError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    assert "QuantizeFp8 of w float8_e4m3fn[90, 40]: 1 of " in outcomes[0].error
    assert "infinite or NaN, so there is no scale" in outcomes[0].error


MISFITS: list[tuple[dict[str, Recipe], str]] = [
    ({"qkv": Concat([Read("q"), Read("o")])}, r"qkv: Concat along dim 0: part 1, o bfloat16\[48, 64\], does not fit"),
    (
        {"qkv": Concat([Read("q"), Read("k")])},
        r"another shape +qkv is bfloat16\[80, 48\], the model asks for bfloat16\[96, 48\]",
    ),
    ({"qkv": Concat([Read("q"), Read("k"), Read("w")])}, "missing +w: none of 9 names is near"),
    ({"wqkv": RECIPES["qkv"]}, "wqkv: the model has no weight of this name"),
]


@pytest.mark.parametrize(("recipes", "message"), MISFITS, ids=[str(i) for i in range(len(MISFITS))])
def test_recipes_that_do_not_fit_are_refused_alike_on_every_rank(
    tmp_path: Path, recipes: dict[str, Recipe], message: str
) -> None:
    checkpoint = tensors()
    model = model_for(RECIPES, checkpoint)
    outcomes = try_on_ranks(refused, 2, model, write(tmp_path, checkpoint), RECIPES | recipes)
    assert {outcome.error_type for outcome in outcomes} == {"LoadError"}
    assert len({outcome.error for outcome in outcomes}) == 1
    with pytest.raises(graphshard.LoadError, match=message):
        raise graphshard.LoadError(outcomes[0].error)


@pytest.mark.parametrize("recipes", [[("qkv", Read("q"))], {"qkv": "q"}, {"qkv": Read}])
def test_what_is_no_recipe_is_refused_alike_on_every_rank(tmp_path: Path, recipes: Any) -> None:
    checkpoint = tensors()
    outcomes = try_on_ranks(refused, 2, model_for(RECIPES, checkpoint), write(tmp_path, checkpoint), recipes)
    for outcome in outcomes:
        assert outcome.error_type == "SpecError" and outcome.error.startswith("checkpoint failed on rank 0 (and on")
