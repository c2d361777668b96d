"""Kimi K3 on disk: as published or fused, read into either variant, and what says no."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from executor import Executor
from kimi_k3_reference import SIZES, SMALL
from ranks import run_on_ranks
from safetensors.torch import load_file
from torch import Tensor

import graphshard
from graphshard.comm.group import Group
from graphshard.core.errors import LoadError, SpecError
from graphshard.load.checkpoint import Checkpoint
from graphshard.load.recipe_runs import byte_runs
from graphshard.models.config import LlamaConfig
from graphshard.models.kimi_k3.config import load_kimi_k3_config
from graphshard.models.kimi_k3.folder import joined_tensors, load_kimi_k3, random_kimi_k3, random_pieces, save_kimi_k3
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.models.kimi_k3.recipes import kimi_k3_recipes
from graphshard.models.open import load_config, open_model, open_spec_model

CONFIG = replace(SMALL, dtype="bfloat16", sizes=replace(SIZES, num_layers=3))


def _made(model: KimiK3, folder: Path) -> dict[str, Tensor]:
    """The weights of `model`, made of the bytes of `folder`'s tensors and of nothing else."""
    checkpoint = Checkpoint(folder)
    recipes = kimi_k3_recipes(model, checkpoint.entries)
    weights = {}
    for spec in model.spec().weights:
        data = bytearray(spec.num_bytes)
        recipe = recipes.get(spec.name)
        if recipe is None:
            checkpoint.read_into(spec.name, 0, memoryview(data))
        else:
            runs = byte_runs(recipe, checkpoint.entries)
            assert runs is not None, f"{spec.name} is no mapping of bytes"
            for run in runs:
                part = memoryview(data)[run.begin : run.begin + run.num_bytes]
                checkpoint.read_into(run.tensor, run.tensor_begin, part)
        weights[spec.name] = torch.frombuffer(data, dtype=getattr(torch, spec.dtype)).view(spec.shape)
    return weights


@pytest.mark.parametrize("saved_fused", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_either_variant_is_made_of_either_form(saved_fused: bool, fused: bool, tmp_path: Path) -> None:
    pieces = random_pieces(CONFIG, seed=3)
    save_kimi_k3(tmp_path, CONFIG, pieces, fused=saved_fused)
    model = load_kimi_k3(tmp_path, 2, fused=fused)
    assert model.config == CONFIG and model.is_fused == fused
    want = joined_tensors(KimiK3(CONFIG, 1, fused=fused), pieces)
    got = _made(model, tmp_path)
    assert list(got) == list(want)
    assert all(torch.equal(got[name], want[name]) for name in want)
    _, same = random_kimi_k3(CONFIG, seed=3, fused=fused)
    assert all(torch.equal(got[name], same[name]) for name in want)


def test_a_single_expert_is_a_stack_of_one(tmp_path: Path) -> None:
    config = replace(CONFIG, sizes=replace(CONFIG.sizes, experts=1, top_k=1))
    _, want = random_kimi_k3(config, seed=3)
    save_kimi_k3(tmp_path, config, want)
    assert run_on_ranks(loaded, 1, str(tmp_path), True)[0][1] == {"bytes"}
    got = _made(load_kimi_k3(tmp_path, 1), tmp_path)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_weights_in_any_form_are_saved_alike(tmp_path: Path) -> None:
    forms = [random_pieces(CONFIG), *(random_kimi_k3(CONFIG, fused=fused)[1] for fused in (True, False))]
    for number, tensors in enumerate(forms):
        save_kimi_k3(tmp_path / str(number), CONFIG, tensors)
    files = [(tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(3)]
    assert files[0] == files[1] == files[2]


def loaded(group: Group, folder: str, fused: bool) -> tuple[list[float], set[str], int, int]:
    """Logits of one step; then the ways of the weights, bytes kept, bytes read."""
    model = load_kimi_k3(folder, 2, fused=fused)
    recipes = kimi_k3_recipes(model, Checkpoint(Path(folder)).entries)
    with graphshard.compile(model, group, checkpoint=folder, recipes=recipes, units="layer") as runtime:
        step = runtime.graph(1)
        step.inputs["tokens"].fill_(7)
        step.inputs["positions"].zero_()
        step.replay()
        told = runtime.load_report
        return (
            step.outputs["logits"].flatten().tolist(),
            {weight.way for weight in told.weights},
            told.kept_bytes,
            told.bytes_read,
        )


@pytest.mark.parametrize(("saved_fused", "fused"), [(False, True), (True, False)])
def test_each_rank_reads_the_bytes_that_it_keeps_and_no_others(saved_fused: bool, fused: bool, tmp_path: Path) -> None:
    pieces = random_pieces(CONFIG, seed=3)
    save_kimi_k3(tmp_path, CONFIG, pieces, fused=saved_fused)
    executor = Executor(*random_kimi_k3(CONFIG, seed=3, fused=fused))
    want = executor.step(torch.tensor([[7]]), torch.tensor([[0]])).flatten().tolist()
    for logits, ways, kept_bytes, bytes_read in run_on_ranks(loaded, 2, str(tmp_path), fused):
        assert logits == want
        assert ways == {"bytes"}
        assert bytes_read == kept_bytes


def test_what_is_written_is_what_others_read(tmp_path: Path) -> None:
    """Published names, one tensor for each expert's matrix; and one tensor for each weight when fused."""
    pieces = random_pieces(CONFIG)
    save_kimi_k3(tmp_path / "published", CONFIG, pieces)
    save_kimi_k3(tmp_path / "fused", CONFIG, pieces, fused=True)
    published = load_file(tmp_path / "published" / "model.safetensors")
    assert published.keys() == pieces.keys()
    assert all(torch.equal(published[name], piece) for name, piece in pieces.items())
    moe = "model.layers.1.block_sparse_moe."
    assert tuple(published[f"{moe}experts.5.w3.weight"].shape) == (32, 32)
    assert published["model.layers.1.self_attn.k_conv1d.weight"].dtype is torch.float32
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    assert set(fused) == {weight.name for weight in KimiK3(CONFIG, 1).spec().weights}
    assert torch.equal(fused[f"{moe}experts.w13_weight"][5, 32:], published[f"{moe}experts.5.w3.weight"])


def test_tensors_of_another_model_are_refused(tmp_path: Path) -> None:
    pieces = random_pieces(CONFIG)
    lacking = {name: piece for name, piece in pieces.items() if name != "lm_head.weight"}
    with pytest.raises(SpecError, match=r"1 names are not both among the tensors and in .*, lm_head.weight for one"):
        save_kimi_k3(tmp_path, CONFIG, lacking)
    names = set(pieces) - {"model.layers.0.self_attn.k_proj.weight", "model.norm.weight"}
    with pytest.raises(LoadError, match=r"2 weights of kimi_k3 are neither among .* model.layers.0.self_attn.qkv_proj"):
        kimi_k3_recipes(KimiK3(CONFIG, 1), names)


@pytest.mark.parametrize("form", ["published", "fused"])
@pytest.mark.parametrize("change", [Tensor.float, Tensor.t, lambda weight: torch.cat([weight, weight])])
def test_a_tensor_of_another_kind_is_not_saved_as_if_it_were_the_models(
    form: str, change: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    tensors = random_pieces(CONFIG) if form == "published" else random_kimi_k3(CONFIG)[1]
    name = f"model.layers.0.self_attn.{'f_b' if form == 'published' else 'qkv'}_proj.weight"
    tensors[name] = change(tensors[name])
    with pytest.raises(SpecError, match=rf"^{name} is b?float\d+\[\d+, \d+\], this kimi_k3 has bfloat16\["):
        save_kimi_k3(tmp_path, CONFIG, tensors)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_opened_by_its_config(tmp_path: Path) -> None:
    save_kimi_k3(tmp_path, CONFIG, random_pieces(CONFIG))
    opened = open_model(tmp_path, 2, 32)
    assert isinstance(opened.model, KimiK3) and (opened.model.max_batch_size, opened.model.cache_length) == (2, 32)
    assert opened.recipes == kimi_k3_recipes(opened.model, Checkpoint(tmp_path).entries)
    assert open_spec_model(tmp_path).spec() == KimiK3(CONFIG, 1).spec()
    config = load_config(tmp_path)
    assert config == load_kimi_k3_config(tmp_path)
    assert (config.vocab_size, config.max_positions) == (SIZES.vocab, 4096)


def test_a_llama_is_opened_too_and_others_are_named(tmp_path: Path) -> None:
    values = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert isinstance(load_config(tmp_path), LlamaConfig)
    model, recipes, _ = open_model(tmp_path, 1, 8)
    assert model.spec().name == "llama" and recipes == {}
    assert open_spec_model(tmp_path).spec() == model.spec()
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": "gpt2"}))
    with pytest.raises(SpecError, match="model_type is 'gpt2'; supported are llama, mistral and kimi_k3"):
        load_config(tmp_path)
