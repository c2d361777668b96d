"""Rank processes that fold between steps, or borrow, until told to stop; they die when told."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from byte_steps import compile_bytes, wrong_after
from fold_model import DraftModel, FoldModel, LendingModel
from signs import Stopping, take_order, tell

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer


def serve_folds(group: Group, folder: str) -> dict[str, Any]:
    """Step, prefetch, fold, in turn. Orders: `die.RANK` kills this rank between steps; `stop` ends all."""
    model, wrong, turn, admitted = FoldModel(), [], 0, 0
    with compile_bytes(group, model, units="layer", prefetch_depth=1, head="outside") as runtime:
        graph, shape = runtime.graph(1), min(runtime.programs)
        state = runtime.buffers(shape, "cache")["state"]
        table, pids = runtime.buffer_table(), [page.pid for page in runtime._control.pages]
        tell(folder, "ready")
        stopping = Stopping(folder)
        while not stopping.is_due(runtime.admit):
            turn += 1
            wrong += wrong_after(runtime, model, graph.replay if turn % 2 else lambda: runtime.run(1))
            runtime.prefetch(1)
            state.zero_()
            runtime.buffers(shape, "input")["accepted"].fill_(turn)
            runtime.fold(1, run="graph" if turn % 3 else "eager")
            if not torch.equal(state, model.folded([turn])):
                wrong.append(f"fold {turn} left something else")
            for peer, page in enumerate(runtime._control.pages):
                if page.pid != pids[peer]:
                    pids[peer], admitted = page.pid, admitted + 1
                    tell(folder, f"admitted {peer} {page.pid}")
            if take_order(folder, f"die.{group.rank}"):
                os.kill(os.getpid(), signal.SIGKILL)
        same = table == runtime.buffer_table()
    return {"wrong": wrong, "same": same, "is_newcomer": isinstance(group, Newcomer), "admitted": admitted}


def serve_pair(group: Group, folder: str) -> dict[str, Any]:
    """A target and a draft that borrows of it step in turn. Orders as in `serve_folds`."""
    target, choices = LendingModel(), {"units": "layer", "prefetch_depth": 1}
    draft, wrong, admitted = DraftModel(target), [], set()
    with (
        compile_bytes(group, target, **choices) as lender,
        compile_bytes(group, draft, borrow=lender, head="outside", **choices) as borrower,
    ):
        pids = [[page.pid for page in runtime._control.pages] for runtime in (lender, borrower)]
        tell(folder, "ready")
        stopping = Stopping(folder)
        while not stopping.is_due(lambda: (lender.admit(), borrower.admit())):
            wrong += wrong_after(lender, target, lender.graph(1).replay)
            wrong += wrong_after(borrower, draft, borrower.graph(1).replay)
            for number, runtime in enumerate((lender, borrower)):
                for peer, page in enumerate(runtime._control.pages):
                    if page.pid != pids[number][peer]:
                        pids[number][peer] = page.pid
                        admitted.add(number)
                        tell(folder, f"admitted {number} {page.pid}")
            if take_order(folder, f"die.{group.rank}"):
                os.kill(os.getpid(), signal.SIGKILL)
    return {"wrong": wrong, "is_newcomer": isinstance(group, Newcomer), "admitted": sorted(admitted)}
