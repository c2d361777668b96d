"""A model with a weight of every kind, and rank programs that save and load it."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from ranks import Outcome
from shard_folders import all_kinds, self_naming
from signs import Stopping, tell
from torch import Tensor

import graphshard
from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.specs import BufferSpec, ModelSpec, StepShape
from graphshard.load import shard_file
from graphshard.runtime.model import Segment
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.whole import whole_weight

LAYERS = [[5000, 300], [6000, 400], [7000, 100]]


class KindsModel:
    """Weights of every dtype, with strides and gaps; segments read them and compute nothing."""

    def __init__(self, spec: ModelSpec | None = None) -> None:
        self._spec = spec or all_kinds()
        self.segments = tuple(Segment(segment, lambda state: None) for segment in self._spec.segments)

    def spec(self) -> ModelSpec:
        return self._spec

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        return (BufferSpec("out", (shape.batch_size,), "float32", "output"),)

    def tensors(self, version: int = 0) -> Mapping[str, Tensor]:
        """The checkpoint: bytes that name themselves, strides and gaps included."""
        found = {}
        for spec in self._spec.weights:
            data = bytearray(self_naming(spec, version)) or bytearray(16)
            flat = torch.frombuffer(data, dtype=torch.uint8)[: spec.num_bytes].view(getattr(torch, spec.dtype))
            strides = spec.strides
            found[spec.name] = flat.view(spec.shape) if strides is None else flat.as_strided(spec.shape, strides)
        return found


KINDS = KindsModel()


def save(group: Group, folder: Path, choices: Mapping[str, Any] | None = None, version: int = 0) -> None:
    """Save `KINDS`, everything inside the layers sharded unless `choices` say otherwise."""
    given = {"min_shard_bytes": 0, "capture_sizes": (), **(choices or {})}
    given |= {"plan": "replicated"} if given.pop("replicated", False) else {}
    with graphshard.compile(KINDS, group, checkpoint=KINDS.tensors(version), **given) as runtime:
        runtime.save_shards(folder)


def load(group: Group, folder: Path, choices: Mapping[str, Any] | None = None, version: int = 0) -> list[str]:
    """Weights of `KINDS` that are wrong after a load of `folder`."""
    with graphshard.compile(KINDS, group, checkpoint=folder, capture_sizes=(), **(choices or {})) as runtime:
        return wrong_weights(runtime, version)


def wrong_weights(runtime: Runtime, version: int = 0) -> list[str]:
    """Names of weights that are not, element by element, those of `KINDS`."""
    found = []
    for name, tensor in KINDS.tensors(version).items():
        have = whole_weight(runtime, name)
        if have.stride() != tensor.stride() or not equal_bytes(have, tensor):
            found.append(name)
    return found


def the_error(outcomes: Sequence[Outcome]) -> str:
    """The one error that all ranks have."""
    errors = {(outcome.error_type, outcome.error) for outcome in outcomes}
    assert len(errors) == 1, outcomes
    return ": ".join(errors.pop())


def without_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixture: waiting for a disk shows nothing here."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: None)


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaNs too, and dtypes that torch cannot compare."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.numel() == 0 or bool((one.contiguous().view(torch.uint8) == other.contiguous().view(torch.uint8)).all())


def die_in_a_save(group: Group, folder: str, victim: int) -> str:
    """Save over what `folder` holds; rank `victim` is killed when its file is written and has no name yet."""
    model = ByteModel(LAYERS)
    with compile_bytes(group, model, checkpoint=model.tensors(1), capture_sizes=()) as runtime:
        if group.rank == victim:
            shard_file.ShardFileWriter.end = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        try:
            runtime.save_shards(folder)
        except graphshard.CommError as error:
            return str(error)
    return "saved"


def serve_shards(group: Group, folder: str) -> dict[str, Any]:
    """Save, then step until told to stop; a rank that comes back loads the file that its predecessor wrote."""
    model, is_newcomer = ByteModel(LAYERS), isinstance(group, Newcomer)
    choices: dict[str, Any] = {"units": "layer"} | ({"checkpoint": f"{folder}/shards"} if is_newcomer else {})
    with compile_bytes(group, model, **choices) as runtime:
        if not is_newcomer:
            runtime.save_shards(f"{folder}/shards")
        refused = ""
        if is_newcomer:
            try:
                runtime.save_shards(f"{folder}/other")
            except graphshard.CommError as error:
                refused = str(error)
        wrong = wrong_after(runtime, model, runtime.graph(1).replay)
        tell(folder, "ready")
        stopping = Stopping(folder)
        while not stopping.is_due(runtime.admit):
            wrong += wrong_after(runtime, model, runtime.graph(1).replay)
        return {"wrong": wrong, "is_newcomer": is_newcomer, "units": len(runtime.plan.units), "refused": refused}
