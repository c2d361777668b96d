"""Updates of weights that are made of tensors: computed anew from what comes, in bounded memory, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor
from update_programs import raised, stored

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import BufferSpec, ModelSpec, SegmentSpec, StepShape, WeightSpec
from graphshard.load.recipe import Concat, QuantizeFp8, Read, Recipe, ScaleOf, Slice, Transpose
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

PER_TENSOR, PER_CHANNEL = QuantizeFp8(Read("big"), per="tensor"), QuantizeFp8(Read("wide"), per="channel")
RECIPES: dict[str, Recipe] = {
    "qkv": Concat((Read("q"), Read("k"), Read("v"))),
    "out": Transpose(Read("out.stored")),
    "fp8": PER_TENSOR,
    "fp8_scale": ScaleOf(PER_TENSOR),
    "rows": PER_CHANNEL,
    "rows_scale": ScaleOf(PER_CHANNEL),
    "head": Read("embed"),
    "half": Slice(Read("pair"), 0, 0, 7),
    "other_half": Slice(Read("pair"), 0, 7, 9),
}
WEIGHTS = (
    WeightSpec("qkv", (23, 8), "float32"),
    WeightSpec("out", (6, 17), "float32"),
    WeightSpec("fp8", (19, 5), "float8_e4m3fn"),
    WeightSpec("fp8_scale", (1,), "float32"),
    WeightSpec("rows", (9, 16), "float8_e4m3fn"),
    WeightSpec("rows_scale", (9,), "float32"),
    WeightSpec("embed", (31, 3), "bfloat16"),
    WeightSpec("head", (31, 3), "bfloat16"),
    WeightSpec("half", (7, 2), "float16"),
    WeightSpec("other_half", (2, 2), "float16"),
    WeightSpec("plain", (13,), "uint8"),
)
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "q": ((15, 8), torch.float32),
    "big": ((19, 5), torch.float32),
    "k": ((3, 8), torch.float32),
    "embed": ((31, 3), torch.bfloat16),
    "wide": ((9, 16), torch.bfloat16),
    "out.stored": ((17, 6), torch.float32),
    "pair": ((9, 2), torch.float16),
    "v": ((5, 8), torch.float32),
    "plain": ((13,), torch.uint8),
}


class MadeModel:
    """Each segment shows the bytes of one weight."""

    def __init__(self) -> None:
        self.segments = tuple(
            Segment(SegmentSpec("show", layer, (weight.name,)), _show(weight)) for layer, weight in enumerate(WEIGHTS)
        )

    def spec(self) -> ModelSpec:
        return ModelSpec("made", WEIGHTS, tuple(segment.spec for segment in self.segments))

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        return tuple(BufferSpec(f"seen {weight.name}", (weight.num_bytes,), "uint8", "output") for weight in WEIGHTS)


def _show(weight: WeightSpec) -> Callable[[StepState], None]:
    def run(state: StepState) -> None:
        state.buffer(f"seen {weight.name}").copy_(state.weight(weight.name).reshape(-1).view(torch.uint8))

    return run


def tensors_of(version: int) -> dict[str, Tensor]:
    """The checkpoint."""
    generator = torch.Generator().manual_seed(version)
    made = {}
    for name, (shape, dtype) in TENSORS.items():
        values = torch.randn(shape, generator=generator) * (1 + version)
        made[name] = (values * 50).abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)
    return made


def reused(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All through one buffer of the sender's, which is filled with something else as soon as it is asked for more."""
    buffer = torch.empty(max(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    for name, tensor in tensors.items():
        flat = buffer[: tensor.nbytes]
        flat.copy_(tensor.reshape(-1).view(torch.uint8))
        yield name, flat.view(tensor.dtype).view(tensor.shape)
        buffer.fill_(0xA5)


def loaded(group: Group, version: int, **choices: Any) -> Runtime:
    defaults: dict[str, Any] = {"min_shard_bytes": 0, "units": "layer", "prefetch_depth": 1, "recipes": RECIPES}
    return graphshard.compile(MadeModel(), group, checkpoint=tensors_of(version), **(defaults | choices))


def seen(runtime: Runtime) -> dict[str, list[int]]:
    """The bytes of every weight, as a replay sees them."""
    graph = runtime.graph(1)
    graph.replay()
    return {name: tensor.tolist() for name, tensor in graph.outputs.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_weights_are_made_of_new_tensors_as_at_load(world_size: int, transport: str) -> None:
    """A, B, B, B, B, B, A: every byte is that of a load of that version, at the addresses that there were."""

    def go(group: Group) -> bool:
        truth, shards = {}, {}
        for version in (0, 1):
            with loaded(group, version, transport=transport) as runtime:
                truth[version], shards[version] = seen(runtime), stored(runtime)
        assert all(truth[0][name] != truth[1][name] for name in truth[0])
        with loaded(group, 0, transport=transport) as runtime:
            table = runtime.buffer_table()
            for version in (1, 1, 1, 1, 1, 0):
                report = runtime.update(reused(tensors_of(version)))
                assert (len(report.updated), report.num_tensors) == (len(WEIGHTS), len(TENSORS))
                assert seen(runtime) == truth[version] and runtime.buffer_table() == table
                assert all(torch.equal(a, b) for a, b in zip(stored(runtime), shards[version], strict=True))
        return True

    assert run_on_ranks(go, world_size) == [True] * world_size


def test_what_is_held_is_bounded_by_what_is_staged_and_what_waits() -> None:
    """Tensors of `qkv` wait for each other; every other one is gone when the next comes."""

    def go(group: Group) -> None:
        with loaded(group, 0) as runtime:
            report = runtime.update(tensors_of(1))
            waiting = 4 * 8 * (15 + 3)
            assert report.staged_bytes < report.peak_bytes <= report.staged_bytes + waiting
            assert "weights of 9 tensors, 0 kept" in report.text()

    run_on_ranks(go, 2)


def test_partial_updates() -> None:
    """`only` and `keep`: what is not named keeps its bytes, and nothing of it need come."""

    def go(group: Group) -> bool:
        with loaded(group, 1) as runtime:
            new = seen(runtime)
        with loaded(group, 0) as runtime:
            old, tensors = seen(runtime), tensors_of(1)
            report = runtime.update({"big": tensors["big"]}, only="fp8*")
            assert (report.updated, len(report.kept)) == (("fp8", "fp8_scale"), len(WEIGHTS) - 2)
            assert seen(runtime) == old | {f"seen {name}": new[f"seen {name}"] for name in ("fp8", "fp8_scale")}
            rest = {name: tensor for name, tensor in tensors.items() if name not in ("big", "q", "k", "v")}
            report = runtime.update(rest, keep=["fp8*", "qkv"])
            assert report.kept == ("qkv", "fp8", "fp8_scale")
            assert seen(runtime) == new | {"seen qkv": old["seen qkv"]}
            report = runtime.update({}, keep="*")  # declared: a version with nothing new
            assert (report.updated, runtime.epoch) == ((), 6)
            assert seen(runtime) == new | {"seen qkv": old["seen qkv"]}
        return True

    assert run_on_ranks(go, 2) == [True, True]


REFUSED: dict[str, tuple[Callable[[dict[str, Tensor]], Any], dict[str, Any], str]] = {
    "a weight without its scale": (
        lambda tensors: {"big": tensors["big"]},
        {"only": "fp8"},
        "only takes fp8 and leaves out fp8_scale, which belongs to it",
    ),
    "one half of a tensor": (
        lambda tensors: {"pair": tensors["pair"]},
        {"only": "half"},
        "leaves out other_half, which belongs to it",
    ),
    "a tied weight alone": (
        lambda tensors: {"embed": tensors["embed"]},
        {"only": "head"},
        "only takes head and leaves out embed",
    ),
    "an empty iterator": (lambda tensors: (), {}, "9 tensors of the tensors given do not fit"),
    "a part of a recipe": (lambda tensors: _without(tensors, "k"), {}, "missing  k"),
    "a tensor of a weight that is kept": (lambda tensors: tensors, {"keep": "qkv"}, "not asked for  q"),
    "a renamed tensor": (lambda tensors: _without(tensors, "k") | {"key": tensors["k"]}, {}, "not asked for  key"),
    "a tensor twice": (lambda tensors: [*tensors.items(), ("k", tensors["k"])], {}, "given twice  k"),
    "another dtype": (lambda tensors: tensors | {"k": tensors["k"].double()}, {}, "recipe  qkv: Concat"),
    "another shape": (
        lambda tensors: tensors | {"plain": tensors["plain"][:5]},
        {},
        "another shape  plain is uint8[5], the model asks for uint8[13]",
    ),
    "a quantised tensor": (
        lambda tensors: tensors | {"big": tensors["big"].to(torch.float8_e4m3fn)},
        {},
        "recipe  fp8: QuantizeFp8 of big float8_e4m3fn[19, 5]",
    ),
    "a pattern that matches nothing": (lambda tensors: tensors, {"only": "layers.*"}, "only='layers.*' matches no"),
    "nothing left": (lambda tensors: {}, {"only": "qkv", "keep": "qkv"}, "leave nothing to update"),
    "no tensor": (lambda tensors: [("q", None)], {}, "'q': NoneType was given; give pairs of a name and a tensor"),
    "tensors without names": (
        lambda tensors: list(tensors.values()),
        {},
        "Tensor was given; give pairs of a name and a tensor",
    ),
    "nothing to look through": (lambda tensors: None, {}, "NoneType was given; give pairs of a name and a tensor"),
    "a text": (lambda tensors: "model.safetensors", {}, "str was given; give pairs of a name and a tensor"),
    "some weights, and not said which": (
        lambda tensors: {"plain": tensors["plain"]},
        {},
        "or name the weights that come: only=(...) takes names",
    ),
}


def _without(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def test_what_does_not_fit_is_refused_with_all_that_is_wrong() -> None:
    """Each kind on one rank alone: all ranks say the same, and no byte changes."""

    def go(group: Group) -> dict[str, str]:
        said = {}
        with loaded(group, 0) as runtime:
            before = stored(runtime)
            for what, (change, choices, _) in REFUSED.items():
                tensors = change(tensors_of(1)) if group.rank == 1 or choices else tensors_of(1)
                said[what] = " ".join(raised(lambda: runtime.update(tensors, **choices)).split())  # noqa: B023
                assert all(torch.equal(a, b) for a, b in zip(stored(runtime), before, strict=True)), what
            assert runtime.epoch == 0
            runtime.update(tensors_of(1))
        return said

    first, second = run_on_ranks(go, 2)
    assert first == second
    for what, (_, _, words) in REFUSED.items():
        assert " ".join(words.split()) in first[what], (what, first[what])
