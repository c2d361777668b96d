"""Rank programs over the byte model, for threads and processes alike: arguments and results are JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from byte_model import ByteModel

import graphshard
from graphshard.comm.group import Group
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime


def compile_bytes(group: Group, model: ByteModel, **choices: Any) -> Runtime:
    """The byte model on this rank; every weight is sharded unless `choices` say otherwise."""
    defaults: dict[str, Any] = {"min_shard_bytes": 0, "capture_sizes": [1], "hooks": Hooks(poison=True)}
    return graphshard.compile(model, group, **({"checkpoint": model.tensors()} | defaults | choices))


def wrong_after(runtime: Runtime, model: ByteModel, act: Callable[[], object]) -> list[str]:
    """Run one step on cleared outputs: what the segments saw that was not theirs."""
    outputs = runtime.buffers(min(runtime.programs), "output")
    for tensor in outputs.values():
        tensor.zero_()
    act()
    return model.wrong(outputs)


def mixed_steps(group: Group, layers: Sequence[Sequence[int]], choices: Mapping[str, Any], tied: bool) -> list[str]:
    """Eager steps and replays in turn, so that every order of the two follows every other."""
    model = ByteModel(layers, tied=tied)
    with compile_bytes(group, model, **choices) as runtime:
        graph = runtime.graph(batch_size=1)
        eager, replay = (lambda: runtime.run(1)), graph.replay
        acts = (eager, eager, replay, replay, replay, eager, replay, eager)
        wrong = [line for act in acts for line in wrong_after(runtime, model, act)]
        assert runtime.num_steps == len(acts)
        return wrong


def mixed_steps_of_each(
    group: Group, layers: Sequence[Sequence[int]], choices: Sequence[Mapping[str, Any]]
) -> list[str]:
    """`mixed_steps` of several plans, one after another in the same processes."""
    return [line for choice in choices for line in mixed_steps(group, layers, choice, False)]
