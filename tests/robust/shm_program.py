"""Run in a mount namespace of its own (test_small_shm.py): windows larger than /dev/shm, which is full."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from ranks import start_processes
from signs import Signs, is_ordered, tell

from graphshard.comm.group import Group
from graphshard.comm.rejoin import Newcomer

LAYERS = [[7 << 20], [7 << 20], [8 << 20]]


def step(group: Group, folder: str) -> dict[str, Any]:
    """Rank 1 dies after its first step, and steps when it has come back; rank 0 steps on meanwhile."""
    model = ByteModel(LAYERS)
    with compile_bytes(group, model, units="layer", prefetch_depth=1, head="tail") as runtime:
        acts = (runtime.graph(1).replay, lambda: runtime.run(1))
        wrong = [line for act in acts for line in wrong_after(runtime, model, act)]
        if group.rank == 1 and not isinstance(group, Newcomer):
            os.kill(os.getpid(), signal.SIGKILL)
        tell(folder, "ready")
        while not is_ordered(folder, "stop"):
            wrong += wrong_after(runtime, model, acts[0])
        used = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
        used += [name for fd in os.listdir("/proc/self/fd") if "/dev/shm" in (name := _target(fd))]
        return {"wrong": wrong, "used": used, "window": runtime.layout.shard_bytes, "steps": runtime.num_steps}


def main(folder: str) -> None:
    """Fill /dev/shm, start the ranks, and print what they and it have to say."""
    stat = os.statvfs("/dev/shm")
    (Path("/dev/shm") / "full").write_bytes(bytes(stat.f_bavail * stat.f_frsize))
    with Signs(Path(folder)) as signs, start_processes(step, 2, folder) as ranks:
        ranks.restart(1, timeout_s=60.0)
        signs.wait_for("ready", [0, 1])
        during = os.listdir("/dev/shm")
        signs.order("stop")
        results = ranks.wait(240.0)
    told = [result.value or result.traceback or result.error for result in results]
    size = stat.f_blocks * stat.f_frsize
    print(json.dumps({"size": size, "free": os.statvfs("/dev/shm").f_bavail, "during": during, "told": told}))


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
