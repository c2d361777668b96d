"""What update tests share: runtimes with faults at stages of an update, and which version each step saw."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from byte_model import ByteModel
from byte_steps import compile_bytes
from torch import Tensor

from graphshard.comm.group import Group
from graphshard.core.errors import GraphshardError
from graphshard.core.layout import chunk_pieces
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime
from graphshard.runtime.update.updating import NUM_OLD_STAGES, STAGES
from graphshard.runtime.weights.whole import whole_weight

LAYERS = [[3001, 300], [1501], [4000], [900]]
OLD_STAGES, NEW_STAGES = STAGES[:NUM_OLD_STAGES], STAGES[NUM_OLD_STAGES:]


class Stage:
    """`Hooks.update`: does `act` once, when the update comes to stage `at`."""

    def __init__(self) -> None:
        self.at = ""
        self.act: Callable[[], object] = lambda: None
        self.passed: list[str] = []

    def arm(self, at: str, act: Callable[[], object]) -> None:
        self.at, self.act = at, act

    def __call__(self, stage: str) -> None:
        self.passed.append(stage)
        if stage == self.at:
            self.at = ""
            self.act()


def fail() -> None:
    raise ValueError("a fault on purpose")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def updating(group: Group, model: ByteModel, **choices: Any) -> tuple[Runtime, Stage]:
    """The model on this rank with its version 0, and what happens at the stages of its updates."""
    stage = Stage()
    defaults: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "timeout_s": 20.0}
    return compile_bytes(group, model, hooks=Hooks(poison=True, update=stage), **(defaults | choices)), stage


def version_seen(runtime: Runtime, model: ByteModel, act: Callable[[], object], versions: Iterable[int]) -> int:
    """The version that all segments of one step saw; AssertionError for a mixture, or bytes of no version."""
    outputs = runtime.buffers(min(runtime.programs), "output")
    for tensor in outputs.values():
        tensor.zero_()
    act()
    found = {version: model.wrong(outputs, version) for version in versions}
    right = [version for version, wrong in found.items() if not wrong]
    assert len(right) == 1, f"rank {runtime.rank}: {found}"
    return right[0]


def version_of(runtime: Runtime, model: ByteModel, versions: Iterable[int]) -> int:
    """The version that a replay and an eager step see."""
    known = list(versions)
    seen = {version_seen(runtime, model, act, known) for act in (runtime.graph(1).replay, lambda: runtime.run(1))}
    assert len(seen) == 1, seen
    return seen.pop()


def in_a_loop(runtime: Runtime, model: ByteModel) -> None:
    """One step whose layers the test computes."""
    with runtime.begin_step(1) as step:
        for call in step.calls:
            step.before_layer(call.layer)
            step.state.run(model.segments[call.begin : call.end])
            step.after_layer(call.layer)


def raised(act: Callable[[], object]) -> str:
    """The error that `act` must raise, one of graphshard's."""
    try:
        act()
    except GraphshardError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def refusals(runtime: Runtime) -> list[str]:
    """What is said by everything that may not use weights of no version; each must refuse."""
    acts: Mapping[str, Callable[[], object]] = {
        "run": lambda: runtime.run(1),
        "replay": runtime.graph(1).replay,
        "prefetch": lambda: runtime.prefetch(1),
        "capture": runtime.capture,
        "begin_step": lambda: runtime.begin_step(1),
        "admit": runtime.admit,
        "whole_weight": lambda: whole_weight(runtime, runtime.model.weights[0].name),
    }
    found = {what: raised(act) for what, act in acts.items()}
    for what, text in found.items():
        assert "the weights are of no version" in text, (what, text)
    return list(found.values())


def stored(runtime: Runtime) -> tuple[Tensor, Tensor]:
    """A copy of this rank's chunks and resident weights."""
    return runtime.memory._shard_bytes.clone(), runtime.memory._resident_bytes.clone()


def is_padding_zero(runtime: Runtime) -> bool:
    """Whether all bytes of this rank's chunks that no weight covers are zero."""
    covered = torch.zeros(runtime.layout.shard_bytes, dtype=torch.bool)
    for unit in runtime.layout.units:
        for piece in chunk_pieces(unit, runtime.rank):
            begin = unit.chunk_offset + piece.chunk_offset
            covered[begin : begin + piece.weight_end - piece.weight_begin] = True
    shards = runtime.memory._shard_bytes[: runtime.layout.shard_bytes]
    return not shards[~covered].any()


def try_update(runtime: Runtime, tensors: Mapping[str, Tensor], **choices: Any) -> str:
    """What an update raised; empty if it ended well."""
    try:
        runtime.update(tensors, **choices)
    except GraphshardError as error:
        return str(error)
    return ""
