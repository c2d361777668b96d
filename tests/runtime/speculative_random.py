"""Long random runs of a pair: stalled ops, cancelled prefetches, idle ranks, unequal batches, updates."""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random
from typing import Any

from fault_tools import InThread, Latch, gemms_of, until
from speculative_rig import Pair, stalled, traced

from graphshard.comm.group import Group
from graphshard.core.ops import AgLaunch
from graphshard.core.specs import StepShape
from graphshard.runtime.bind import Hooks
from graphshard.runtime.runtime import Runtime

SIZES = [1, 8, 16]
TIMEOUT_S = 60.0


class Places:
    """Latches of one rank, all open: at ops of target and draft, at the fold, at the draft's prefetch."""

    def __init__(self, programs: dict[str, Any]) -> None:
        self.latches: dict[str, Latch] = {name: Latch(is_open=True) for name in ("fold", "prefetch")}
        self.stalls: dict[str, dict[int, int]] = {"target": {}, "draft": {}}
        for name, program in programs.items():
            gathers = [index for index, op in enumerate(program.ops) if isinstance(op, AgLaunch)]
            for op in (gemms_of(program)[0], gemms_of(program)[-1], gathers[0], gathers[-1]):
                latch = self.latches[f"{name} op {op}"] = Latch(is_open=True)
                self.stalls[name] |= latch.stalls(op)

    def hooks(self, name: str) -> Hooks:
        fold = self.latches["fold"].word.address if name == "target" else 0
        return Hooks(poison=True, stalls=self.stalls[name], fold_stall=fold)


def random_steps(group: Group, transport: str, run: str, seed: int, num_steps: int) -> dict[str, Any]:
    """What all ranks do alike is drawn from one seed; sizes, idleness and latches from each rank's own."""
    together, alone = Random(seed), Random(f"{seed} {group.rank}")
    with Pair(group, transport, sizes=[1], timeout_s=TIMEOUT_S) as probe:
        programs = {name: runtime.programs[StepShape(1)] for name, runtime in probe.runtimes().items()}
    places = Places(programs)
    hooks = {name: {"hooks": places.hooks(name)} for name in ("target", "draft")}
    done: Counter[str] = Counter()
    wrong: list[str] = []
    choices = {"target_choices": hooks["target"], "draft_choices": hooks["draft"]}
    with Pair(group, transport, run=run, sizes=SIZES, timeout_s=TIMEOUT_S, **choices) as pair:
        trace = traced(pair)
        for number in range(num_steps):
            act = together.choices(["step", "skip", "discard", "update"], [78, 10, 9, 3])[0]
            done[act] += 1
            if act == "discard":
                pair.spec.discard()
            elif act == "update":
                which = together.choice([["target"], ["draft"], ["target", "draft"]])
                pair.versions |= {name: pair.versions[name] + 1 for name in which}
                pair.spec.update(**{name: pair.models[name].tensors(pair.versions[name]) for name in which})
            else:
                seen = _one_step(pair, places, alone, act == "skip", done)
                wrong += [f"step {number}: {line}" for line in seen]
        group.barrier("all are through", timeout_s=TIMEOUT_S)
    told = hashlib.sha256(repr(trace).encode()).hexdigest()
    return {"wrong": wrong[:5], "trace": told, "num_gathers": len(trace), "done": dict(done)}


def _one_step(pair: Pair, places: Places, alone: Random, is_skip: bool, done: Counter[str]) -> list[str]:
    """One step of this rank, idle or of some size, perhaps with one op that stands still for a while."""
    size = alone.choice([0, 1, 3, 7, 8, 16])
    if size == 0:
        pair.spec.idle(skip=is_skip)
        done["idle"] += 1
        return []
    name = alone.choice([None, None, *places.latches])
    if name is None or (is_skip and name.startswith("draft")):
        return pair.step(size, skip=is_skip)
    done["stalled"] += 1
    latch = places.latches[name]
    if name == "prefetch":
        latch.close()
        try:  # the step ends past a gather that stands still
            return pair.step(size, skip=is_skip, verifying=stalled(pair.draft, latch.word.address))
        finally:
            latch.open()
            # or the latch may be closed again before the gather has seen it open
            until(pair.draft._streams["prefetch"].is_idle, "the gather goes on")
    latch.close()
    opening = InThread(_opener(pair.target if name == "fold" else pair.runtimes()[name.split()[0]], name, latch))
    try:
        return pair.step(size, skip=is_skip)
    finally:
        opening.result()


def _opener(runtime: Runtime, name: str, latch: Latch) -> Any:
    """Opens `latch` once the launch that it stalls has been made."""
    before = runtime.num_folds if name == "fold" else runtime.num_steps

    def open_it() -> None:
        until(lambda: (runtime.num_folds if name == "fold" else runtime.num_steps) > before, f"{name} was launched")
        latch.open()

    return open_it
