"""Steps whose tokens are taken back, held bit for bit to a model without a ring that never took those tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from executor import Executor
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_k3_reference import SIZES, SMALL
from torch import Tensor

from graphshard.core.errors import SpecError
from graphshard.core.sequence import COMMIT_FOLD
from graphshard.core.specs import StepShape
from graphshard.models.kimi_k3.config import KimiK3ModelConfig
from graphshard.models.kimi_k3.folder import (
    joined_tensors,
    load_kimi_k3,
    random_kimi_k3,
    random_pieces,
    save_kimi_k3,
)
from graphshard.models.kimi_k3.model import KimiK3
from graphshard.models.open import open_model
from graphshard.runtime.model import folds_of
from graphshard.runtime.record import record

RING = 4
BATCH = 3
LENGTH = 16
"""Positions of the caches."""
ALL_KINDS = replace(SMALL, sizes=replace(SIZES, num_layers=3, mla_layers=frozenset({1})))
GARBAGE = (float("nan"), float("inf"), -1e30)


@dataclass(frozen=True)
class Step:
    """Of each row: how many of the step's tokens are tokens, how many of them are accepted, and whether it is new."""

    batch: int
    tokens_per_sequence: int
    used: tuple[int, ...]
    accepted: tuple[int, ...]
    is_new: tuple[bool, ...]


class Pair:
    """A model with a ring beside one without, and what both have committed."""

    def __init__(
        self, config: KimiK3ModelConfig, seed: int = 0, *, fused: bool = True, is_compact: bool = False
    ) -> None:
        pieces = random_pieces(config, seed)
        ring = KimiK3(config, BATCH, LENGTH, fused=fused, ring=RING, compact_ring=is_compact)
        plain = KimiK3(config, BATCH, LENGTH, fused=fused)
        self.ring, self.plain = (Executor(model, joined_tensors(model, pieces)) for model in (ring, plain))
        for executor in (self.ring, self.plain):
            executor.state(StepShape(BATCH))
        self.lengths = [0] * BATCH
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, step: Step) -> None:
        """Both models take the step; logits, states and caches are compared."""
        shape = StepShape(step.batch, step.tokens_per_sequence)
        tokens = torch.randint(SIZES.vocab, (step.batch, shape.tokens_per_sequence), generator=self._generator)
        places = torch.arange(shape.tokens_per_sequence)
        begins, used = self._begin(step)
        positions = (begins + places).where(places < used, -1)
        accepted = torch.tensor(step.accepted[: step.batch])
        before = {name: cache.clone() for name, cache in self.plain.caches.items()}
        untouched = self._checkpoint()
        want, got = self.plain.step(tokens, positions), self.ring.step(tokens, positions)
        assert torch.equal(got[places < used], want[places < used])
        assert all(same_bits(now, untouched[name]) for name, now in self._checkpoint().items()), (
            "a step changed a state"
        )
        for name, cache in self.plain.caches.items():
            cache.copy_(before[name])
        self.plain.step(tokens, positions.where(places < accepted[:, None], -1))
        self._spoil(accepted, shape.tokens_per_sequence)
        self.ring.fold(shape, accepted)
        self._commit(step, [int(n) for n in torch.minimum(accepted, used[:, 0])])
        self._compare(untouched, accepted)

    def _begin(self, step: Step) -> tuple[Tensor, Tensor]:
        for row in range(step.batch):
            if step.is_new[row] or self.lengths[row] + step.tokens_per_sequence > LENGTH:
                self.lengths[row] = 0
        return torch.tensor(self.lengths[: step.batch])[:, None], torch.tensor(step.used[: step.batch])[:, None]

    def _commit(self, step: Step, counts: list[int]) -> None:
        for row, count in enumerate(counts):
            self.lengths[row] += count

    def _checkpoint(self) -> dict[str, Tensor]:
        names = self.plain.caches
        return {name: self.ring.caches[name].clone() for name in names if not name.endswith("latent_cache")}

    def _spoil(self, accepted: Tensor, t: int) -> None:
        """What the ring holds of tokens that do not count may be anything."""
        for name, cache in self.ring.caches.items():
            if "ring_kda" in name:
                for row, count in enumerate(accepted.tolist()):
                    cache[row, count:t] = GARBAGE[(row + count) % len(GARBAGE)]
                cache[:, t:] = float("nan")

    def _compare(self, untouched: dict[str, Tensor], accepted: Tensor) -> None:
        for name, want in self.plain.caches.items():
            got = self.ring.caches[name]
            if name.endswith("latent_cache"):
                for row, length in enumerate(self.lengths):
                    assert same_bits(got[row, :length], want[row, :length]), name
                continue
            assert bool(got.isfinite().all()) or name.endswith("conv_tail"), name
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)), name
            for row in range(BATCH):
                if row >= len(accepted) or accepted[row] == 0:
                    assert same_bits(got[row], untouched[name][row]), f"{name} of a row that accepts nothing"


def same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    batch, t = draw(st.integers(1, BATCH)), draw(st.integers(1, RING))
    used = draw(st.tuples(*[st.integers(0, t)] * BATCH))
    accepted = draw(st.tuples(*[st.integers(0, t)] * BATCH))
    return Step(batch, t, used, accepted, draw(st.tuples(*[st.sampled_from((False, False, False, True))] * BATCH)))


@st.composite
def configs(draw: st.DrawFn) -> KimiK3ModelConfig:
    num_layers = draw(st.integers(1, 4))
    sizes = replace(
        SIZES,
        num_layers=num_layers,
        mla_layers=draw(st.frozensets(st.integers(0, num_layers - 1))),
        kda_heads=draw(st.integers(1, 3)),
        kda_head=draw(st.sampled_from((8, 20, 32))),
        conv_taps=draw(st.integers(2, 5)),
        top_k=draw(st.integers(1, 3)),
    )
    return replace(
        SMALL,
        sizes=sizes,
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        gate_lower_bound=draw(st.sampled_from((-5.0, -0.5))),
    )


@settings(max_examples=25, deadline=None)
@given(configs(), st.booleans(), st.booleans(), st.lists(steps(), min_size=1, max_size=6), st.integers(0, 99))
def test_what_is_accepted_gives_the_bits_of_a_model_without_a_ring(
    config: KimiK3ModelConfig, fused: bool, is_compact: bool, schedule: list[Step], seed: int
) -> None:
    pair = Pair(config, seed, fused=fused, is_compact=is_compact)
    for step in schedule:
        pair.step(step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_every_number_of_accepted_tokens(fused: bool, is_compact: bool, dtype: str) -> None:
    """0 to all of each length of step, of one row and of several, on sequences that go on."""
    pair = Pair(replace(ALL_KINDS, dtype=dtype), 5, fused=fused, is_compact=is_compact)
    for batch, t in ((3, 4), (2, 4), (3, 3), (1, 2), (3, 1), (2, 1)):
        for count in range(t + 1):
            accepted = tuple((count + row) % (t + 1) for row in range(BATCH))
            pair.step(Step(batch, t, (t,) * BATCH, accepted, (False,) * BATCH))


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("left", [float("nan"), float("inf"), -0.0])
def test_nothing_accepted_changes_no_bit_whatever_stood_there(left: float, is_compact: bool) -> None:
    """Negative zeros, and states that are not finite; in a step that begins anew, or has no token at all."""
    pair = Pair(ALL_KINDS, 1, is_compact=is_compact)
    for positions in ([[0, 1]], [[5, 6]], [[-1, -1]], [[0, 0]]):
        for name, cache in pair.ring.caches.items():
            if not name.endswith(("latent_cache", "ring_positions")):
                cache.fill_(left)
        before = {name: cache.clone() for name, cache in pair.ring.caches.items() if "ring" not in name}
        pair.ring.step(torch.tensor([[3, 4]]), torch.tensor(positions))
        pair.ring.fold(StepShape(1, 2), torch.tensor([0]))
        for name, value in before.items():
            if not name.endswith("latent_cache"):
                assert same_bits(pair.ring.caches[name], value), name


@pytest.mark.parametrize("left", [1e4, float("nan")])
def test_an_accepted_token_at_position_0_begins_anew(left: float) -> None:
    pair = Pair(ALL_KINDS, 2)
    for executor in (pair.ring, pair.plain):
        for name, cache in executor.caches.items():
            if name.endswith(("kda_state", "conv_tail")):
                cache.fill_(left)
    new = (True,) * BATCH
    pair.step(Step(3, 3, (3, 3, 3), (1, 2, 3), new))
    pair.step(Step(3, 2, (2, 2, 2), (2, 1, 2), (False,) * BATCH))


def test_a_record_counts_once() -> None:
    pair = Pair(ALL_KINDS, 3)
    pair.step(Step(2, 3, (3,) * BATCH, (2, 3, 0), (False,) * BATCH))
    before = pair._checkpoint()
    pair.ring.fold(StepShape(2, 3), torch.tensor([3, 3]))
    assert all(same_bits(cache, before[name]) for name, cache in pair._checkpoint().items())


def test_more_accepted_than_the_step_had_are_all_of_it() -> None:
    pair = Pair(ALL_KINDS, 4)
    pair.step(Step(3, 2, (2, 1, 0), (9, 9, 9), (False,) * BATCH))


@pytest.mark.parametrize(("dtype", "is_compact"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_tapes_are_bit_equal_to_segments(dtype: str, is_compact: bool) -> None:
    """Step and fold recorded once, and replayed with other tokens and other numbers of accepted ones."""
    config = replace(ALL_KINDS, dtype=dtype)
    eager, taped = (Pair(config, 6, is_compact=is_compact).ring for _ in range(2))
    shape, generator = StepShape(2, 3), torch.Generator().manual_seed(8)
    state, tapes = taped.state(shape), taped.tapes(shape)
    fold = record(lambda: state.run(folds_of(taped.model)), taped.arena)
    for cache in taped.caches.values():
        cache.zero_()
    lengths = torch.zeros(2, dtype=torch.int64)
    for accepted in ([3, 1], [0, 2], [2, 0], [1, 3]):
        tokens = torch.randint(SIZES.vocab, (2, 3), generator=generator)
        positions = lengths[:, None] + torch.arange(3)
        want = eager.step(tokens, positions)
        eager.fold(shape, torch.tensor(accepted))
        state.buffer("tokens").copy_(tokens), state.buffer("positions").copy_(positions)
        state.buffer("accepted").copy_(torch.tensor(accepted))
        for tape in tapes:
            tape()
        assert torch.equal(state.buffer("logits"), want)
        fold()
        assert all(same_bits(cache, eager.caches[name]) for name, cache in taped.caches.items())
        lengths += torch.tensor(accepted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_taps_are_the_residual_after_whole_layers(dtype: str) -> None:
    config = replace(SMALL, dtype=dtype)
    pieces = random_pieces(config, 7)
    model = KimiK3(config, 2, LENGTH, taps=(2, 0, 3))
    executor, shape = Executor(model, joined_tensors(model, pieces)), StepShape(2, 3)
    plain = KimiK3(config, 2, LENGTH)
    other = Executor(plain, joined_tensors(plain, pieces))
    tokens, positions = torch.arange(6).view(2, 3), torch.arange(3).expand(2, 3)
    logits = executor.step(tokens, positions)
    state = other.state(shape)
    state.buffer("tokens").copy_(tokens), state.buffer("positions").copy_(positions)
    after: dict[int | None, Tensor] = {}
    for segment in plain.segments:
        with torch.inference_mode():
            state.run([segment])
        after[segment.spec.layer] = state.buffer("hidden").clone().view(2, 3, -1)
    assert same_bits(logits, state.buffer("logits"))
    taps = executor.state(shape).buffer("taps")
    assert same_bits(taps, torch.cat([after[layer] for layer in (2, 0, 3)], dim=-1))


def test_buffers_beside_those_of_a_plain_model() -> None:
    plain, ring, compact = (
        {b.name: (b.shape, b.dtype, b.role) for b in KimiK3(SMALL, 4, **choices).buffers(StepShape(2, 3))}
        for choices in ({}, {"ring": 5, "taps": (1, 3)}, {"ring": 5, "compact_ring": True})
    )
    assert {name: spec for name, spec in ring.items() if name not in plain} == {
        "accepted": ((2,), "int64", "input"),
        "taps": ((2, 3, 2 * SIZES.hidden), "float32", "output"),
        "ring_positions": ((4, 5), "int64", "cache"),
        **{f"layers.{layer}.ring_kda_qkv": ((4, 5, 192), "float32", "cache") for layer in (0, 1, 3)},
        **{f"layers.{layer}.ring_kda_f": ((4, 5, 64), "float32", "cache") for layer in (0, 1, 3)},
        **{f"layers.{layer}.ring_kda_f_a_b": ((4, 5, 2), "float32", "cache") for layer in (0, 1, 3)},
    }
    assert compact["layers.0.ring_kda_f_a_b"] == ((4, 5, 34), "float32", "cache")
    assert not [name for name in compact if name.endswith("ring_kda_f")]
    assert plain.items() <= ring.items()


def test_the_fold_reads_small_weights_alone_unless_the_ring_is_compact() -> None:
    assert KimiK3(SMALL, 1).folds == () and KimiK3(SMALL, 1).spec().folds == ()
    for is_compact in (False, True):
        model = KimiK3(SMALL, 1, ring=2, compact_ring=is_compact)
        (fold,) = model.folds
        assert model.spec().folds == (fold.spec,)
        assert (fold.spec.path, fold.spec.layer) == ("commit_fold", None)
        small = ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", "A_log", "dt_bias"]
        names = [*small, "f_b_proj.weight"] if is_compact else small
        assert sorted(fold.spec.reads) == sorted(
            f"model.layers.{layer}.self_attn.{name}" for layer in (0, 1, 3) for name in names
        )
        assert model.spec().segments == KimiK3(SMALL, 1).spec().segments


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(SpecError, match="step shape 1x5 has 5 tokens a sequence, and the ring holds 4; make the model"):
        KimiK3(SMALL, 1, ring=4).buffers(StepShape(1, 5))
    with pytest.raises(SpecError, match="ring is -1"):
        KimiK3(SMALL, 1, ring=-1)
    with pytest.raises(SpecError, match=r"ring is 0, with compact_ring=True: .* cannot be compact"):
        KimiK3(SMALL, 1, compact_ring=True)
    for taps in ((4,), (-1,), (1, 1)):
        with pytest.raises(SpecError, match=r"taps \[.*\] are not layers from 0 to 3, each once"):
            KimiK3(SMALL, 1, taps=taps)


def test_a_folder_opens_with_a_ring_and_taps(tmp_path: Path) -> None:
    """And is the same folder: weights and the recipes for them know of neither."""
    pieces = random_pieces(SMALL)
    save_kimi_k3(tmp_path, SMALL, pieces)
    plain, ring = open_model(tmp_path, 2, 8), open_model(tmp_path, 2, 8, ring=3, compact_ring=True, taps=[1])
    assert isinstance(ring.model, KimiK3)
    assert (ring.model.ring, ring.model.taps, [fold.spec.name for fold in ring.model.folds]) == (3, (1,), [COMMIT_FOLD])
    assert ring.recipes == plain.recipes
    assert ring.model.spec().weights == plain.model.spec().weights
    model = load_kimi_k3(tmp_path, 2, 8, fused=False, ring=3)
    assert model.ring == 3
    given = joined_tensors(model, pieces)
    assert all(
        torch.equal(tensor, given[name]) for name, tensor in random_kimi_k3(SMALL, fused=False, ring=2)[1].items()
    )
