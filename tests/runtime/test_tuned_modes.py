"""`compile(dual="auto", tune=FILE)`: each step shape runs as the file says, and ranks with unlike files are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_on_ranks, try_on_ranks

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import StepShape
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.schedule.tune_file import tune_text
from graphshard.schedule.tuned import MODES, Tuned, TunedRow, kinds_of

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
)  # fmt: skip
TIMES = {1: (0.8, 0.2), 8: (1.0, 2.0)}
TOLERANCE = 2e-4  # of logits of some 1.0: slices are summed in another order


def tuned(transport: Any, gather_ms: float = 1.0) -> Tuned:
    """Slices are faster at 1 token of a rank, gathers at 8."""
    spec = random_llama(CONFIG, max_batch_size=8, dual=True)[0].spec()
    (kind,) = kinds_of(spec)
    rows = tuple(
        TunedRow(kind, n, mode, ms * gather_ms, ms, ms, 3)
        for n, both in TIMES.items()
        for mode, ms in zip(MODES, both, strict=True)
    )
    return Tuned(spec.name, spec.digest, 2, transport, "host", "some cpu", {}, (kind,), tuple(TIMES), rows)


def step(group: Group, paths: list[str], transport: str) -> dict[str, Any]:
    """Modes of both step shapes, and how far their logits are from a replicated run's."""
    model, weights = random_llama(CONFIG, max_batch_size=8, dual=True)
    common: dict[str, Any] = {"checkpoint": weights, "capture_sizes": [1, 8], "min_shard_bytes": 0}
    asked = {"dual": "auto", "tune": paths[group.rank], "transport": transport}
    far = {}
    with (
        graphshard.compile(model, group, **common, **asked) as runtime,
        graphshard.compile(model, group, checkpoint=weights, capture_sizes=[1, 8], plan="replicated") as whole,
    ):
        for size in (1, 8):
            logits = []
            for one in (runtime, whole):
                graph = one.graph(size)
                graph.inputs["tokens"].copy_(torch.arange(size)[:, None] + group.rank)
                group.barrier("before a step")
                graph.replay()
                logits.append(graph.outputs["logits"].clone())
            far[str(size)] = (logits[0] - logits[1]).abs().max().item()
        group.barrier("stepped")
        modes = {str(size): list(runtime.plan.modes_of(StepShape(size))) for size in (1, 8)}
        return {"modes": modes, "far": far, "reasons": list(runtime.plan.block_reasons)}


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_step_shapes_run_as_the_file_says(tmp_path: Path, transport: str) -> None:
    path = tmp_path / "tune.json"
    path.write_text(tune_text(tuned(transport)))
    for told in run_on_ranks(step, 2, [str(path)] * 2, transport):
        assert told["modes"] == {"1": ["tensor_parallel"] * 2, "8": ["gather"] * 2}
        assert 0 < told["far"]["1"] < TOLERANCE and told["far"]["8"] == 0
        assert "measured: 0.2 ms against 0.8 ms at 1 tokens a rank" in " ".join(told["reasons"])


def test_a_rank_with_another_file_is_refused_by_name(tmp_path: Path) -> None:
    mine, theirs = tuned("pull"), tuned("pull", gather_ms=1.001)
    again = replace(mine, notes={"machine": "looked at again"})
    assert mine.digest == again.digest != theirs.digest
    paths = []
    for i, one in enumerate((mine, theirs, again)):
        paths.append(str(tmp_path / f"{i}.json"))
        Path(paths[-1]).write_text(tune_text(one))
    for outcome in try_on_ranks(step, 2, paths[:2], "pull"):
        assert outcome.error_type == "CommError"
        assert 'certificates differ: setting modes is "tune file ' in outcome.error
        assert all(one.digest[:12] in outcome.error for one in (mine, theirs))
    run_on_ranks(step, 2, [paths[0], paths[2]], "pull")


def test_a_file_of_another_group_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    path.write_text(tune_text(tuned("nccl")))
    for outcome in try_on_ranks(step, 2, [str(path)] * 2, "pull"):
        assert outcome.error_type == "SpecError"
        assert "the tune file is of transport nccl, and this is transport pull" in outcome.error
