"""Commands on a folder with a small Kimi K3, as published: `show`, and what `generate` does on its ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runner import apart, here
from ranks import run_on_ranks

from graphshard.cli.generate_rank import GenerateRequest, decode_batches, maker
from graphshard.comm.group import Group
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.folder import random_pieces, save_kimi_k3
from graphshard.models.specs.kimi_k3 import KimiK3Config

CONFIG = KimiK3ModelConfig(
    KimiK3Config(
        hidden=64, vocab=96, num_layers=3, mla_layers=frozenset({2}), dense_layers=1, intermediate=96, heads=2,
        q_lora=32, kv_lora=32, qk_nope=16, qk_rope=16, v_head=16, kda_heads=2, kda_head=32, conv_taps=4, experts=6,
        top_k=2, expert_size=32, latent=32, shared=64,
    ),
    dtype="float32",
)  # fmt: skip
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "k3"
    save_kimi_k3(path, CONFIG, random_pieces(CONFIG, seed=4))
    return path


def test_show_plan_says_which_weights_and_why(folder: Path) -> None:
    answer = here("show", "plan", "--model", folder, "--json", "-")
    assert answer.code == 0, answer.err
    decisions = {row["weight"]: row for row in answer.json["rows"] if row["part"] == "decisions"}
    layer = "model.layers.1."
    sharded = [name for name, row in decisions.items() if name.startswith(layer) and row["unit"] is not None]
    assert len(sharded) == 8
    assert "servers merge f_a and b" in decisions[f"{layer}self_attn.f_a_b_proj.weight"]["reason"]
    assert "expert parallelism" in decisions[f"{layer}block_sparse_moe.experts.w2_weight"]["reason"]


def decoded(group: Group, folder: str, plan: str, run: str) -> list[dict[str, Any]]:
    choices = {"units": "layer", "prefetch_depth": 1}
    request = GenerateRequest(folder, PROMPTS, 4, 2, 16, run, choices, False, "", None)
    with maker(group, request)(plan) as runtime:
        assert bool(runtime.plan.units) == (plan == "auto")
        found = decode_batches(runtime, group, request, None)
    return [{key: batch[key] for key in ("prompts", "tokens", "hashes")} for batch in found]


def test_generated_tokens_and_logits_are_those_of_the_replicated_model(folder: Path) -> None:
    want = run_on_ranks(decoded, 2, str(folder), "replicated", "eager")
    tokens = [tuple(made) for rank in want for batch in rank for made in batch["tokens"]]
    assert len(set(tokens)) > 1 and {len(made) for made in tokens} == {4}  # it is no constant
    for run in ("eager", "graph"):
        assert run_on_ranks(decoded, 2, str(folder), "auto", run) == want


@pytest.mark.slow
def test_generate_on_processes(folder: Path) -> None:
    answer = apart("generate", "--model", folder, "--tokens", 3, "--prompt", "a b", "--prompt", "c", "--json", "-")
    assert answer.code == 0, answer.err
    assert "no tokenizer.json in" in answer.err and "tokens are shown as numbers" in answer.err
    assert [len(tokens) for tokens in answer.json["tokens"]] == [3, 3]
