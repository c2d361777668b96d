"""Small torch modules with lists of layers, for tests of `attach`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group, LocalGroup
from graphshard.runtime.attach import Attached

WIDTH = 48


class Block(nn.Module):
    """A layer with weights, biases and a norm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """An embedding, layers and a head; `call` says how the layers are run, as tests need it."""

    def __init__(self, num_layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, width)
        self.call: Callable[[Stack, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.call is not None:
            return self.head(self.call(self, x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def in_order(order: Sequence[int]) -> Callable[[Stack, Tensor], Tensor]:
    """For `Stack.call`: the layers by index."""

    def call(stack: Stack, x: Tensor) -> Tensor:
        for index in order:
            x = stack.layers[index](x)
        return x

    return call


def random_stack(num_layers: int = 3, order: Sequence[int] | None = None) -> Stack:
    """The same weights each time."""
    generator = torch.Generator().manual_seed(5)  # of its own: ranks may be threads
    stack = Stack(num_layers).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    if order is not None:
        stack.call = in_order(order)
    return stack


def inputs(count: int = 3) -> list[Tensor]:
    """Inputs of unlike shapes."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(1 + i, WIDTH, generator=generator) for i in range(count)]


def outputs(module: nn.Module) -> list[Tensor]:
    """What the module makes of `inputs()`."""
    with torch.no_grad():
        return [module(x) for x in inputs()]


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return len(some) == len(others) and all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def bits(tensor: Tensor) -> Tensor:
    """The elements' bytes, whatever their dtype and strides: NaNs compare too."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def attach(module: nn.Module, group: Group | None = None, **choices: Any) -> Attached:
    """On one rank unless a group is given; every weight is sharded unless `choices` say otherwise."""
    defaults: dict[str, Any] = {"min_shard_bytes": 0, "units": "layer", "prefetch_depth": 1}
    return graphshard.attach(module, LocalGroup(1)[0] if group is None else group, **(defaults | choices))


def twin(module: nn.Module) -> nn.Module:
    """A copy to compare with, made before the module is attached."""
    return copy.deepcopy(module)
