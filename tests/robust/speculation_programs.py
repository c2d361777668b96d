"""Rank processes that speculate until told to stop; they die when told, and come back."""

from __future__ import annotations

import os
import signal
from typing import Any

from signs import Stopping, take_order, tell
from speculative_rig import Pair

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.errors import CommError


def serve_both(group: Group, folder: str) -> dict[str, Any]:
    """Steps of a target and a draft. Orders: `die.RANK` kills this rank inside a step; `stop` ends all."""
    wrong: list[str] = []
    admitted: set[str] = set()
    with Pair(group, "pull", sizes=[1, 4]) as pair:
        step, runtimes = pair.spec.graph(1), pair.runtimes()  # held throughout
        pids = {name: [page.pid for page in runtime._control.pages] for name, runtime in runtimes.items()}
        tell(folder, "ready")
        turn, stopping = 0, Stopping(folder)
        while not stopping.is_due(lambda: [runtime.admit() for runtime in runtimes.values()]):
            turn += 1
            wrong += pair.step(1 + turn % 4, skip=turn % 5 == 0)
            for name, runtime in runtimes.items():
                pids_now = [page.pid for page in runtime._control.pages]
                if pids_now != pids[name]:
                    pids[name] = pids_now
                    admitted.add(name)
                    if len(admitted) == 2:
                        tell(folder, "admitted")
            if take_order(folder, f"die.{group.rank}"):
                step.propose()
                step.verify()
                os.kill(os.getpid(), signal.SIGKILL)
        told = ""
        if isinstance(group, Newcomer):
            try:
                pair.spec.update(draft=pair.models["draft"].tensors(1))
            except CommError as error:
                told = str(error)
    return {"wrong": wrong, "is_newcomer": isinstance(group, Newcomer), "admitted": sorted(admitted), "told": told}
