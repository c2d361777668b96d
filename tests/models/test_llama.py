from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from executor import Executor, greedy
from torch import Tensor

import graphshard
from graphshard.comm.group import LocalGroup
from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.models.config import LlamaConfig, RopeConfig, llama_config
from graphshard.models.llama import Llama, random_llama

SMALL = LlamaConfig(
    vocab_size=101, hidden_size=48, intermediate_size=80, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=8
)
LLAMA3 = RopeConfig(500.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)
VARIANTS = {
    "plain": SMALL,
    "tied": replace(SMALL, tied_embeddings=True),
    "biases": replace(SMALL, attention_bias=True, mlp_bias=True),
    "multi-head": replace(SMALL, num_kv_heads=6),
    "multi-query, wide heads": replace(SMALL, num_kv_heads=1, head_dim=16),
    "theta": replace(SMALL, rope=RopeConfig(theta=500_000.0)),
    "linear rope": replace(SMALL, rope=RopeConfig(kind="linear", factor=4.0)),
    "llama3 rope": replace(SMALL, rope=LLAMA3),
}


def _reference(config: LlamaConfig, weights: dict[str, Tensor]) -> torch.nn.Module:
    """The same model in `transformers`."""
    transformers = pytest.importorskip("transformers")
    rope: dict[str, object] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope["factor"] = config.rope.factor
    if config.rope.kind == "llama3":
        rope["low_freq_factor"] = config.rope.low_freq_factor
        rope["high_freq_factor"] = config.rope.high_freq_factor
        rope["original_max_position_embeddings"] = config.rope.original_max_positions
    settings = transformers.LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.norm_eps, rope_parameters=rope,
        tie_word_embeddings=config.tied_embeddings, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias,
        max_position_embeddings=config.max_positions,
    )  # fmt: skip
    assert llama_config(settings.to_dict()) == replace(config, eos_token_ids=(2,))
    module = transformers.LlamaForCausalLM(settings).eval()
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    return module


def _tokens(batch: int, t: int, seed: int = 3) -> Tensor:
    return torch.randint(SMALL.vocab_size, (batch, t), generator=torch.Generator().manual_seed(seed))


def _positions(batch: int, begin: int, t: int) -> Tensor:
    return torch.arange(begin, begin + t).expand(batch, t)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_logits_and_greedy_tokens_are_those_of_transformers(config: LlamaConfig) -> None:
    model, weights = random_llama(config, seed=1, cache_length=24)
    executor, module = Executor(model, weights), _reference(config, weights)
    tokens = greedy(executor, _tokens(3, 5), 15)
    with torch.inference_mode():
        want = module(input_ids=tokens).logits
    assert torch.equal(want[:, 4:-1].argmax(-1), tokens[:, 5:])
    again = Executor(model, weights)
    got = torch.cat([again.step(tokens[:, at : at + 1], _positions(3, at, 1)) for at in range(tokens.shape[1])], dim=1)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)  # sums of another order


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("merged", [False, True])
def test_tapes_are_bit_equal_to_segments(config: LlamaConfig, merged: bool) -> None:
    model, weights = random_llama(config, seed=2, cache_length=24)
    plain, taped = Executor(model, weights), Executor(model, weights)
    for batch, t in ((4, 1), (2, 3), (1, 1)):
        shape, state = StepShape(batch, t), taped.state(StepShape(batch, t))
        tapes = taped.tapes(shape, merged)
        for at in range(0, 9, t):
            tokens, positions = _tokens(batch, t, seed=at), _positions(batch, at, t)
            state.buffer("tokens").copy_(tokens), state.buffer("positions").copy_(positions)
            for tape in tapes:
                tape()
            want = plain.step(tokens, positions)
            assert torch.equal(state.buffer("logits").view(torch.int32), want.view(torch.int32))
        assert all(torch.equal(plain.caches[name], cache) for name, cache in taped.caches.items())


def test_several_tokens_a_step_equal_one_at_a_time() -> None:
    model, weights = random_llama(SMALL, seed=4, cache_length=24)
    one, many = Executor(model, weights), Executor(model, weights)
    tokens = _tokens(2, 12)
    want = torch.cat([one.step(tokens[:, at : at + 1], _positions(2, at, 1)) for at in range(12)], dim=1)
    got = torch.cat([many.step(tokens[:, at : at + 4], _positions(2, at, 4)) for at in (0, 4, 8)], dim=1)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)  # gemms of another m
    for name, cache in one.caches.items():
        torch.testing.assert_close(many.caches[name], cache, atol=2e-5, rtol=1e-5)


def test_a_prompt_padded_on_the_left_by_its_first_token_is_right() -> None:
    model, weights = random_llama(SMALL, seed=5, cache_length=24)
    short = _tokens(1, 3)
    padded = torch.cat((short[:, :1].expand(1, 4), short), dim=1)
    positions = torch.tensor([[0, 0, 0, 0, 0, 1, 2]])
    got = Executor(model, weights).step(padded, positions)[:, 4:]
    want = Executor(model, weights).step(short, _positions(1, 0, 3))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-5)  # gemms of another m


def test_rows_and_what_lies_beyond_a_position_have_no_influence() -> None:
    model, weights = random_llama(SMALL, seed=6, cache_length=24)
    clean, dirty = Executor(model, weights), Executor(model, weights)
    tokens = _tokens(4, 6)
    for at in range(6):
        for name, cache in dirty.caches.items():
            cache[:, :, at:] = 1e4 if name.endswith("key_cache") else -1e4
        positions = _positions(4, at, 1).clone()
        want = clean.step(tokens[:, at : at + 1], positions)
        noisy, elsewhere = tokens[:, at : at + 1].clone(), positions.clone()
        noisy[2:], elsewhere[2:] = 0, 20
        assert torch.equal(dirty.step(noisy, elsewhere)[:2], want[:2])


def test_what_the_spec_declares() -> None:
    model, weights = random_llama(replace(SMALL, tied_embeddings=True))
    spec = model.spec()
    assert [segment.path for segment in spec.segments[:8]] == [
        "embed", *(f"layers.0.{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down"))
    ]  # fmt: skip
    assert len(spec.segments) == 3 * 7 + 2
    assert spec.segments[-1].reads == ("model.norm.weight", "model.embed_tokens.weight")
    assert [weight.name for weight in spec.weights] == list(dict.fromkeys(n for s in spec.segments for n in s.reads))
    assert {weight.name: tuple(weights[weight.name].shape) for weight in spec.weights} == {
        weight.name: weight.shape for weight in spec.weights
    }
    one, four = model.buffers(StepShape(1)), model.buffers(StepShape(4))
    assert [buffer.name for buffer in one] == [buffer.name for buffer in four]
    assert [b for b in one if b.role == "cache"] == [b for b in four if b.role == "cache"]
    assert {b.name: b.shape for b in four if b.role in ("input", "output")} == {
        "tokens": (4, 1), "positions": (4, 1), "logits": (4, 1, 101)
    }  # fmt: skip


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, second, other = (random_llama(SMALL, seed)[1] for seed in (0, 0, 1))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_bfloat16_runs() -> None:
    model, weights = random_llama(replace(SMALL, dtype="bfloat16"), seed=1)
    wide = {name: weight.float() for name, weight in weights.items()}
    got = Executor(model, weights).step(_tokens(2, 3), _positions(2, 0, 3))
    want = Executor(random_llama(SMALL)[0], wide).step(_tokens(2, 3), _positions(2, 0, 3))
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.float(), want, atol=0.1, rtol=0.1)  # 8 bits of mantissa, 3 layers


def test_shapes_and_lengths_that_do_not_fit_are_refused() -> None:
    model = Llama(SMALL, max_batch_size=2, cache_length=8)
    with pytest.raises(SpecError, match="step shape 4x1 does not fit 2 sequences of 8 positions"):
        model.buffers(StepShape(4))
    with pytest.raises(SpecError, match="step shape 1x9 does not fit"):
        model.buffers(StepShape(1, 9))
    with pytest.raises(SpecError, match="cache_length 4096 is not within 1 and the model's 2048"):
        Llama(SMALL, 1, 4096)
    with pytest.raises(SpecError, match="max_batch_size is 0"):
        Llama(SMALL, 0)


@pytest.mark.parametrize("variant", ["plain", "tied"])
def test_a_checkpoint_may_hold_the_tied_head_twice_and_frequencies(variant: str) -> None:
    model, weights = random_llama(VARIANTS[variant])
    beside = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    if variant == "tied":
        beside["lm_head.weight"] = weights["model.embed_tokens.weight"]
    made = {"checkpoint": weights | beside, "capture_sizes": ()}
    graphshard.compile(model, LocalGroup(1)[0], ignore=model.redundant_tensors, **made).close()
    with pytest.raises(graphshard.LoadError, match=r"a tied head that is stored as well") as raised:
        graphshard.compile(model, LocalGroup(1)[0], **made)
    assert all(f"not asked for  {name}" in str(raised.value) for name in beside)
    if variant == "plain":  # a head of its own is a weight, and no extra
        del weights["lm_head.weight"]
        with pytest.raises(graphshard.LoadError, match=r"missing  lm_head\.weight"):
            graphshard.compile(model, LocalGroup(1)[0], checkpoint=weights, ignore=model.redundant_tensors)
