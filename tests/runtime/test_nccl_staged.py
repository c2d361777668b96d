"""A library that does not do what it was told: on one rank it leaves a gather out, or issues two in turn.

What ranks post agrees, so only the library can tell: its asynchronous error names who waits in which gather.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import pytest
from byte_model import ByteModel
from byte_steps import wrong_after
from lockstep_programs import LAYERS, PATIENT_S, compiled, outcome
from ranks import run_on_ranks

from graphshard.comm.group import Group
from graphshard.comm.nccl_library import find_library
from graphshard.device import open_device

SOON_S = 15.0
STAGED_RANK = 1


def stage(spec: str) -> None:
    """For the host NCCL of this process, whose ranks are threads; "" ends it."""
    library = ctypes.CDLL(str(find_library(open_device("host"))))
    assert library.gshost_nccl_stage(spec.encode()) == 0, spec


def step_over(group: Group, fault: str, number: int, run: str) -> list[Any]:
    """What this rank is told of its next three steps, whose `number`-th gather goes wrong on rank 1; what it saw."""
    model = ByteModel(LAYERS)
    with compiled(group, model, timeout_s=PATIENT_S, capture_sizes=[]) as runtime:
        wrong = wrong_after(runtime, model, lambda: runtime.run(1))
        group.barrier("a good step")
        if run == "graph":
            number += 2  # a capture first gathers what it records over; a slot still holds one of the three units
        if group.rank == 0:
            stage(f"{fault}:rank={STAGED_RANK},call={number}")
        group.barrier("staged")
        if run == "graph":
            runtime.capture()
        act: Callable[[], object] = runtime.graph(1).replay if run == "graph" else lambda: runtime.run(1)
        told = outcome(lambda: [wrong.extend(wrong_after(runtime, model, act)) for _ in range(3)])
        group.barrier("all were told")
    return [*told, wrong]


@pytest.mark.parametrize("run", ["eager", "graph"])
@pytest.mark.parametrize("fault", ["skip", "swap"])
def test_a_gather_that_the_library_leaves_out_or_swaps_ends_on_all(fault: str, run: str) -> None:
    """One error, at once; no rank takes bytes for good that came of an abort."""
    for number in (1, 2, 3):
        if (fault, run, number) == ("swap", "graph", 3):
            continue  # the last gather of a capture: there is no later one in the graph to swap it with
        try:
            told = run_on_ranks(step_over, 3, fault, number, run)
        finally:
            stage("")
        (text,) = {found[0] for found in told}
        assert re.match(
            rf"rank \d's communicator failed while it waited for step \d of shape 1x1 \({run}\): communicator "
            r"'graphshard weights world', rank \d of 3: asynchronous error ncclInvalidUsage",
            text,
        ), text
        assert re.search(r"rank \d waits in a gather of \d+ bytes .* this rank \(\d\) in a gather of \d+ bytes", text)
        assert all(found[1] < SOON_S for found in told)
        assert [found[2] for rank, found in enumerate(told) if rank != STAGED_RANK] == [[], []]
