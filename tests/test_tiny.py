"""The front door: a small llama on two ranks that hold half of it each, and what comes out of it.

plan -> layout -> program -> verify -> run eagerly, capture, replay; bit for bit as if nothing were sharded, whichever
transport gathers
"""

from __future__ import annotations

import pytest
import torch
from ranks import run_on_ranks

import graphshard
from graphshard.comm.group import Group
from graphshard.core.specs import DeviceSpec
from graphshard.models.config import LlamaConfig
from graphshard.models.llama import random_llama
from graphshard.verify import verify

CONFIG = LlamaConfig(
    vocab_size=320, hidden_size=64, intermediate_size=160, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16
)
DEVICE = DeviceSpec("host", "any", memory_bytes=1 << 30, spare_cores=1)


def logits_of(group: Group, plan: str, replay: bool, transport: str = "pull") -> list[list[float]]:
    """Four steps of two sequences: the logits, step by step."""
    model, weights = random_llama(CONFIG, max_batch_size=2)
    sharded = {"min_shard_bytes": 0, "prefetch_depth": 1, "units": "layer", "transport": transport}
    choices = sharded if plan == "auto" else {}
    with graphshard.compile(model, group, checkpoint=weights, plan=plan, capture_sizes=[2], **choices) as runtime:
        step = runtime.graph(batch_size=2)
        seen = []
        for position in range(4):
            step.inputs["tokens"].copy_(torch.tensor([[5 * position + 1], [7 * position + 2]]))
            step.inputs["positions"].fill_(position)
            step.replay() if replay else runtime.run(2)
            seen.append(step.outputs["logits"].flatten().tolist())
        return seen


@pytest.mark.parametrize("transport", ["pull", "nccl"])
def test_sharded_equals_replicated_bit_for_bit(transport: str) -> None:
    replicated = run_on_ranks(logits_of, 2, "replicated", False)
    for replay in (False, True):
        sharded = run_on_ranks(logits_of, 2, "auto", replay, transport)
        assert sharded == replicated


def test_a_plan_says_why() -> None:
    model, _ = random_llama(CONFIG)
    plan = graphshard.make_plan(model.spec(), 2, DEVICE, min_shard_bytes=0)
    assert all(decision.reason for decision in plan.decisions)
    assert plan.reasons


def test_the_program_is_verified_and_a_broken_one_is_refused() -> None:
    model, _ = random_llama(CONFIG)
    plan = graphshard.make_plan(model.spec(), 2, DEVICE, min_shard_bytes=0, units="layer", prefetch_depth=1)
    program = graphshard.emit(model.spec(), plan)
    assert verify(program).is_good
    text = program.text().replace(f" num_ops={len(program.ops)}", "")  # it is compared with the ops that are there
    broken = graphshard.Program.parse("\n".join(line for line in text.splitlines() if "wait_once unit=1 " not in line))
    report = verify(broken)
    assert 3 in report.rules
    print(report.text())
