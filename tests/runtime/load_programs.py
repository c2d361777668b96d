"""Rank processes that load, of which one is slow or hangs in the middle of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from byte_model import ByteModel
from load_rig import compiled_of, load
from signs import tell

from graphshard.comm.rendezvous import init_group
from graphshard.core.errors import GraphshardError
from graphshard.load.checkpoint import Checkpoint
from graphshard.runtime.weights import workers

MODEL = ByteModel([[50_000], [60_000]])
VICTIM, BUSY = 1, 2


class _Busy(Checkpoint):
    """Rank BUSY's: the first read takes until the load is over, one way or the other."""

    def read_into(self, name: str, begin: int, out: memoryview) -> None:
        time.sleep(120)


def load_beside(signs: str, folder: str, how: str, limit_s: float) -> dict[str, Any]:
    """Rank VICTIM says "here" in the middle of its load, and hangs or sleeps; "hang" keeps rank BUSY loading too."""
    rank = int(os.environ["RANK"])
    workers._GRACE_S = 0.05
    store = _Busy(Path(folder)) if rank == BUSY and how == "hang" else Checkpoint(Path(folder))
    is_first = True

    def on_load(done: int, total: int) -> None:
        nonlocal is_first
        if rank == VICTIM and is_first:
            is_first = False
            tell(signs, "here")
            if how == "sleep":
                time.sleep(3.2 * limit_s)
            else:
                signal.pause()

    with init_group(60.0) as group:
        group.barrier("all are here")
        group.timeout_s = limit_s
        try:
            loaded = load(group, compiled_of(MODEL.spec(), 3), store, on_load=on_load)
        except GraphshardError as error:
            tell(signs, "failed")
            return {"error": f"{type(error).__name__}: {error}"}
        return {"wrong": loaded.wrong(MODEL.tensors())}
