"""As `mini_programs.reach`, with the whole runtime: ranks that hang at a point of `compile` or of a step."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from signs import tell

from graphshard._core import Memory
from graphshard.comm.launch import RankProcesses
from graphshard.comm.rendezvous import init_group
from graphshard.core.errors import CommError
from graphshard.device import open_device
from graphshard.runtime.bind import Hooks
from graphshard.runtime.model import Segment, StepState
from graphshard.runtime.runtime import Runtime

POINTS = ("load", "bind", "capture", "replay")
LAYERS = [[5000, 300], [6000, 400], [7000, 100]]


class _Weights(dict[str, Any]):
    """A checkpoint that hangs at the second read."""

    folder = ""
    num_reads = 0

    def __getitem__(self, name: str) -> Any:
        self.num_reads += 1
        if self.num_reads == 2:
            hang(self.folder)
        return super().__getitem__(name)


def hang(folder: str) -> None:
    tell(folder, "here")
    while True:
        signal.pause()


def reach(folder: str, point: str, victims: list[int]) -> dict[str, Any]:
    """Victims hang at `point`; the others return their error, or what they saw until the victims were dead."""
    rank, model = int(os.environ["RANK"]), ByteModel(LAYERS)
    choices: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "head": "tail", "timeout_s": 600.0}
    word = Memory(open_device("host").driver, 4)
    if rank in victims:
        if point == "load":
            choices["checkpoint"] = _Weights(model.tensors())
            choices["checkpoint"].folder = folder
        if point == "bind":
            Runtime.check_gathers = lambda *_: hang(folder)  # type: ignore[method-assign]
        if point == "capture":
            model.segments = (*model.segments[:2], _hanging(model.segments[2], folder), *model.segments[3:])
        if point == "replay":
            choices["hooks"] = Hooks(stalls=dict.fromkeys(range(3, 6), word.address))
    try:
        with init_group(60.0) as group, compile_bytes(group, model, **choices) as runtime:
            if rank in victims:
                tell(folder, "here")
            wrong = wrong_after(runtime, model, runtime.graph(1).replay)
            while any(runtime._control.state(victim) != "dead" for victim in victims):
                wrong += wrong_after(runtime, model, runtime.graph(1).replay)
            return {"wrong": wrong + wrong_after(runtime, model, lambda: runtime.run(1))}
    except CommError as error:
        return {"error": str(error)}


def _hanging(segment: Segment, folder: str) -> Segment:
    def run(state: StepState) -> None:
        hang(folder)

    return Segment(segment.spec, run)


if __name__ == "__main__":
    with RankProcesses(f"{__file__}:reach", 2, arguments=[*sys.argv[1:], [0, 1]], group_timeout_s=None) as launched:
        launched.wait(600.0)
