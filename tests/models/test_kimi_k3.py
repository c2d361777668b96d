from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from executor import Executor, greedy
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_k3_reference import SIZES, SMALL, reference_logits
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.specs import StepShape
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.folder import joined_tensors, random_kimi_k3, random_pieces
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.models.kimi_k3.situ import situ

CLOSE = {"atol": 3e-5, "rtol": 1e-5}  # float32: gemms of another m, or sums of another order
VARIANTS = {
    "plain": SMALL,
    "all MLA, other widths": replace(
        SMALL, sizes=replace(SIZES, num_layers=2, mla_layers=frozenset({0, 1}), heads=4, qk_nope=32, v_head=48)
    ),
    "all KDA, two taps, one expert": replace(
        SMALL, sizes=replace(SIZES, num_layers=2, mla_layers=frozenset(), kda_heads=3, conv_taps=2, top_k=1)
    ),
    "other numbers": replace(
        SMALL, norm_eps=1e-3, gate_lower_bound=-0.5, situ_beta=0.5, situ_linear_beta=0.7, routed_scale=2.5
    ),
    "two dense layers, all experts": replace(SMALL, sizes=replace(SIZES, dense_layers=2, top_k=6, shared=32)),
}


def _tokens(batch: int, t: int, seed: int = 3) -> Tensor:
    return torch.randint(SIZES.vocab, (batch, t), generator=torch.Generator().manual_seed(seed))


def _positions(batch: int, begin: int, t: int) -> Tensor:
    return torch.arange(begin, begin + t).expand(batch, t)


def _steps(executor: Executor, tokens: Tensor, size: int, begin: int = 0) -> Tensor:
    """Logits of all `tokens`, `size` a step."""
    batch, t = tokens.shape
    starts = range(0, t, size)
    return torch.cat(
        [executor.step(tokens[:, at : at + size], _positions(batch, begin + at, size)) for at in starts], dim=1
    )


def _executor(config: KimiK3ModelConfig = SMALL, seed: int = 1, *, fused: bool = True) -> Executor:
    return Executor(*random_kimi_k3(config, seed, cache_length=24, fused=fused))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_logits_are_those_of_the_formulas(config: KimiK3ModelConfig) -> None:
    pieces = random_pieces(config, seed=1)
    model = KimiK3(config, max_batch_size=2, cache_length=24)
    executor = Executor(model, joined_tensors(model, pieces))
    tokens = greedy(executor, _tokens(2, 3), 5)
    want = reference_logits(config, pieces, tokens)
    assert torch.equal(want[:, 2:-1].argmax(-1), tokens[:, 3:])
    for size in (1, 4):
        got = _steps(executor, tokens, size)  # position 0 begins anew
        torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)  # float32 against float64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_fused_and_unfused_are_equal_bit_for_bit(config: KimiK3ModelConfig, dtype: str) -> None:
    config = replace(config, dtype=dtype)
    one, other = _executor(config, seed=2), _executor(config, seed=2, fused=False)
    assert len(one.model.segments) < len(other.model.segments)
    for size in (1, 3):
        tokens = _tokens(2, 6, seed=size)
        assert torch.equal(_steps(one, tokens, size), _steps(other, tokens, size))
    assert all(torch.equal(cache, other.caches[name]) for name, cache in one.caches.items())


@pytest.mark.parametrize(("dtype", "fused"), [("bfloat16", True), ("float32", False)])
def test_tapes_are_bit_equal_to_segments(dtype: str, fused: bool) -> None:
    config = replace(SMALL, dtype=dtype)
    plain, taped = _executor(config, fused=fused), _executor(config, fused=fused)
    for batch, t in ((4, 1), (2, 3)):
        shape, state = StepShape(batch, t), taped.state(StepShape(batch, t))
        tapes = taped.tapes(shape, merged=fused)
        for at in range(0, 6, t):
            tokens, positions = _tokens(batch, t, seed=at), _positions(batch, at, t).clone()
            positions[-1, -1] = -1
            state.buffer("tokens").copy_(tokens), state.buffer("positions").copy_(positions)
            for tape in tapes:
                tape()
            want = plain.step(tokens, positions)
            assert torch.equal(state.buffer("logits"), want)
        assert all(torch.equal(plain.caches[name], cache) for name, cache in taped.caches.items())


@pytest.mark.parametrize("size", [2, 3, 4, 12])
def test_several_tokens_a_step_equal_one_at_a_time(size: int) -> None:
    one, many = _executor(), _executor()
    tokens = _tokens(2, 12)
    torch.testing.assert_close(_steps(many, tokens, size), _steps(one, tokens, 1), **CLOSE)
    for name, cache in one.caches.items():
        torch.testing.assert_close(many.caches[name], cache, **CLOSE)


def test_what_is_no_token_leaves_states_and_caches_alone() -> None:
    """Sequences that advance by 1, 2, 0 and 3 of a step's three tokens, against each of them alone."""
    together, tokens = _executor(), _tokens(4, 12)
    first = together.step(tokens[:, :2], _positions(4, 0, 2))
    before = {name: cache.clone() for name, cache in together.caches.items()}
    counts = torch.tensor([1, 2, 0, 3])[:, None]
    positions = _positions(4, 2, 3).where(torch.arange(3) < counts, -1)
    got = together.step(tokens[:, 2:5], positions)
    latent_rows = slice(0, 24)  # the position beyond takes what is no token
    for name, cache in together.caches.items():
        is_latent = name.endswith("latent_cache")
        then, now = (x[2, latent_rows] if is_latent else x[2] for x in (before[name], cache))
        assert torch.equal(then, now), f"{name} of a sequence that sat out changed"
    last = together.step(tokens.gather(1, 2 + counts), 2 + counts)
    for row, count in enumerate(counts[:, 0].tolist()):
        alone = _executor()
        mine = tokens[row : row + 1]
        want = _steps(alone, mine[:, : 3 + count], 1)[0]
        torch.testing.assert_close(torch.cat((first[row], got[row, :count], last[row])), want, **CLOSE)


@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=3, max_size=3)), max_size=9))
def test_rows_may_advance_by_any_numbers_of_tokens(schedule: list[tuple[int, list[int]]]) -> None:
    """Steps of 1 to 4 tokens, of which each row uses as many as it likes; what has 12 tokens is followed by another."""
    config = replace(SMALL, sizes=replace(SIZES, num_layers=2, mla_layers=frozenset({1})))
    pieces = random_pieces(config, seed=6)
    model = KimiK3(config, max_batch_size=3, cache_length=12)
    executor, generator = Executor(model, joined_tensors(model, pieces)), torch.Generator().manual_seed(7)
    rows: list[list[tuple[list[int], list[Tensor]]]] = [[([], [])] for _ in range(3)]
    for t, counts in schedule:
        tokens = torch.randint(SIZES.vocab, (3, t), generator=generator)
        positions = torch.full((3, t), -1)
        used = []
        for row, count in enumerate(counts):
            if len(rows[row][-1][0]) == 12:
                rows[row].append(([], []))
            seen = rows[row][-1][0]
            used.append(min(count, t, 12 - len(seen)))
            positions[row, : used[row]] = torch.arange(len(seen), len(seen) + used[row])
        got = executor.step(tokens, positions)
        for row, count in enumerate(used):
            rows[row][-1][0].extend(tokens[row, :count].tolist())
            rows[row][-1][1].extend(got[row, :count])
    for seen, logits in (sequence for row in rows for sequence in row if sequence[0]):
        want = reference_logits(config, pieces, torch.tensor([seen]))[0]
        torch.testing.assert_close(torch.stack(logits).double(), want, atol=1e-4, rtol=1e-4)  # float32, float64


def test_a_first_token_that_is_repeated_on_the_left_is_harmless() -> None:
    short = _tokens(1, 4)
    padded = torch.cat((short[:, :1].expand(1, 3), short), dim=1)
    one, other = _executor(), _executor()
    got = one.step(padded, torch.tensor([[0, 0, 0, 0, 1, 2, 3]]))[:, 3:]
    torch.testing.assert_close(got, other.step(short, _positions(1, 0, 4)), **CLOSE)
    more = _tokens(1, 3, seed=9)
    torch.testing.assert_close(_steps(one, more, 1, begin=4), _steps(other, more, 1, begin=4), **CLOSE)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("left", [1e4, float("nan")])
def test_position_0_begins_anew(size: int, left: float) -> None:
    """Whatever an earlier sequence left in the states of its row, infinities included."""
    used, new = _executor(), _executor()
    tokens = _tokens(2, 6)
    _steps(used, _tokens(2, 6, seed=8), 3)
    for name, cache in used.caches.items():
        if not name.endswith("latent_cache"):
            cache.fill_(left)
    assert torch.equal(_steps(used, tokens, size), _steps(new, tokens, size))


def test_rows_and_what_lies_beyond_a_position_have_no_influence() -> None:
    clean, dirty = _executor(), _executor()
    tokens = _tokens(4, 6)
    for at in range(6):
        for name, cache in dirty.caches.items():
            if name.endswith("latent_cache"):
                cache[:, at:] = -1e4
        positions = _positions(4, at, 1).clone()
        want = clean.step(tokens[:, at : at + 1], positions)
        noisy, elsewhere = tokens[:, at : at + 1].clone(), positions.clone()
        noisy[2:], elsewhere[2:] = 0, torch.tensor([[20], [-1]])
        assert torch.equal(dirty.step(noisy, elsewhere)[:2], want[:2])


def test_bfloat16_is_near_float32() -> None:
    config = replace(SMALL, sizes=replace(SIZES, top_k=SIZES.experts))  # all experts: no rounding chooses others
    small = random_pieces(replace(config, dtype="bfloat16"))
    model, wide_model = KimiK3(replace(config, dtype="bfloat16"), 2), KimiK3(config, 2)
    wide = joined_tensors(wide_model, {name: piece.float() for name, piece in small.items()})
    got = _steps(Executor(model, joined_tensors(model, small)), _tokens(2, 6), 3)
    assert got.dtype is torch.bfloat16
    want = _steps(Executor(wide_model, wide), _tokens(2, 6), 3)
    torch.testing.assert_close(got.float(), want, atol=0.15, rtol=0.1)  # 8 bits of mantissa, 4 layers


def test_situ_is_bounded_and_silu_where_it_is_small() -> None:
    gate, up = torch.linspace(-0.02, 0.02, 9), torch.linspace(-0.1, 0.2, 9)
    small = situ(torch.cat((gate, up)), 4.0, 25.0)
    torch.testing.assert_close(small, torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=1e-3)
    assert float(situ(torch.tensor([1e9, 1e9]), 4.0, 25.0)) == 100.0
    assert float(situ(torch.tensor([1e9, -1e9]), 4.0, 25.0)) == -100.0
    assert float(situ(torch.tensor([-1e9, 1e9]), 4.0, 25.0)) == 0.0


def test_random_weights_depend_on_the_seed_alone() -> None:
    first, other = (random_kimi_k3(SMALL, seed)[1] for seed in (0, 1))
    torch.set_default_dtype(torch.bfloat16)
    try:
        second = random_kimi_k3(SMALL, 0)[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_buffers_of_all_shapes_have_one_name_each_and_caches_one_size() -> None:
    model = KimiK3(SMALL, max_batch_size=4)
    one, four = model.buffers(StepShape(1)), model.buffers(StepShape(4, 2))
    assert [buffer.name for buffer in one] == [buffer.name for buffer in four]
    assert [b for b in one if b.role == "cache"] == [b for b in four if b.role == "cache"]
    assert {b.name: b.shape for b in four if b.role in ("input", "output")} == {
        "tokens": (4, 2), "positions": (4, 2), "logits": (4, 2, SIZES.vocab)
    }  # fmt: skip
    states = {b.name: (b.shape, b.dtype) for b in four if b.role == "cache"}
    assert states["layers.0.kda_state"] == ((4, 2, 32, 32), "float32")
    assert states["layers.0.conv_tail"] == ((4, 3, 192), "float32")
    assert states["layers.2.latent_cache"] == ((4, 65, 48), "float32")


def test_shapes_and_lengths_that_do_not_fit_are_refused() -> None:
    model = KimiK3(SMALL, max_batch_size=2, cache_length=8)
    with pytest.raises(SpecError, match="step shape 4x1 does not fit 2 sequences of 8 positions"):
        model.buffers(StepShape(4))
    with pytest.raises(SpecError, match="step shape 1x9 does not fit"):
        model.buffers(StepShape(1, 9))
    with pytest.raises(SpecError, match="cache_length 5000 is not within 1 and the model's 4096"):
        KimiK3(SMALL, 1, 5000)
    with pytest.raises(SpecError, match="max_batch_size is 0"):
        KimiK3(SMALL, 0)
