"""`attach(check=True)`: whoever reads a layer's weight outside that layer's call is named; without it he reads NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_on_ranks, try_on_ranks
from small_modules import Stack, attach, equal, in_order, inputs, outputs, random_stack
from torch import Tensor

import graphshard
from graphshard.comm.group import Group

Call = Callable[[Stack, Tensor], Tensor]


def around(before: Any = None, after: Any = None, inside: Any = None) -> Call:
    """A forward that does something before, inside (by a hook on layer 1's norm) or after the layers."""

    def call(stack: Stack, x: Tensor) -> Tensor:
        handle = None
        if inside is not None:
            handle = stack.layers[1].norm.register_forward_hook(  # type: ignore[union-attr]
                lambda *_: (inside(stack, x), None)[1]
            )
        try:
            x = x if before is None else before(stack, x)
            x = in_order([0, 1, 2])(stack, x)
            return x if after is None else after(stack, x)
        finally:
            if handle is not None:
                handle.remove()

    return call


def weight(stack: Stack, layer: int, name: str = "up") -> Any:
    return getattr(stack.layers[layer], name).weight


LATE: dict[str, tuple[Call, str]] = {
    "before the layers": (
        around(before=lambda m, x: x + weight(m, 2).sum()),
        r"weight layers.2.up.weight is read by aten.sum.default .* \(0 of 3 layer calls done, layer 0 is due\)",
    ),
    "after the layers": (
        around(after=lambda m, x: x * weight(m, 0, "norm")),
        r"weight layers.0.norm.weight is read by aten.mul.Tensor .* \(3 of 3 layer calls done, end\(\) is due\)",
    ),
    "inside another layer, ahead": (
        around(inside=lambda m, x: torch.nn.functional.linear(x, weight(m, 2))),
        r"weight layers.2.up.weight is read by aten\.\w+.default .* \(1 of 3 layer calls done, layer 1 is open\)",
    ),
    "inside another layer, behind": (
        around(inside=lambda m, x: weight(m, 0).t() @ weight(m, 0)),
        r"weight layers.0.up.weight is read by aten.mm.default .* layer 1 is open",
    ),
    "through a view of a view": (
        around(after=lambda m, x: x + weight(m, 1, "down").t().reshape(-1)[:1].expand(1, 1)),
        r"weight layers.1.down.weight is read by aten",
    ),
    "a layer's forward called by name": (
        lambda m, x: m.layers[1].forward(m.layers[0](x)),
        r"weight layers.1.norm.weight is read by aten.native_layer_norm.default .* layer 1 is due",
    ),
}


@pytest.mark.parametrize("where", LATE)
def test_a_late_read_names_weight_op_and_the_layer_due(where: str) -> None:
    call, expected = LATE[where]
    module = random_stack()
    with attach(module, check=True):
        for _ in range(2):
            module.call = call
            with pytest.raises(graphshard.ProgramError, match=expected + r".* read it inside its own layer's call, or"):
                outputs(module)
            module.call = None
            assert equal(outputs(module), outputs(random_stack())), "the next forward is right"


def late_reads(group: Group) -> None:
    module = random_stack()
    module.call = LATE["after the layers"][0]
    with attach(module, group, check=True):
        outputs(module)


def test_each_rank_names_its_own_late_read() -> None:
    errors = [outcome.error for outcome in try_on_ranks(late_reads, 2)]
    assert len(errors) == 2 and all("layers.0.norm.weight is read by aten.mul.Tensor" in error for error in errors)


def test_a_view_kept_from_another_time_is_named_by_all_that_lie_there() -> None:
    """Nobody saw it being made: what is known is its address."""
    module = random_stack()
    with attach(module, check=True, prefetch_depth=0):
        kept = weight(module, 1)[3]
        module.call = around(after=lambda m, x: x + kept)
        expected = r"weight layers.0.up.weight or layers.1.up.weight or layers.2.up.weight is read by aten.add.Tensor"
        with pytest.raises(graphshard.ProgramError, match=expected):
            outputs(module)


def test_writing_to_a_sharded_weight_is_refused_even_inside_its_layer() -> None:
    module = random_stack()
    with attach(module, check=True):
        module.call = around(inside=lambda m, x: weight(m, 1).mul_(2))
        with pytest.raises(
            graphshard.ProgramError, match=r"layers.1.up.weight is written by aten.mul_.Tensor: .* read only"
        ):
            outputs(module)


def test_shapes_dtypes_and_views_may_be_looked_at_any_time() -> None:
    def look(stack: Stack, x: Tensor) -> Tensor:
        w = weight(stack, 1)
        views = [w.t(), w[0], w.view(-1), w.detach(), w.unsqueeze(0).expand(2, -1, -1)]
        made = [torch.zeros_like(w), torch.empty_like(w), w.new_zeros(3), w.new_empty(2), torch.ones_like(w.t())]
        assert all(view.shape for view in views) and all(tensor.shape for tensor in made)
        return x.to(w.dtype).to(w.device)

    module = random_stack()
    with attach(module, check=True):
        module.call = around(look, look, look)
        assert equal(outputs(module), outputs(random_stack()))


def test_resident_weights_may_be_read_any_time() -> None:
    reference = random_stack()
    reference.call = around(after=lambda m, x: x + weight(m, 0, "norm"))
    module = random_stack()
    module.call = reference.call
    with attach(module, check=True, min_shard_bytes=1024):
        assert equal(outputs(module), outputs(reference))


def test_reading_between_two_calls_of_one_residency_is_right() -> None:
    """A layer called twice in a row keeps its slot meanwhile."""
    order = [0, 0, 1, 2]

    def call(stack: Stack, x: Tensor) -> Tensor:
        x = stack.layers[0](x) * weight(stack, 0, "norm")
        return in_order(order[1:])(stack, x)

    module, reference = random_stack(), random_stack()
    module.call = reference.call = call
    with attach(module, check=True, order=order):
        assert equal(outputs(module), outputs(reference))


def poisoned(group: Group) -> list[bool]:
    """What a reader sees whom nobody watches, after each forward."""
    module = random_stack()
    seen = []
    with attach(module, group, check=True):
        for x in inputs():
            with torch.no_grad():
                module(x)
            seen += [bool(p.isnan().all()) for name, p in module.named_parameters() if name.startswith("layers.")]
    return seen


def test_slots_are_poisoned_once_nobody_may_read_them() -> None:
    assert all(all(seen) and len(seen) == 45 for seen in run_on_ranks(poisoned, 2))


@pytest.mark.parametrize("head", ["inside", "outside", "tail"])
def test_a_check_changes_no_bits_whatever_the_head_policy(head: str) -> None:
    for num_layers in (1, 3):
        module, reference = random_stack(num_layers), random_stack(num_layers)
        with attach(module, check=True, head=head) as attached:
            for _ in range(3):
                assert equal(outputs(module), outputs(reference))
                assert torch.equal(attached.whole_weight("layers.0.up.weight"), weight(reference, 0))


def test_no_watch_is_left_behind_by_exceptions() -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    module = random_stack()
    with attach(module, check=True):
        for call in (LATE["before the layers"][0], in_order([2]), lambda m, x: 1 / 0):
            module.call = call
            with pytest.raises((graphshard.ProgramError, ZeroDivisionError)):
                outputs(module)
            assert not _get_current_dispatch_mode_stack()
