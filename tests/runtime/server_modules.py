"""Modules as servers write them: linears that create parameters, merged ones, loaders that are handed full tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group
from graphshard.runtime.engine import Prepared
from graphshard.runtime.weights.quantize import fp8_scale, quantize_fp8

BLOCK = 128
PARTS, WIDTH = [12, 4, 5], 8
"""Of small models: the rows of q, k and v."""
PLAN: dict[str, Any] = {"min_shard_bytes": 0, "units": "layer", "prefetch_depth": 0}
"""Every weight is sharded, and the plan is the same on every machine."""


class ServerLinear(nn.Module):
    """A linear that makes its parameters empty, of one dtype, and computes in float32."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype = torch.bfloat16, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float()
        if hasattr(self, "weight_scale"):
            scale = self.weight_scale.float()
            if scale.dim() == 2 and scale.shape != weight.shape:
                scale = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]]
                scale = scale.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
            weight = weight * (scale[:, None] if scale.dim() == 1 and scale.numel() > 1 else scale)
        y = x @ weight.t()
        return y if self.bias is None else y + self.bias.float()


class ServerLayer(nn.Module):
    """A merged q, k, v; what comes back is as wide as what goes in."""

    def __init__(self, parts: Sequence[int], width: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = ServerLinear(sum(parts), width, dtype, bias=True)
        self.out = ServerLinear(width, sum(parts), dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.qkv(self.norm(x))))


class ServerModel(nn.Module):
    """Layers between an embedding and a head, as a server builds it: on the meta device, say."""

    def __init__(
        self, parts: Sequence[int], width: int, num_layers: int = 2, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(ServerLayer(parts, width, dtype) for _ in range(num_layers))
        self.register_buffer("table", torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x * self.table


def server_model(parts: Sequence[int], width: int, device: str = "meta", **kind: Any) -> ServerModel:
    """Without any bytes, unless `device` says so."""
    with torch.device(device):
        return ServerModel(parts, width, **kind).eval()


def checkpoint_of(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Random tensors for all that is saved of `model`; every rank makes the same."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator)
        found[name] = (values * 0.3).to(tensor.dtype)
    return found


def load_all(prepared: Prepared, tensors: Mapping[str, Tensor], parts: Sequence[int]) -> None:
    """As a server's loading code does: merged weights arrive part by part, through the parameters' own loaders."""
    parameters = dict(prepared.module.named_parameters())
    for name, tensor in tensors.items():
        if ".qkv." in name:
            parameter = parameters[name]
            for shard_id, part in zip("qkv", tensor.split(list(parts)), strict=True):
                parameter.weight_loader(parameter, part, shard_id)  # type: ignore[attr-defined]
        elif hasattr(parameters.get(name), "weight_loader"):
            parameters[name].weight_loader(parameters[name], tensor)  # type: ignore[attr-defined]
        else:
            prepared.load(name, tensor)


def prepare_server(model: ServerModel, group: Group, parts: Sequence[int], **options: Any) -> Prepared:
    """Every weight inside the layers is kept by rows, norms and biases too, unless `options` say otherwise."""
    blocks = {"*.qkv.*": dict(zip("qkv", parts, strict=True))}
    return graphshard.prepare(model, group, **({"min_shard_bytes": 0, "blocks": blocks} | options))


def online_fp8(prepared: Prepared, per: str) -> None:
    """Post-load processing: each linear's rows become FP8 with a scale, a new parameter."""
    for path, linear in prepared.module.named_modules():
        if isinstance(linear, ServerLinear):
            amax = prepared.combined_amax(f"{path}.weight", per=per)  # type: ignore[arg-type]
            scale = fp8_scale(amax, "float8_e4m3fn")
            rows = quantize_fp8(linear.weight.detach(), scale, "float8_e4m3fn")
            linear.weight = nn.Parameter(rows, requires_grad=False)
            linear.weight_scale = nn.Parameter(scale, requires_grad=False)


def loaded(group: Group, seed: int = 0, **options: Any) -> Prepared:
    prepared = prepare_server(server_model(PARTS, WIDTH), group, PARTS, **options)
    load_all(prepared, checkpoint_of(server_model(PARTS, WIDTH, "cpu"), seed), PARTS)
    return prepared


def qkv(prepared: Prepared) -> ServerLinear:
    found = prepared.module.get_submodule("layers.0.qkv")
    assert isinstance(found, ServerLinear)
    return found


def shard_window(runtime: graphshard.Runtime) -> bytes:
    """All bytes of this rank's chunks."""
    shards = runtime.memory.shards
    return b"" if shards is None else bytes(memoryview(shards).cast("B")[: runtime.layout.shard_bytes])
