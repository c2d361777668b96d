"""Rank processes with the whole runtime: they step until told to stop, and die when the test says."""

from __future__ import annotations

import os
import signal
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from mini import held
from signs import Stopping, take_order, tell
from sliced_model import SlicedModel

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer
from graphshard.core.errors import CommError

LAYERS = [[5000, 300], [6000, 400], [7000, 100]]
BLOCKS = [(24, [100, 40, 80]), (48, [40, 20]), (24, [300, 20])]
CHOICES = {"units": "layer", "prefetch_depth": 1, "head": "tail", "capture_sizes": [1, 2]}


def serve(group: Group, folder: str, dual: str = "off") -> dict[str, Any]:
    """Replays and eager steps in turn. Orders: `die.RANK` kills this rank between steps; `stop` ends all.

    With `dual` the model has blocks, which lie in slices.
    """
    model, rank = ByteModel(LAYERS) if dual == "off" else SlicedModel(BLOCKS), group.rank
    wrong: list[str] = []
    pinned: dict[int, int] = {}
    with compile_bytes(group, model, **CHOICES, dual=dual) as runtime:
        assert any(unit.is_sliced for unit in runtime.plan.units) == (dual != "off")
        graph = runtime.graph(batch_size=1)  # held throughout: it stays usable, whoever comes back
        table, nodes, before = runtime.buffer_table(), graph.num_nodes(), held()
        acts = (graph.replay, lambda: runtime.run(1), graph.replay)
        wrong += wrong_after(runtime, model, graph.replay)
        tell(folder, "ready")
        pids = [page.pid for page in runtime._control.pages]
        turn = 0
        stopping = Stopping(folder)
        while not stopping.is_due(runtime.admit):
            turn += 1
            wrong += wrong_after(runtime, model, acts[turn % 3])
            pinned |= runtime.pinned_by_dead()
            for peer, page in enumerate(runtime._control.pages):
                if page.pid != pids[peer]:
                    pids[peer] = page.pid
                    tell(folder, f"admitted {peer} {page.pid}")
            if take_order(folder, f"die.{rank}"):
                os.kill(os.getpid(), signal.SIGKILL)
            if ask := take_order(folder, f"step.{rank}"):
                wrong += [line for _ in range(int(ask)) for line in wrong_after(runtime, model, acts[0])]
                tell(folder, "stepped")
        wrong += wrong_after(runtime, model, graph.replay)
        return {
            "wrong": wrong,
            "is_newcomer": isinstance(group, Newcomer),
            "same": (table, nodes) == (runtime.buffer_table(), graph.num_nodes()),
            "before": before,
            "after": held(),
            "pinned": pinned,
            "pinned_at_the_end": runtime.pinned_by_dead(),
            "barrier": _error_of_a_barrier(group),
        }


def _error_of_a_barrier(group: Group) -> str:
    try:
        group.barrier(timeout_s=20.0)
    except CommError as error:
        return str(error)
    return ""
