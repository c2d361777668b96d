"""Ranks that share one device, as processes and as threads: do segments see their own weights' bytes, however run?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import graphshard
from graphshard.comm.group import Group
from graphshard.comm.launch import RankProcesses
from graphshard.device.base import DeviceKind
from graphshard.gpu_check.naming import LAYERS, NamingModel, wrong
from graphshard.gpu_check.recorder import Recorder, Row
from graphshard.gpu_check.setup import TIMEOUT_S, Setup, on_threads
from graphshard.runtime.bind import Hooks

ENTRY = "graphshard.gpu_check.ranks:naming_rank"
ACTS = "ggeegegg"
"""Steps: g is a replay, e an eager one."""
CHOICES: tuple[dict[str, Any], ...] = (
    {"prefetch_depth": 0},
    {"prefetch_depth": 1, "num_copy_streams": 2},
    {"prefetch_depth": 1, "head": "outside"},
    {"prefetch_depth": 1, "head": "tail"},
    {"prefetch_depth": 2, "units": "weight"},
)
"""As `make_plan` takes them."""


def naming_rank(
    group: Group, kind: DeviceKind, choices: Sequence[Mapping[str, Any]], pinned_windows: bool = False
) -> dict[str, Any]:
    """Steps of all kinds for each of `choices`; poisoned slots make bytes that came too early or late show."""
    setup = Setup(kind)
    model = NamingModel(LAYERS)
    checkpoint = model.tensors()
    found: list[str] = []
    num_steps = 0
    for choice in choices:
        device = setup.device(group.local_rank, num_ranks=group.world_size, pinned_windows=pinned_windows)
        settings: dict[str, Any] = {"min_shard_bytes": 0, "units": "layer", "timeout_s": TIMEOUT_S, **choice}
        with graphshard.compile(
            model, group, checkpoint=checkpoint, device=device, hooks=Hooks(poison=True), **settings
        ) as runtime:
            graph, truth = runtime.graph(batch_size=1), model.truth(setup.torch_device())
            for act in ACTS:
                for output in graph.outputs.values():
                    output.zero_()
                if act == "g":
                    graph.replay()
                else:
                    runtime.run(1)
                found += [f"{dict(choice)}, step {num_steps} ({act}): {line}" for line in wrong(graph.outputs, truth)]
                num_steps += 1
            setup.synchronize()
            group.barrier("before closing")
    return {"num_steps": num_steps, "wrong": found[:10], "num_wrong": len(found)}


def judge(row: Row, told: Sequence[Mapping[str, Any]]) -> None:
    """The check fails if any rank saw a byte that was not its weight's."""
    row.add(ranks=list(told))
    for rank, one in enumerate(told):
        row.require(one["num_steps"] > 0, f"rank {rank} made no step")
        row.require(one["num_wrong"] == 0, f"rank {rank} saw wrong bytes: {'; '.join(one['wrong'][:3])}")


def in_processes(
    row: Row, world_size: int, arguments: Sequence[Any], timeout_s: float, env: Mapping[str, str] | None = None
) -> None:
    """`naming_rank` on ranks that are processes."""
    with RankProcesses(ENTRY, world_size, arguments=arguments, group_timeout_s=0.8 * timeout_s, env=env) as processes:
        results = processes.wait(timeout_s)
    failed = [result for result in results if not result.is_good]
    if failed:
        first = min(failed, key=lambda result: result.ended_s)
        row.add(first_traceback=first.traceback)
        row.require(False, first.line(world_size))
    judge(row, [result.value for result in results if result.is_good])


def check_ranks(recorder: Recorder, setup: Setup) -> None:
    """2 and 4 ranks, processes and threads, windows in device memory; 2 threads with pinned ones."""
    for world_size in (2, 4):

        def processes(row: Row, world_size: int = world_size) -> None:
            choices = CHOICES if world_size == 2 else CHOICES[:2]
            in_processes(row, world_size, [setup.kind, list(choices)], timeout_s=40.0 + 10.0 * world_size)

        def threads(row: Row, world_size: int = world_size) -> None:
            judge(row, on_threads(lambda group: naming_rank(group, setup.kind, CHOICES), world_size))

        recorder.run(f"{world_size} ranks as processes", processes)
        recorder.run(f"{world_size} ranks as threads", threads)

    def pinned(row: Row) -> None:
        reason = setup.why_no_pinned_windows()
        if reason is not None:
            row.skip(reason)
        judge(row, on_threads(lambda group: naming_rank(group, setup.kind, CHOICES[:2], True), 2))

    recorder.run("2 ranks as threads, windows in pinned host memory", pinned)
