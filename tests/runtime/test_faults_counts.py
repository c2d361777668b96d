"""What captured graphs cost: nothing but memory of their own, which goes with them; over both transports."""

from __future__ import annotations

import gc
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from byte_model import ByteModel
from byte_steps import compile_bytes, wrong_after
from census import no_growth
from fault_tools import collect
from ranks import run_on_ranks

from graphshard._core import Driver
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.device import open_device
from graphshard.runtime.runtime import Runtime

LAYERS = [[3000], [4000], [5000]]
SLACK_MIB = 4
"""What a heap may grow by with nothing leaked; 200 graphs that stayed would take ten times as much."""


@dataclass(frozen=True)
class Counts:
    """What this process holds; ranks are threads of it."""

    descriptors: int
    mappings: int
    num_retired: int
    resident_mib: int

    @staticmethod
    def take(driver: Driver) -> Counts:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Counts(
            len(os.listdir("/proc/self/fd")),
            sum("memfd:" in line for line in maps),
            driver.num_retired,
            pages * resource.getpagesize() >> 20,
        )

    def growth(self, earlier: Counts) -> str:
        """What there is more of than in `earlier`; empty if nothing."""
        same = (self.descriptors, self.mappings) == (earlier.descriptors, earlier.mappings)
        is_flat = same and self.num_retired <= earlier.num_retired
        return "" if is_flat and self.resident_mib <= earlier.resident_mib + SLACK_MIB else f"{earlier} became {self}"


def counts(group: Group, runtime: Runtime) -> Counts | None:
    """Taken by rank 0 while the others wait."""
    group.barrier("before the count")
    taken = Counts.take(runtime.driver) if group.rank == 0 else None
    group.barrier("after the count")
    return taken


def capture_and_destroy(group: Group, transport: str, num_times: int) -> tuple[str, list[str]]:
    """What grew over `num_times` captures, each replayed once and closed."""
    model = ByteModel(LAYERS)
    choices: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "transport": transport}
    with compile_bytes(group, model, **choices) as runtime:
        before, wrong = None, []
        for number in range(num_times):
            runtime.graph(1).close()
            runtime.capture()
            runtime.graph(1).replay()
            if number == num_times // 10:
                before = counts(group, runtime)
        wrong = wrong_after(runtime, model, runtime.graph(1).replay)
        after = counts(group, runtime)
        return after.growth(before) if after is not None and before is not None else "", wrong


def test_200_captures_leave_what_one_leaves(transport: str) -> None:
    """Descriptors, mappings, what is retired and resident memory."""
    run_on_ranks(capture_and_destroy, 2, transport, 3)
    with no_growth():
        assert run_on_ranks(capture_and_destroy, 2, transport, 200) == [("", [])] * 2
    collect()


def keep_many(group: Group, transport: str, num_graphs: int) -> list[Any]:
    """Descriptors and mappings with one graph, with many and with one again; nodes of all graphs."""
    model = ByteModel(LAYERS)
    sizes = list(range(1, num_graphs + 1))
    choices: dict[str, Any] = {"units": "layer", "prefetch_depth": 1, "transport": transport, "capture_sizes": sizes}
    with compile_bytes(group, model, **choices) as runtime:
        many = counts(group, runtime)
        graphs = [runtime.graph(size) for size in sizes]
        num_nodes = {sum(graph.num_nodes().values()) for graph in graphs}
        wrong = [line for graph in graphs for line in wrong_after(runtime, model, graph.replay)]
        for size in sizes[1:]:
            runtime._graphs[StepShape(size)].close()
        del graphs
        one = counts(group, runtime)
        wrong += wrong_after(runtime, model, runtime.graph(1).replay)
        grown = one.growth(many) if one is not None and many is not None else ""
        return [grown, wrong, len(num_nodes)]


def test_35_graphs_hold_no_descriptor_and_no_window(transport: str) -> None:
    """Graphs that live cost nodes alone: counts are those of one graph, and fall back."""
    with no_growth():
        assert run_on_ranks(keep_many, 2, transport, 35) == [["", [], 1]] * 2
    collect()
    assert open_device().driver.num_retired == 0
