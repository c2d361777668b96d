"""The field's own way to keep 1/N of a model: `torch.distributed.fsdp.fully_shard` (FSDP2), a group a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def shard_layers(module: nn.Module, layers: Iterable[nn.Module], whole: Iterable[nn.Parameter]) -> None:
    """Shard each of `layers` over torch's process group; the parameters `whole` stay whole. Collective.

    Each layer is gathered before its forward and freed after it, as memory asks for. Explicit prefetches are left out:
    on CPU they crash (torch 2.13).
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=set(whole))


class ModuleStep:
    """A step of a module that runs segments on a state, with the surface of a `StepGraph`. Collective under FSDP."""

    def __init__(
        self, module: nn.Module, state: Any, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self._module, self._state = module, state

    def replay(self) -> None:
        """Run the step on what the inputs hold."""
        with torch.inference_mode():
            self._module(self._state)
