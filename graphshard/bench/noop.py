"""A runtime whose segments do nothing: what is left to measure, and to print, is the op list itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from graphshard._core import Calls
from graphshard.comm.group import Group
from graphshard.core.plan import Plan
from graphshard.core.specs import BufferSpec, ModelSpec, StepShape
from graphshard.device import open_device
from graphshard.runtime.bind import Hooks
from graphshard.runtime.build import build_runtime
from graphshard.runtime.compiled import compile_plan
from graphshard.runtime.memory import torch_dtype
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.weights.fill import SourceFiller
from graphshard.runtime.weights.recipe_source import RecipeSource
from graphshard.runtime.weights.tensors_in_hand import TensorsInHand


class NoopModel:
    """A `SegmentedModel` of any spec: every segment returns at once, and there are no buffers."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.segments: Sequence[Segment] = [Segment(segment, _do_nothing) for segment in spec.segments]
        self.folds: Sequence[Segment] = [Segment(fold, _do_nothing) for fold in spec.folds]

    def spec(self) -> ModelSpec:
        """The spec it was made from."""
        return self._spec

    def buffers(self, shape: StepShape) -> tuple[BufferSpec, ...]:
        """None."""
        return ()


def noop_runtime(model: ModelSpec, plan: Plan, group: Group, timeout_s: float = 30.0) -> Runtime:
    """A runtime of `model` with zero weights on the host device (collective)."""
    weights = {weight.name: torch.zeros(weight.shape, dtype=torch_dtype(weight.dtype)) for weight in model.weights}
    return build_runtime(
        compile_plan(model, plan),
        NoopModel(model),
        SourceFiller(RecipeSource(TensorsInHand(weights))),
        group,
        open_device("host"),
        timeout_s=timeout_s,
        hooks=Hooks(),
    )


def c_noop_calls(count: int) -> Calls:
    """`count` compute ops that are one C function each: `free(NULL)`, which is defined to do nothing."""
    address = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p).value
    assert address is not None
    return Calls([(address, 0)] * count)


def _do_nothing(state: StepState) -> None:
    del state
