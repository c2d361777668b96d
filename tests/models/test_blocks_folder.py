"""Dual models from folders: their down_proj is turned round on the way, whichever form the checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from block_programs import KIMI_K3
from executor import Executor
from ranks import run_on_ranks
from safetensors.torch import save_file

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import GraphshardError
from graphshard.core.specs import StepShape
from graphshard.models.config import load_llama_config
from graphshard.models.kimi_k3.folder import random_kimi_k3, random_pieces, save_kimi_k3
from graphshard.models.llama import Llama, load_llama, random_llama
from graphshard.models.open import open_model, open_spec_model
from graphshard.runtime.model import blocks_of

TOKENS = torch.tensor([[7, 11, 13]])
POSITIONS = torch.arange(3)[None]
CONFIG = {
    "model_type": "llama", "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "float32",
}  # fmt: skip


def _save_llama(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(random_llama(load_llama_config(folder), seed=3)[1], folder / "model.safetensors")


def opened(group: Group, folder: str, choices: dict[str, Any]) -> tuple[list[float], dict[str, str]]:
    """Logits of one step of the dual model in `folder`, and how its weights were loaded."""
    model, recipes, ignore = open_model(folder, 1, 8, dual=True)
    with graphshard.compile(
        model, group, checkpoint=folder, recipes=recipes, ignore=ignore, capture_sizes=[(1, 3)], **choices
    ) as runtime:
        step = runtime.graph(1, 3)
        step.inputs["tokens"].copy_(TOKENS)
        step.inputs["positions"].copy_(POSITIONS)
        step.replay()
        ways = {weight.name: weight.way for weight in runtime.load_report.weights}
        return runtime.buffers(StepShape(1, 3), "output")["logits"].flatten().tolist(), ways


@pytest.mark.parametrize("choices", [{"plan": "replicated"}, {"units": "layer"}], ids=["replicated", "layer"])
def test_a_llama_is_turned_round(choices: dict[str, Any], tmp_path: Path) -> None:
    _save_llama(tmp_path)
    executor = Executor(*random_llama(load_llama_config(tmp_path), 3, 1, 8, dual=True))
    want = executor.step(TOKENS, POSITIONS).flatten().tolist()
    turned = {name for block in executor.model.spec().blocks for name in block.rows}
    for logits, ways in run_on_ranks(opened, 2, str(tmp_path), choices):
        assert logits == want
        assert {name for name, way in ways.items() if "transpose" in way} == turned and len(turned) == 2


@pytest.mark.parametrize("fused", [True, False])
def test_a_kimi_k3_is_turned_round(fused: bool, tmp_path: Path) -> None:
    save_kimi_k3(tmp_path, KIMI_K3, random_pieces(KIMI_K3, seed=3), fused=fused)
    executor = Executor(*random_kimi_k3(KIMI_K3, 3, 1, 8, dual=True))
    want = executor.step(TOKENS, POSITIONS).flatten().tolist()
    turned = {name for block in executor.model.spec().blocks for name in block.rows}
    for logits, ways in run_on_ranks(opened, 2, str(tmp_path), {"units": "layer"}):
        assert logits == want
        assert {name for name, way in ways.items() if "transpose" in way} == turned and len(turned) == 2


def without_recipes(group: Group, folder: str) -> str:
    with pytest.raises(GraphshardError) as caught:
        graphshard.compile(load_llama(folder, 1, 8, dual=True), group, checkpoint=folder)
    return str(caught.value)


def test_a_dual_model_without_its_recipes_is_refused_by_the_shape(tmp_path: Path) -> None:
    _save_llama(tmp_path)
    for said in run_on_ranks(without_recipes, 2, str(tmp_path)):
        assert "model.layers.0.mlp.down_proj.weight" in said and "[32, 48]" in said and "[48, 32]" in said


def test_models_are_dual_where_it_is_asked_for(tmp_path: Path) -> None:
    _save_llama(tmp_path)
    assert not open_model(tmp_path, 1, 8).recipes and not blocks_of(open_spec_model(tmp_path))
    assert len(blocks_of(open_spec_model(tmp_path, dual=True))) == 2
    plain, dual = (Llama(load_llama_config(tmp_path), 1, dual=is_dual).spec() for is_dual in (False, True))
    assert "blocks" not in plain.text() and plain.digest != dual.digest
    assert [weight.name for weight in plain.weights] == [weight.name for weight in dual.weights]
