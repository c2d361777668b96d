"""Rank processes that die in an update, and those that take their places."""

from __future__ import annotations

from typing import Any

from byte_model import ByteModel
from signs import Stopping, take_order, tell, until
from update_programs import LAYERS, die, refusals, try_update, updating, version_of

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.errors import GraphshardError

LIMIT_S = 30.0
PLAN: dict[str, Any] = {"head": "tail", "timeout_s": LIMIT_S}


def die_in_an_update(group: Group, stage: str, transport: str) -> dict[str, Any]:
    """Rank 1 dies when an update comes to `stage`: what the others are told, what they see, and what is refused."""
    model = ByteModel(LAYERS)
    runtime, hook = updating(group, model, transport=transport, head="tail", timeout_s=LIMIT_S)
    with runtime:
        assert try_update(runtime, model.tensors(1)) == ""
        if group.rank == 1:
            hook.arm(stage, die)
        told: dict[str, Any] = {"said": try_update(runtime, model.tensors(2)), "epoch": runtime.epoch}
        until(lambda: runtime._control.state(1) == "dead", "rank 1 is dead")
        if runtime.epoch % 2:
            told["refusals"] = refusals(runtime)
        elif transport == "pull":
            told["seen"] = version_of(runtime, model, (0, 1, 2))
        told["again"] = try_update(runtime, model.tensors(2))
        if runtime.epoch % 2 == 0 and transport == "pull":
            assert version_of(runtime, model, (0, 1, 2)) == told["seen"]
        return told


def serve_and_update(group: Group, folder: str, stage: str) -> dict[str, Any]:
    """Rank 1 dies in its second update; who comes back in its place brings the version that `version` orders.

    A newcomer that is refused says so and ends. The others step on, admit whoever is let in, and end when told.
    """
    model = ByteModel(LAYERS)
    if isinstance(group, Newcomer):
        version = int(take_order(folder, "version"))
        try:
            with updating(group, model, checkpoint=model.tensors(version), **PLAN)[0] as runtime:
                seen = [runtime.epoch, version_of(runtime, model, (0, 1, 2)), try_update(runtime, model.tensors(2))]
                tell(folder, "came back")
                stopping = Stopping(folder)
                until(lambda: stopping.is_due(runtime.admit), "the test ends")
                return {"seen": seen}
        except GraphshardError as error:
            tell(folder, "refused")
            return {"refused": str(error)}
    runtime, hook = updating(group, model, **PLAN)
    with runtime:
        assert try_update(runtime, model.tensors(1)) == ""
        if group.rank == 1:
            hook.arm(stage, die)
        said = try_update(runtime, model.tensors(2))
        tell(folder, "updated")
        stopping, seen = Stopping(folder), []
        while not stopping.is_due(lambda: runtime.epoch % 2 or runtime.admit()):
            if runtime.epoch % 2 == 0:
                seen.append(version_of(runtime, model, (0, 1, 2)))
        return {"said": said, "seen": sorted(set(seen)), "epoch": runtime.epoch}
