from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graphshard.core.errors import DeviceError
from graphshard.runtime.arena import ALIGNMENT_BYTES, Arena
from graphshard.runtime.record import Tape, record

MODES = [torch.no_grad, torch.inference_mode]


def _recorded(run: Callable[[], None], mode: Callable[[], object] = torch.no_grad) -> Tape:
    def in_mode() -> None:
        with mode():
            run()

    return record(in_mode, Arena())


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


class Step:
    """A small step with most of what a model does: gemms, a norm, attention over a cache, calls with two results."""

    def __init__(self, batch: int = 2) -> None:
        generator = torch.Generator().manual_seed(7)
        self.batch = batch
        self.x = torch.randn(batch, 4, 16, generator=generator)
        self.position = torch.zeros(batch, dtype=torch.long)
        self.weight = torch.randn(16, 16, generator=generator)
        self.bias = torch.randn(16, generator=generator)
        self.cache = torch.zeros(batch, 4, 8, 16)
        self.out = torch.zeros(batch, 4, 16)

    def run(self) -> None:
        h = F.rms_norm(self.x, (16,), self.bias, 1e-5)
        k = F.linear(h, self.weight, self.bias)
        self.cache.transpose(1, 2)[torch.arange(self.batch), self.position] = k
        mask = torch.arange(8) <= self.position[:, None]
        mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))[:, None, None]
        y = F.scaled_dot_product_attention(h[:, :, None], self.cache, self.cache, attn_mask=mask).squeeze(2)
        values, indices = y.topk(2)
        gathered = y.gather(-1, indices) + values.softmax(-1)
        scores = torch.cat([torch.where(y > 0, y, -1.0), gathered * torch.tensor(0.5)], dim=-1)
        self.out.copy_(F.silu(scores[..., :16], inplace=True) + scores.sum(-1, keepdim=True))

    def new_inputs(self, seed: int) -> None:
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed)))
        self.position.fill_(seed % 8)


@pytest.mark.parametrize("mode", MODES)
def test_replays_equal_the_segment_on_new_inputs(mode: Callable[[], object]) -> None:
    taped, plain = Step(), Step()
    tape = _recorded(taped.run, mode)
    plain.run()
    for seed in range(12):
        taped.new_inputs(seed), plain.new_inputs(seed)
        tape()
        with torch.no_grad():
            plain.run()
        assert _same_bits(taped.out, plain.out)
        assert _same_bits(taped.cache, plain.cache)
    assert tape.num_views > 0
    assert not any(name.startswith(("aten.view", "aten.t.", "aten.transpose", "aten.slice")) for name in tape.names)


def test_replays_on_another_thread_leave_no_autograd_graph() -> None:
    step = Step()
    step.weight.requires_grad_()
    tape = _recorded(step.run)
    want = step.out.clone()
    step.cache.zero_(), step.out.zero_()
    thread = threading.Thread(target=tape)
    thread.start()
    thread.join()
    assert _same_bits(step.out, want)
    assert step.out.grad_fn is None and not step.out.requires_grad
    with torch.no_grad():
        step.out.add_(1)  # a buffer stays an ordinary tensor: writable in any mode


def test_a_replay_allocates_no_results() -> None:
    x, weight, out = torch.randn(4, 64), torch.randn(64, 64), torch.zeros(4, 64)

    def run() -> None:
        out.copy_(F.silu(F.linear(x, weight)).mul(2.0).add(x))

    tape = _recorded(run)
    with torch.profiler.profile(profile_memory=True) as profile:
        tape()
    assert len(tape) == 5 and out.nbytes == 1024
    assert all(event.cpu_memory_usage < 64 for event in profile.events())  # a Python number becomes a small tensor


OPS: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x @ y,
    lambda x, y: torch.addmm(y, x, y, beta=0.5, alpha=2.0),
    lambda x, y: torch.baddbmm(y[None], x[None], y[None]),
    lambda x, y: torch.einsum("ij,kj->ik", x, y),
    lambda x, y: F.linear(x, y, y[0]),
    lambda x, y: F.layer_norm(x, (8,), y[0], y[1]),
    lambda x, y: F.rms_norm(x, (8,), y[0], 1e-6),
    lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None], is_causal=True),
    lambda x, y: x.softmax(-1) + y.log_softmax(0),
    lambda x, y: F.gelu(x, approximate="tanh") * torch.sigmoid(y),
    lambda x, y: torch.where(x > y, x, 0.0).clamp(min=-0.5),
    lambda x, y: x.div(y, rounding_mode="floor") + x.pow(3) + 2.0**y - x.sub(y, alpha=2),
    lambda x, y: 3 - x.abs().add(1).log() + y.square().sum(0, keepdim=True).rsqrt(),
    lambda x, y: x.mean() + y.mean(0) + x.amax(1, keepdim=True) + y.std(1, keepdim=True),
    lambda x, y: x.max(1)[0] + y.topk(2, dim=0)[0][1] + x.sort(1)[0][0] + y.cumsum(0)[-1],
    lambda x, y: x.gather(1, y.argsort(1)) + x.index_select(0, y.argmax(1)) + x[y.argmin(1)],
    lambda x, y: torch.cat((x, y.t()), 1)[:, 4:12] + torch.stack((x, y)).sum(0) + x.roll(1, 0) + y.flip(1),
    lambda x, y: x.t().contiguous() + y.tril() + x.repeat(1, 2)[:, :8] + y.expand(2, 8, 8).reshape(2, -1)[1].view(8, 8),
    lambda x, y: x.double().mul(2).float() + y.bfloat16().float() + x.masked_fill(y > 0, 1.0) + x.gt(y) + (x > 0).int(),
    lambda x, y: torch.arange(8.0) + torch.full((8,), 2.0) + torch.zeros(8, 8) + torch.ones_like(x) + x.new_tensor(3.0),
    lambda x, y: F.conv1d(x[None], y[:, :, None]) + F.embedding(y.argmax(1), x),
    lambda x, y: x.scatter(1, y.argsort(1), 2 * y).index_add(0, x.argmax(1), y).index_put((y.argmax(0),), x),
    lambda x, y: torch.complex(x, y).abs() + torch.view_as_real(torch.polar(x.abs(), y))[..., 0],
    lambda x, y: x.clone().t_().squeeze_().mul_(y).add_(1).div_(2) + y.clone().fill_(3).copy_(x[0]).neg_(),
    lambda x, y: torch.lerp(x, y, 0.3) + torch.addcmul(x, x, y, value=2) + torch.fmod(x, 2) + torch.maximum(x, y),
    lambda x, y: (
        sum(x.split(2)[1:], torch.zeros(2, 8)) + sum(y.unbind()) + torch.meshgrid(x[0], y[0], indexing="ij")[0][:2]
    ),
]


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("op", OPS, ids=range(len(OPS)))
def test_what_was_captured_on_other_bytes_gives_the_right_bits(
    op: Callable[[Tensor, Tensor], Tensor], value: float
) -> None:
    """At capture a slot may hold anything: what is chosen then has to be right for all values."""
    x, y = torch.full((8, 8), value), torch.full((8, 8), value)
    out = torch.zeros_like(op(x, y))
    tape = _recorded(lambda: out.copy_(op(x, y)))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x.normal_(generator=generator), y.normal_(generator=generator)
        tape()
        assert _same_bits(out, op(x, y))


def test_a_python_number_is_frozen() -> None:
    state = {"step": 1, "scale": 2.0}
    x, out = torch.ones(3), torch.zeros(3)

    def run() -> None:
        out.copy_(x * state["scale"] + state["step"])

    tape = _recorded(run)
    state.update(step=100, scale=0.0)
    tape()
    assert out.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_whether_a_reshape_copies_is_decided_at_capture(contiguous: bool, mode: Callable[[], object]) -> None:
    base = torch.arange(12.0).view(3, 4)
    x, out = (base if contiguous else base.t()), torch.zeros(12)
    tape = _recorded(lambda: out.copy_(x.reshape(-1).add_(1)), mode)  # writes through exactly if reshape is a view
    start = x.clone()
    tape()
    assert torch.equal(x, start + 1 if contiguous else start)
    assert torch.equal(out, (start + 1).reshape(-1))


@pytest.mark.parametrize("alias", [Tensor.contiguous, Tensor.float, lambda x: x.to(torch.float32), Tensor.detach])
@pytest.mark.parametrize("mode", MODES)
def test_an_unannotated_alias_writes_through(alias: Callable[[Tensor], Tensor], mode: Callable[[], object]) -> None:
    x = torch.zeros(4)
    tape = _recorded(lambda: alias(x).add_(1), mode)
    tape(), tape()
    assert x.tolist() == [3.0] * 4


def _index_put(cache: Tensor, position: Tensor, value: Tensor) -> None:
    cache[torch.arange(cache.shape[0]), position] = value


def _scatter(cache: Tensor, position: Tensor, value: Tensor) -> None:
    cache.scatter_(1, position[:, None, None].expand(-1, 1, value.shape[-1]), value[:, None])


def _index_copy(cache: Tensor, position: Tensor, value: Tensor) -> None:
    cache.index_copy_(1, position[:1], value[:, None])


@pytest.mark.parametrize("write", [_index_put, _scatter, _index_copy])
def test_cache_writes_land_where_the_positions_say_now(write: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    cache, position, value = torch.zeros(2, 8, 3), torch.zeros(2, dtype=torch.long), torch.ones(2, 3)
    tape = _recorded(lambda: write(cache, position, value * 2))
    cache.zero_()
    want = cache.clone()
    for at in (5, 1, 7):
        position.fill_(at), value.fill_(at)
        tape()
        want[:, at] = 2 * at
        assert torch.equal(cache, want)


def test_a_fixed_slice_is_written_in_place() -> None:
    cache, value = torch.zeros(2, 8), torch.ones(2, 2)
    tape = _recorded(lambda: cache[:, 2:4].copy_(value))
    value.fill_(9), tape()
    assert cache.sum() == 36 and torch.equal(cache[:, 2:4], value)


def test_d10_a_tape_keeps_what_only_it_refers_to() -> None:
    x, out = torch.ones(4), torch.zeros(4)

    def build() -> Tape:
        scale, bias = torch.full((4,), 3.0), torch.full((4,), 1.0)
        return _recorded(lambda: out.copy_(torch.addcmul(bias, x, scale)))

    tape = build()
    gc.collect()
    junk = [torch.full((4,), float("nan")) for _ in range(1000)]  # takes the memory, had the tape let go of it
    tape()
    assert out.tolist() == [4.0] * 4 and len(junk) == 1000


def test_d9_blocks_live_as_long_as_a_tape() -> None:
    x, out, arena = torch.ones(64), torch.zeros(64), Arena(block_bytes=4096)
    tape = record(lambda: out.copy_(x * 2 + 1), arena)
    del arena
    gc.collect()
    junk = [torch.full((1024,), float("nan")) for _ in range(100)]
    tape()
    assert out.tolist() == [3.0] * 64 and len(junk) == 100


def test_segments_share_the_arena_and_it_grows_only_for_larger_ones() -> None:
    arena = Arena(block_bytes=8192)
    x, out = torch.ones(1024), torch.zeros(1024)
    tapes = [record(lambda: out.copy_(x * 2 + 1), arena) for _ in range(10)]
    assert arena.num_bytes == 8192
    big = torch.ones(10_000)
    record(lambda: big.copy_(big * 2), arena)
    grown = arena.num_bytes
    assert 8192 + 40_000 <= grown <= 8192 + 40_000 + ALIGNMENT_BYTES
    tapes.append(record(lambda: out.copy_(x * 2 + 1), arena))
    record(lambda: big.copy_(big * 2), arena)
    assert arena.num_bytes == grown
    for tape in tapes:
        out.zero_(), tape()
        assert out[0] == 3.0


def test_temporaries_are_aligned() -> None:
    arena = Arena(block_bytes=100)
    for numel in (1, 3, 1000, 0, 17):
        tensor = arena.take((numel,), (1,), torch.float32)
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0 and arena.owns(tensor)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make", [lambda x: x * 2, lambda x: F.linear(x[None], x)[0], lambda x: (x + 1).view(-1)[:2], lambda x: x.topk(1)[1]]
)
def test_a_temporary_that_outlives_its_segment_is_an_error(
    make: Callable[[Tensor], Tensor], mode: Callable[[], object]
) -> None:
    x, kept = torch.ones(3, 3), []
    with pytest.raises(DeviceError, match=r"the result of aten\.\w+\.\w+ outlives its segment.*declare a BufferSpec"):
        _recorded(lambda: kept.append(make(x)), mode)


def test_garbage_in_a_cycle_is_not_a_temporary_that_outlives() -> None:
    x = torch.ones(3)

    def run() -> None:
        cycle: list[object] = [x * 2]
        cycle.append(cycle)

    assert len(_recorded(run)) == 1


def _put_under_mask(x: Tensor) -> None:
    x.clone()[x > 0] = torch.ones(int(x.numel()))


REFUSED: list[tuple[str, Callable[[Tensor], object]]] = [
    ("aten._local_scalar_dense", lambda x: x.sum().item()),
    ("aten._local_scalar_dense", lambda x: float(x[0])),
    ("aten._local_scalar_dense", lambda x: 1 if x[0] > 0 else 2),
    ("aten.allclose", lambda x: torch.allclose(x, x)),
    ("aten.equal", lambda x: torch.equal(x, x)),
    ("aten.nonzero", lambda x: x.nonzero()),
    ("aten.index.Tensor", lambda x: x[x > 0]),
    ("aten.index_put_", _put_under_mask),
    ("aten.masked_select", lambda x: x.masked_select(x > 0)),
    ("aten._unique2", lambda x: x.unique()),
    ("aten.repeat_interleave", lambda x: torch.repeat_interleave(x.long())),
    ("aten.rand", lambda x: torch.rand(3)),
    ("aten.normal_", lambda x: x.clone().normal_()),
    ("aten.multinomial", lambda x: torch.multinomial(x, 1)),
    ("aten.(bernoulli_|native_dropout)", lambda x: F.dropout(x, 0.5)),
    ("aten.lift_fresh", lambda x: x + torch.tensor([1.0, 2.0, 3.0])),
    ("aten.lift_fresh", lambda x: torch.from_numpy(np.zeros(3))),
    ("aten.resize_", lambda x: x.clone().resize_(1)),
    ("aten.mul.out", lambda x: torch.mul(x, x, out=torch.empty(0))),
    ("Tensor.numpy", lambda x: x.numpy()),
    ("Tensor.__array__", lambda x: np.asarray(x)),
    ("Tensor.tolist", lambda x: x.tolist()),
    ("Tensor.cpu", lambda x: x.cpu()),
    ("Tensor.apply_", lambda x: x.apply_(abs)),  # type: ignore[no-untyped-call]
    ("Tensor.map_", lambda x: x.map_(x, max)),
    ("aten.empty", lambda x: x + torch.empty(3, device="meta")),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("op", "call"), REFUSED, ids=[f"{i}-{op}" for i, (op, _) in enumerate(REFUSED)])
def test_refused_with_the_ops_name(op: str, call: Callable[[Tensor], object], mode: Callable[[], object]) -> None:
    x = torch.ones(3)

    def run() -> None:
        with mode():
            call(x)

    with pytest.raises(DeviceError, match=rf"^layers\.3\.q_proj: {op}.*not permitted when stream is capturing \(900\)"):
        record(run, Arena(), "layers.3.q_proj")
    assert record(lambda: x.add_(0), Arena()).names == ("aten.add_.Tensor",)  # nothing stays behind


def test_what_a_cuda_capture_permits_is_permitted() -> None:
    x = torch.arange(4.0)

    def run() -> None:
        x[x > 2] = 0.0  # one value under one mask is a masked_fill
        F.dropout(x, 0.5, training=False)
        x.add_(torch.tensor(1.0)).mul_(torch.arange(4) % 2)

    tape = _recorded(run)
    x.copy_(torch.arange(4.0)), tape()
    assert x.tolist() == [0.0, 2.0, 0.0, 1.0]


def test_a_swallowed_refusal_still_fails_the_capture() -> None:
    x = torch.ones(3)

    def swallow(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            try:
                call()
            except DeviceError:
                x.add_(1)

        return run

    for call in (lambda: x.sum().item(), lambda: x.tolist()):
        with pytest.raises(DeviceError, match="not permitted"):
            _recorded(swallow(call))


def test_a_number_from_python_is_refilled_at_each_replay() -> None:
    x, out = torch.ones(()), torch.zeros(())
    tape = _recorded(lambda: out.copy_(torch.tensor(1.0).add_(x)))
    for _ in range(3):
        tape()
        assert out == 2.0


def test_an_error_of_the_segment_itself_passes_and_leaves_no_mode() -> None:
    with pytest.raises(RuntimeError, match="size of tensor"):
        _recorded(lambda: torch.ones(2) + torch.ones(3))
    assert torch.ones(2).sum().item() == 2.0


def test_recordings_do_not_nest() -> None:
    with pytest.raises(DeviceError, match="may not be nested"):
        record(lambda: record(lambda: None, Arena()) and None, Arena())
