"""What rank processes of test_report run: a small random llama, captured, walked and reported."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from cuda_rig import open_rig

import graphshard
from graphshard.comm.group import Group
from graphshard.comm.nccl_library import find_library
from graphshard.core.errors import GraphshardError
from graphshard.device import open_device
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.runtime.evidence.inspection import CapturedNodes, traced_run
from graphshard.runtime.evidence.sequence import compare_runs, seen_calls
from graphshard.runtime.runtime import Runtime

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tied_embeddings=True,
)


@contextmanager
def small_runtime(group: Group, transport: str, **choices: Any) -> Iterator[Runtime]:
    torch.set_num_threads(1)
    model, weights = random_llama(CONFIG)
    choices = {"units": "layer", "prefetch_depth": 1, "min_shard_bytes": 0, "transport": transport, **choices}
    with graphshard.compile(model, group, checkpoint=weights, timeout_s=20.0, **choices) as runtime:
        yield runtime
        group.barrier("looked at")


def report(group: Group, transport: str, num_copy_streams: int, num_launches: int) -> dict[str, Any]:
    """The report, and how what it saw compares with an eager run's calls."""
    with small_runtime(group, transport, num_copy_streams=num_copy_streams) as runtime:
        step = runtime.graph(1)
        report = step.report(num_launches=num_launches)
        difference = compare_runs(traced_run(runtime, step.shape), step.look().seen())
        return {
            **asdict(report),
            "text": str(report),
            "num_nodes_told": step.num_nodes(),
            "unit_bytes": [unit.num_bytes for unit in runtime.layout.units],
            "units": [gather.unit for gather in report.gathers],
            "difference": difference and difference.text("eager", "graph"),
        }


def fall_back(group: Group) -> dict[str, Any]:
    """A library that gathers by a kernel although all is set for copies: refused by name, or reported."""
    stage("sm_kernel")
    with small_runtime(group, "nccl") as runtime:
        step = runtime.graph(1)
        try:
            step.report()
            refused = ""
        except GraphshardError as error:
            refused = f"{type(error).__name__}: {error}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            report = step.report(strict=False)
        difference = compare_runs(traced_run(runtime, step.shape), step.look().seen())
    return {
        "refused": refused,
        "warned": [str(one.message) for one in caught],
        "problems": report.problems,
        "claim": report.claim,
        "num_kernels": report.num_kernels,
        "difference": difference and difference.text("eager", "graph"),
    }


def captured_by_others(group: Group) -> dict[str, Any]:
    """As torch captures on CUDA: our ops recorded into a capture of its own, its kernels (host nodes here) between."""
    del group  # the rig has threads of its own as ranks
    with open_rig(num_copy_streams=2) as rig:
        bound, step = rig.bound(), rig.capture()
        nodes = CapturedNodes(rig.runtime, rig.shape, bound, step.handle, step.spans())
        bound.op_list.set_trace(True)
        rig.compute.issue(rig.shape, bound)
        rig.synchronize()
        traced = bound.op_list.take_trace()
        eager = seen_calls(traced, bound.sources, bound.lowered.streams, nodes.places)
        difference = compare_runs(eager, nodes.seen())
        return {
            **asdict(nodes.report()),
            "num_segments": len(rig.model.segments),
            "unit_bytes": [unit.num_bytes for unit in rig.runtime.layout.units],
            "kinds": sorted({row.kind for row in eager.ops}),
            "difference": difference and difference.text("eager", "graph"),
        }


def walk_without_the_name(group: Group) -> str:
    """In a process that was not started with the host driver's variables."""
    with small_runtime(group, "pull") as runtime:
        try:
            runtime.graph(1).report()
        except GraphshardError as error:
            return f"{type(error).__name__}: {error}"
        return ""


def stage(spec: str) -> None:
    library = ctypes.CDLL(str(find_library(open_device("host"))))
    assert library.gshost_nccl_stage(spec.encode()) == 0, spec
