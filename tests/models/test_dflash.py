from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dflash_reference import SMALL, reference_logits
from executor import Executor
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.models.dflash.config import DFlashConfig, load_dflash_config
from graphshard.models.dflash.folder import random_dflash, save_dflash
from graphshard.models.dflash.model import DFlash

LENGTH = 24
VARIANTS = {
    "plain": SMALL,
    "tied, one tap": replace(SMALL, tied_embeddings=True, taps=(1,)),
    "multi-head, wide heads": replace(SMALL, num_kv_heads=4, head_dim=16, num_layers=1),
    "theta, eps": replace(SMALL, rope_theta=50.0, norm_eps=1e-2),
}


def _executor(config: DFlashConfig = SMALL, max_batch_size: int = 3) -> Executor:
    model, weights = random_dflash(config, 4, max_batch_size, LENGTH)
    return Executor(model, weights | _borrowed(config))


def _borrowed(config: DFlashConfig) -> dict[str, Tensor]:
    generator, size = torch.Generator().manual_seed(9), (config.vocab_size, config.hidden_size)
    names = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not config.tied_embeddings)
    return {name: (torch.randn(size, generator=generator) / 4).to(getattr(torch, config.dtype)) for name in names}


def _all_weights(config: DFlashConfig) -> dict[str, Tensor]:
    return random_dflash(config, 4)[1] | _borrowed(config)


def _features(config: DFlashConfig, *size: int, seed: int = 5) -> Tensor:
    values = torch.randn((*size, config.features_width), generator=torch.Generator().manual_seed(seed))
    return values.to(getattr(torch, config.dtype))


def _step(executor: Executor, tokens: Tensor, begins: list[int], features: Tensor, where: Tensor) -> Tensor:
    state = executor.state(StepShape(*tokens.shape))
    state.buffer("features").copy_(features)
    state.buffer("feature_positions").copy_(where)
    return executor.step(tokens, torch.tensor(begins)[:, None] + torch.arange(tokens.shape[1]))


def _tokens(batch: int, t: int, seed: int = 3) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, t), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_the_formulas(config: DFlashConfig) -> None:
    """Three rows take 0 to 4 tokens a step; features come in any order and as late as they may."""
    executor, weights = _executor(config), _all_weights(config)
    counts = [[0, 2, 4], [1, 4, 0], [3, 0, 2], [4, 4, 1]]
    begins, known = [0, 0, 0], [{}, {}, {}]  # type: list[int], list[dict[int, Tensor]]
    for number, taken in enumerate(counts):
        tokens, features = _tokens(3, 4, number), _features(config, 3, 4, seed=number)
        where = torch.full((3, 4), -1)
        for row, count in enumerate(taken):
            for j in range(count):
                place = (3 - j) if number % 2 else j
                where[row, place] = begins[row] + j
                known[row][begins[row] + j] = features[row, place]
            begins[row] += count
        got = _step(executor, tokens, begins, features, where)
        for row in range(3):
            want = reference_logits(config, weights, tokens[row].tolist(), begins[row], known[row])
            # float32 against float64: 3 layers of sums of at most 64 values of order 1
            torch.testing.assert_close(got[row].double(), want, atol=2e-5, rtol=2e-5)


def test_a_block_is_not_causal_and_sees_nothing_behind_it() -> None:
    executor, none = _executor(), torch.full((3, 4), -1)
    tokens, features = _tokens(3, 4), _features(SMALL, 3, 4)
    first = _step(executor, tokens, [2, 2, 2], features, torch.tensor([[0, 1, -1, -1]] * 3))
    for cache in executor.caches.values():
        cache[:, :, 6:-1], cache[:, :, -1] = 1e4, float("nan")  # behind the block, and what nobody reads
    assert torch.equal(_step(executor, tokens, [2, 2, 2], features, none), first)
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % SMALL.vocab_size
    assert bool((_step(executor, other, [2, 2, 2], features, none)[:, 0] != first[:, 0]).any())


def test_features_that_are_none_change_nothing() -> None:
    clean, dirty = _executor(), _executor()
    where = torch.tensor([[0, 1, -1, -1], [-1, 0, -1, 1], [-1, -1, -1, -1]])
    features, tokens, begins = _features(SMALL, 3, 4), _tokens(3, 4), [2, 2, 0]
    noisy = features.masked_fill((where < 0)[..., None], float("nan"))
    for _ in range(2):
        want = _step(clean, tokens, begins, features, where)
        got = _step(dirty, tokens, begins, noisy, where.masked_fill(where < 0, -7))
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))
        for name, cache in clean.caches.items():
            assert torch.equal(dirty.caches[name][:, :, :-1], cache[:, :, :-1])


def test_rows_do_not_see_each_other() -> None:
    together, changed = _executor(), _executor()
    where, features, tokens = torch.tensor([[0, 1, 2, -1]] * 3), _features(SMALL, 3, 4), _tokens(3, 4)
    want = _step(together, tokens, [3, 3, 3], features, where)
    features[1], tokens[1], where[1] = 7.0, 1, -1
    got = _step(changed, tokens, [3, 9, 3], features, where)
    assert torch.equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("merged", [False, True])
def test_tapes_are_bit_equal_to_segments(dtype: str, merged: bool) -> None:
    config = replace(SMALL, dtype=dtype)
    plain, taped = _executor(config), _executor(config)
    for batch, t in ((3, 4), (2, 2)):
        state = taped.state(StepShape(batch, t))
        tapes = taped.tapes(StepShape(batch, t), merged)
        for begin in range(0, 6, 2):
            tokens, features = _tokens(batch, t, begin), _features(config, batch, t, seed=begin)
            where = torch.full((batch, t), -1)
            where[:, :2] = torch.tensor([begin - 2, begin - 1]) if begin else -1
            want = _step(plain, tokens, [begin] * batch, features, where)
            state.buffer("tokens").copy_(tokens), state.buffer("features").copy_(features)
            state.buffer("positions").copy_(torch.arange(begin, begin + t).expand(batch, t))
            state.buffer("feature_positions").copy_(where)
            for tape in tapes:
                tape()
            assert torch.equal(state.buffer("logits"), want)
        for name, cache in plain.caches.items():
            assert torch.equal(taped.caches[name][:, :, :-1], cache[:, :, :-1])


def test_what_the_spec_declares() -> None:
    spec = DFlash(SMALL, 2, LENGTH).spec()
    assert spec.borrowed == ("model.embed_tokens.weight", "lm_head.weight")
    assert [segment.path for segment in spec.segments[:4]] == [
        "embed",
        "layers.0.fc",
        "layers.0.q_proj",
        "layers.0.k_proj",
    ]
    assert len(spec.segments) == 3 * 7 + 3
    tied = DFlash(replace(SMALL, tied_embeddings=True), 2, LENGTH).spec()
    assert tied.borrowed == ("model.embed_tokens.weight",) and tied.segments[-1].reads[-1] == tied.borrowed[0]
    assert {weight.name for weight in spec.owned} == set(random_dflash(SMALL)[1])


def test_shapes_and_lengths_that_do_not_fit_are_refused() -> None:
    model = DFlash(SMALL, 2, 8)
    with pytest.raises(SpecError, match="step shape 3x4 does not fit 2 sequences of 8 positions"):
        model.buffers(StepShape(3, 4))
    with pytest.raises(SpecError, match="step shape 1x9 does not fit"):
        model.buffers(StepShape(1, 9))
    with pytest.raises(SpecError, match="cache_length 4096 is not within 1 and the model's 2048"):
        DFlash(SMALL, 1, 4096)
    with pytest.raises(SpecError, match="max_batch_size is 0"):
        DFlash(SMALL, 0)


def test_a_folder_reads_back(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    config = replace(SMALL, dtype="bfloat16", rope_theta=77.0, norm_eps=1e-5, max_positions=99, tied_embeddings=True)
    weights = random_dflash(config, 3)[1]
    save_dflash(tmp_path / "draft", config, weights)
    assert load_dflash_config(tmp_path / "draft") == config
    read = load_file(tmp_path / "draft" / "model.safetensors")
    assert set(read) == set(weights) and all(torch.equal(read[name], weights[name]) for name in weights)
    with pytest.raises(SpecError, match=r"1 names are not both among the tensors .* lm_head\.weight"):
        save_dflash(tmp_path, config, weights | {"lm_head.weight": weights["norm.weight"]})
    with pytest.raises(SpecError, match=r"norm.weight is float32\[32\], this draft has bfloat16\[32\]"):
        save_dflash(tmp_path, config, weights | {"norm.weight": weights["norm.weight"].float()})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is set"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"layer_types": ["sliding_attention"]}, "only full_attention"),
        ({"tie_word_embeddings": 1}, "not true or false"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id is None"),
        ({"dflash_config": {"mask_token_id": 61, "target_layer_ids": [0]}}, "mask_token 61 is outside the vocabulary"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, r"taps \(\) are not one or more layers"),
        ({"block_size": 1}, "block is 1"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 is not even"),
        ({"dtype": "int8"}, "dtype is int8"),
        ({"rope_theta": -1.0}, "rope_theta is -1"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_configs_that_are_not_supported_are_refused(tmp_path: Path, change: dict[str, object], error: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL.values() | change))
    with pytest.raises(SpecError, match=error):
        load_dflash_config(tmp_path)


def test_theta_may_stand_where_newer_configs_have_it(tmp_path: Path) -> None:
    values = {key: value for key, value in SMALL.values().items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(values | {"rope_parameters": {"rope_theta": 123.0}}))
    assert load_dflash_config(tmp_path) == replace(SMALL, rope_theta=123.0)
