"""What rank processes of the fault tests do; apart from the tests, so that a rank need not import pytest."""

from __future__ import annotations

import os
import signal
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after

from graphshard.comm.group import Group
from graphshard.core.errors import CommError
from graphshard.core.specs import StepShape

ENDINGS = {1: "raise", 2: "os._exit", 3: "SIGKILL"}
"""How ranks of `meet_and_part` end; rank 0 goes on."""


def meet_and_part(group: Group) -> dict[str, Any]:
    """Ranks whose dicts and hashes have orders of their own agree; rank 0 goes on when the others are gone."""
    model = ByteModel([[3000, 5], [4000], [5000]])
    tensors = model.tensors()
    names = sorted(tensors, key=hash) if group.rank else list(tensors)
    shuffled = {name: tensors[name] for name in reversed(names)}
    choices: dict[str, Any] = {"units": "weight", "prefetch_depth": 1, "head": "tail"}
    with compile_bytes(group, model, checkpoint=shuffled, transport="nccl", **choices) as collective:
        wrong = wrong_after(collective, model, collective.graph(batch_size=1).replay)
        listed = collective._bound[StepShape(1)].lowered.digest
    with compile_bytes(group, model, checkpoint=shuffled, **choices) as runtime:
        graph = runtime.graph(batch_size=1)
        wrong += wrong_after(runtime, model, graph.replay)
        found = {
            "hash": hash("graphshard"),
            "order": list(shuffled),
            "digests": [runtime.model.digest, runtime.plan.digest, runtime.layout.digest],
            "lists": [runtime._bound[StepShape(1)].lowered.digest, listed],
        }
        told = [value for value, _ in group.all_gather(found)]
        end(group.rank)
        control = runtime._control
        while any(control.state(rank) not in ("dead", "closed") for rank in ENDINGS):
            wrong += wrong_after(runtime, model, graph.replay)
        for _ in range(20):
            wrong += wrong_after(runtime, model, graph.replay) + wrong_after(runtime, model, lambda: runtime.run(1))
        states = [control.state(rank) for rank in range(group.world_size)]
        try:
            group.barrier()
            error = ""
        except CommError as failure:
            error = str(failure)
    return {"told": told, "wrong": wrong, "states": states, "error": error, "num_steps": runtime.num_steps}


def end(rank: int) -> None:
    """Leave in the middle of everything, as `ENDINGS` says."""
    how = ENDINGS.get(rank)
    if how == "raise":
        raise RuntimeError("out of luck")
    if how == "os._exit":
        os._exit(5)
    if how == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
