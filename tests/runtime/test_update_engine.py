"""Updates of modules of the engine path: finished weights by the module's names, or a checkpoint's by recipes."""

from __future__ import annotations

import pytest
import torch
from ranks import run_on_ranks
from torch import Tensor, nn
from update_programs import raised

import graphshard
from graphshard.comm.group import Group
from graphshard.load.recipe import Concat, QuantizeFp8, Read, Recipe, ScaleOf
from graphshard.runtime.weights.quantize import fp8_scale, quantize_fp8

ROWS = {"q": 24, "k": 8, "v": 8}
WIDTH = 16


class Merged(nn.Module):
    """Merged q, k, v, which become FP8 when they are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sum(ROWS.values()), WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.weight.float() * self.weight_scale).t()) @ torch.ones(sum(ROWS.values()), WIDTH)

    def to_fp8(self, amax: Tensor) -> None:
        self.weight_scale = nn.Parameter(fp8_scale(amax, "float8_e4m3fn"), requires_grad=False)
        self.weight.data = quantize_fp8(self.weight.data, self.weight_scale, "float8_e4m3fn")


def checkpoint(version: int) -> dict[str, Tensor]:
    """q, k and v of each layer."""
    generator = torch.Generator().manual_seed(version)
    return {
        f"{layer}.{part}": torch.randn(rows, WIDTH, generator=generator)
        for layer in range(3)
        for part, rows in ROWS.items()
    }


def recipes() -> dict[str, Recipe]:
    found: dict[str, Recipe] = {}
    for layer in range(3):
        node = QuantizeFp8(Concat(tuple(Read(f"{layer}.{part}") for part in ROWS)), per="tensor")
        found |= {f"{layer}.weight": node, f"{layer}.weight_scale": ScaleOf(node)}
    return found


def whole(version: int) -> nn.Sequential:
    """What the module is with whole weights."""
    tensors, model = checkpoint(version), nn.Sequential(Merged(), Merged(), Merged())
    for layer, module in enumerate(model):
        assert isinstance(module, Merged)
        module.weight.data = torch.cat([tensors[f"{layer}.{part}"] for part in ROWS])
        module.to_fp8(module.weight.abs().max().reshape(1))
    return model


def prepared(group: Group, version: int) -> tuple[nn.Sequential, graphshard.Attached]:
    with torch.device("meta"):
        model = nn.Sequential(Merged(), Merged(), Merged())
    loading = graphshard.prepare(model, group, layers="", blocks={"*.weight": ROWS}, min_shard_bytes=0)
    for name, tensor in checkpoint(version).items():
        layer, part = name.split(".")
        loading.load(f"{layer}.weight", tensor, part)
    for layer, module in enumerate(model):
        assert isinstance(module, Merged)
        module.to_fp8(loading.combined_amax(f"{layer}.weight"))
    return model, loading.finalize()


def outputs(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH))
    return result


@pytest.mark.parametrize("by", ["names", "recipes"])
def test_a_module_of_the_engine_path(by: str) -> None:
    def go(group: Group) -> bool:
        model, attached = prepared(group, 0)
        with attached:
            assert torch.equal(outputs(model), outputs(whole(0)))
            addresses = [parameter.data_ptr() for parameter in model.parameters()]
            if by == "recipes":
                attached.runtime.recipes = recipes() | {"0.wieght": Read("0.q")}
                assert "recipes: the model has no weight 0.wieght; near" in raised(lambda: attached.update({}))
                attached.runtime.recipes = recipes()
            for version in (1, 1, 2, 0):
                new = whole(version)
                attached.update(checkpoint(version) if by == "recipes" else new.state_dict())
                assert torch.equal(outputs(model), outputs(new))
                assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
            less = {name: tensor for name, tensor in whole(1).state_dict().items() if name != "1.weight_scale"}
            if by == "names":
                assert "1.weight_scale" in raised(lambda: attached.update(less))
                assert "which belongs to it" in raised(lambda: attached.update(less, only="1.weight"))
            return torch.equal(outputs(model), outputs(whole(0)))

    assert run_on_ranks(go, 2) == [True, True]
