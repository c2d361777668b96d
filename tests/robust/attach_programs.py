"""Rank processes with an attached module: they run it until told to stop, and die when the test says."""

from __future__ import annotations

import os
import signal
from typing import Any

from signs import is_ordered, take_order, tell
from small_modules import attach, equal, outputs, random_stack

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer


def serve(group: Group, folder: str) -> dict[str, Any]:
    """Forwards until `stop`; `die.RANK` kills this rank between two layers."""
    module = random_stack(4)
    right = outputs(module)
    num_right = num_wrong = 0
    with attach(module, group) as attached:
        tell(folder, "ready")
        pids = [page.pid for page in attached.runtime._control.pages]
        while not is_ordered(folder, "stop"):
            if take_order(folder, f"die.{group.rank}"):
                module.layers[2].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            if equal(outputs(module), right):
                num_right += 1
            else:
                num_wrong += 1
            if ask := take_order(folder, f"report.{group.rank}"):
                tell(folder, ask)
            for peer, page in enumerate(attached.runtime._control.pages):
                if page.pid != pids[peer]:
                    pids[peer] = page.pid
                    tell(folder, f"admitted {peer} {page.pid}")
        state = attached.module.state_dict()
        attached.detach()
    return {
        "num_right": num_right,
        "num_wrong": num_wrong,
        "is_newcomer": isinstance(group, Newcomer),
        "state": equal([*state.values()], [*random_stack(4).state_dict().values()]),
        "detached": equal(outputs(module), right),
    }
