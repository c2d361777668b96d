"""What rank processes run for `graphshard compare`."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphshard.bench.compare import compare_step
from graphshard.cli.compare_stage import Staged
from graphshard.cli.loading import compile_shown
from graphshard.comm.group import Group
from graphshard.comm.nccl_library import find_library
from graphshard.core.counts import counted
from graphshard.core.errors import CommError, SpecError
from graphshard.core.specs import StepShape
from graphshard.device import open_device
from graphshard.models.config import LlamaConfig, load_llama_config
from graphshard.models.llama import Llama, load_llama, random_llama
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime

SHAPE = StepShape(1)


@dataclass(frozen=True)
class CompareRequest:
    """What to compare; the same on all ranks."""

    model: str | None
    """Folder of a checkpoint; None: a random llama of `layers` layers."""
    layers: int
    num_steps: int
    device: str
    timeout_s: float
    choices: dict[str, Any]
    skip: list[int] | None
    """[rank, unit]: that rank's list lacks that unit's gather."""
    library_stage: str
    """What the host's NCCL is told to do wrong; empty: nothing."""
    met_folder: str
    """Where each rank leaves which of these faults its calls have met, also if it fails."""

    def llama_config(self) -> LlamaConfig:
        """Of the folder, or of the small random llama."""
        return load_llama_config(Path(self.model)) if self.model is not None else small_config(self.layers)


def compare(group: Group, values: dict[str, Any]) -> dict[str, Any]:
    """`compare` on one rank: see `compare_step`."""
    request = CompareRequest(**values)
    torch.set_num_threads(1)
    if not request.library_stage:
        return _compared(group, request)
    library = stage_library(request.library_stage)
    error_type = ""
    try:
        return _compared(group, request)
    except Exception as error:
        error_type = type(error).__name__
        raise
    finally:
        names = Staged(library=request.library_stage).names
        met = [name for name in names if library.gshost_nccl_stage_met(name.encode())]
        Path(request.met_folder, str(group.rank)).write_text(json.dumps({"met": met, "error_type": error_type}))


def _compared(group: Group, request: CompareRequest) -> dict[str, Any]:
    with _compiled(group, request) as runtime:
        if request.skip is not None:
            check_unit(request.skip[1], len(runtime.plan.units))
        _write_inputs(runtime)
        found = compare_step(group, runtime, SHAPE, request.num_steps)
        group.barrier("compared")
        return {**found, "plan": {"units": runtime.plan.unit_policy, "prefetch_depth": runtime.plan.prefetch_depth}}


def check_unit(unit: int, num_units: int) -> None:
    """Refuse a unit that the plan has not.

    Raises:
        SpecError: it has fewer.
    """
    if unit >= num_units:
        raise SpecError(f"--stage: unit {unit} is not in the plan: it has {counted(num_units, 'unit')}, 0 first")


def stage_library(spec: str) -> ctypes.CDLL:
    """Have the host's NCCL of this process do `spec` wrong, from the next call on.

    Raises:
        CommError: it does not understand `spec`.
    """
    path = find_library(open_device("host"))
    library = ctypes.CDLL(str(path))
    if library.gshost_nccl_stage(spec.encode()) != 0:
        raise CommError(f"{path} does not understand the stage {spec!r}")
    return library


def _compiled(group: Group, request: CompareRequest) -> Runtime:
    model, checkpoint = _model(request)
    skip = request.skip is not None and group.rank == request.skip[0]
    hooks = Hooks(skip=frozenset(request.skip[1:])) if skip and request.skip is not None else Hooks()
    return compile_shown(
        model,
        group,
        checkpoint=checkpoint,
        ignore=model.redundant_tensors,
        capture_sizes=[SHAPE.batch_size],
        device=request.device,
        timeout_s=request.timeout_s,
        hooks=hooks,
        **request.choices,
    )


def _model(request: CompareRequest) -> tuple[Llama, Path | Mapping[str, torch.Tensor]]:
    if request.model is not None:
        folder = Path(request.model)
        return load_llama(folder, SHAPE.batch_size), folder
    return random_llama(small_config(request.layers), max_batch_size=SHAPE.batch_size)


def small_config(num_layers: int) -> LlamaConfig:
    """Of the small random llama."""
    return LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    )


def _write_inputs(runtime: Runtime) -> None:
    """One token, at the first position."""
    inputs = runtime.buffers(SHAPE, "input")
    inputs["tokens"].fill_(1)
    inputs["positions"].zero_()
