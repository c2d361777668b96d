"""A segmented model as a module: the runtime's bits, with weights looked up when they are needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphshard
from graphshard.core.errors import SpecError
from graphshard.core.specs import ModelSpec, SegmentSpec, StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.models.module import SegmentedModule, new_buffers
from graphshard.runtime.model import Segment

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
SHAPES = [StepShape(1), StepShape(3)]


def feed(buffers: dict[str, torch.Tensor], position: int) -> None:
    tokens = buffers["tokens"]
    tokens.copy_(torch.arange(tokens.numel()).view_as(tokens) * 7 + position)
    buffers["positions"].fill_(position)


def test_module_gives_the_runtime_bits() -> None:
    model, weights = random_llama(CONFIG, cache_length=16)
    module = SegmentedModule(model, lambda spec: weights[spec.name].clone())
    buffers = new_buffers(model, SHAPES)
    with (
        graphshard.LocalGroup(1) as groups,
        graphshard.compile(model, groups[0], checkpoint=weights, plan="replicated", capture_sizes=[1, 3]) as runtime,
        torch.inference_mode(),
    ):
        for shape in SHAPES:
            step, state = runtime.graph(shape.batch_size), module.state(shape, buffers[shape])
            for position in range(3):
                feed(buffers[shape], position)
                feed(dict(step.inputs), position)
                module(state)
                step.replay()
                assert torch.equal(buffers[shape]["logits"], step.outputs["logits"])


def test_weights_belong_to_their_layers() -> None:
    model, weights = random_llama(CONFIG)
    module = SegmentedModule(model, lambda spec: weights[spec.name])
    inside = [set(layer.names) for layer in module.layers]  # type: ignore[union-attr]
    assert all(name.startswith(f"model.layers.{i}.") for i, names in enumerate(inside) for name in names)
    outside = {name for name in weights if not name.startswith("model.layers.")}
    assert set(module.outside.names) == outside
    assert sum(1 for _ in module.parameters()) == len(weights)


def test_a_parameter_exchanged_before_forward_is_what_is_read() -> None:
    model, weights = random_llama(CONFIG)
    module = SegmentedModule(model, lambda spec: weights[spec.name].clone())
    buffers = new_buffers(model, SHAPES[:1])[SHAPES[0]]
    state = module.state(SHAPES[0], buffers)
    feed(buffers, 0)
    with torch.inference_mode():
        module(state)
        before = buffers["logits"].clone()
    down = "model.layers.1.mlp.down_proj.weight"
    layer = module.layers[1]
    setattr(layer, layer.names[down], nn.Parameter(torch.zeros_like(weights[down]), requires_grad=False))  # type: ignore[index]
    with torch.inference_mode():
        module(state)
    assert not torch.equal(buffers["logits"], before)


def test_a_layer_in_two_places_is_refused() -> None:
    class Split:
        segments = tuple(
            Segment(SegmentSpec(name, layer, ()), lambda state: None) for name, layer in (("a", 0), ("b", 1), ("c", 0))
        )

        def spec(self) -> ModelSpec:
            return ModelSpec("split", (), tuple(segment.spec for segment in self.segments))

        def buffers(self, shape: StepShape) -> tuple[()]:
            return ()

    with pytest.raises(SpecError, match="layer 0 began before another layer"):
        SegmentedModule(Split(), lambda spec: torch.empty(0))
