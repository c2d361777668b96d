"""The field's own way to a sharded checkpoint: every rank opens all of it, and FSDP2 keeps 1/N."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from graphshard.bench.fsdp2 import shard_layers
from graphshard.bench.load import LoadRequest, baseline_held
from graphshard.bench.peak import SampledMemory
from graphshard.bench.synthetic import DTYPE, SMALLEST_WIDTH, SyntheticModel
from graphshard.comm.group import Group
from graphshard.runtime.memory import torch_dtype


def measure_fsdp2(group: Group, request: LoadRequest, peer: str) -> dict[str, Any]:
    """What this rank held, read and waited for, in one of `load_rows.WAYS` (collective).

    torch's process group must be there. Bytes read are those of the files that it has touched, in whole pages.
    """
    model, paths = request.model, request.paths
    load = _load_whole if peer == "fsdp2" else _load_mapped
    _warm_up(load)
    baseline = baseline_held(group)
    group.barrier("before loading")
    begin, cpu = time.perf_counter(), time.process_time()
    with SampledMemory() as sampled:
        files = [load_file(path) for path in paths]
        state = {_key(name): tensor for file in files for name, tensor in file.items()}
        module = load(model, state)
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        group.barrier("loaded")
    bytes_read = mapped_bytes(paths)
    del module
    return {
        "checkpoint_bytes": model.num_bytes,
        "baseline": baseline,
        "sampled": sampled.samples,
        "bytes_read": bytes_read,
        "samples_s": {"load_s": [seconds], "load_cpu_s": [cpu_s]},
    }


def mapped_bytes(paths: Sequence[Path]) -> int:
    """Bytes of `paths` that this process has mapped and touched, as the kernel counts pages."""
    names = {str(path.resolve()) for path in paths}
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):  # an address range: a mapping begins
            is_ours = "/" + rest.partition("/")[2] in names
        elif is_ours and first == "Rss:":
            total += int(rest.split()[0]) * 1024
    return total


def _warm_up(load: Callable[[SyntheticModel, dict[str, Any]], nn.Module]) -> None:
    """Shard a tiny module: what torch imports for its first one is not what is measured."""
    tiny = SyntheticModel(SMALLEST_WIDTH, 1)
    load(tiny, {_key(one.name): torch.zeros(one.shape, dtype=torch_dtype(DTYPE)) for one in tiny.tensors()})


def _load_whole(model: SyntheticModel, state: dict[str, Any]) -> nn.Module:
    module = _module(model, "cpu")
    module.load_state_dict(state)
    shard_layers(module, module.children(), ())
    return module


def _load_mapped(model: SyntheticModel, state: dict[str, Any]) -> nn.Module:
    module = _module(model, "meta")
    shard_layers(module, module.children(), ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's notes to itself on how it finds the default device
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    return module


def _module(model: SyntheticModel, device: str) -> nn.Module:
    """The checkpoint's tensors as parameters, a child module a layer."""
    whole = nn.Module()
    for tensor in model.tensors():
        layer, _, name = _key(tensor.name).partition(".")
        if layer not in dict(whole.named_children()):
            whole.add_module(layer, nn.Module())
        data = torch.empty(tensor.shape, dtype=torch_dtype(DTYPE), device=device)
        whole.get_submodule(layer).register_parameter(name, nn.Parameter(data, requires_grad=False))
    return whole


def _key(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` in the module: `3.mlp_up_proj_weight`."""
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"{layer}.{rest.replace('.', '_')}"
