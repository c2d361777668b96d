"""Steps driven by a module's hooks: order, exceptions, threads, autograd; what detaching and closing leave."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from census import no_growth
from fault_tools import InThread
from small_modules import WIDTH, Stack, attach, equal, in_order, inputs, outputs, random_stack, twin
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard

# --- memory and the end ---


def test_a_weights_own_memory_is_given_back() -> None:
    module = random_stack()
    arrays = [np.random.default_rng(0).random((2 * WIDTH, WIDTH), dtype=np.float32) for _ in module.layers]
    for layer, array in zip(module.layers, arrays, strict=True):
        layer.up.weight = nn.Parameter(torch.from_numpy(array))  # type: ignore[union-attr, assignment]
    alive = [weakref.ref(array) for array in arrays]
    del arrays, array
    assert all(ref() is not None for ref in alive)
    with attach(module):
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3


def test_detach_restores_whole_private_parameters_and_leaves_no_trace() -> None:
    with no_growth():
        module = random_stack()
        keys = {inner: set(inner.__dict__) for inner in module.modules()}
        hooks = [len(inner._forward_hooks) + len(inner._forward_pre_hooks) for inner in module.modules()]
        before = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
        attached = attach(module, check=True)
        expected = outputs(module)
        slots = {
            slot.data_ptr() // 2**16 for slot in (attached.runtime.memory.slot(0), attached.runtime.memory.slot(1))
        }
        attached.detach()
        attached.detach()
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, before[name]) and parameter.requires_grad
            assert parameter.untyped_storage().nbytes() == parameter.numel() * 4, "private"
            assert parameter.data_ptr() // 2**16 not in slots
        assert {inner: set(inner.__dict__) for inner in module.modules()} == keys
        assert [len(i._forward_hooks) + len(i._forward_pre_hooks) for i in module.modules()] == hooks
        assert not any(i._state_dict_hooks or i._load_state_dict_pre_hooks for i in module.modules())
        assert equal(outputs(module), expected) and equal(outputs(twin(module)), expected)
        del attached, module, keys


def test_a_closed_attachment_refuses_to_run_or_to_detach() -> None:
    module = random_stack()
    attached = attach(module)
    attached.close()
    attached.close()
    for use in (lambda: outputs(module), module.state_dict, attached.detach):
        with pytest.raises(graphshard.ProgramError, match="this runtime is closed"):
            use()


def test_the_module_keeps_its_attachment_alive() -> None:
    module = random_stack()
    expected = outputs(module)
    attach(module)
    gc.collect()
    assert equal(outputs(module), expected)


def test_the_report_says_what_is_where_and_why() -> None:
    module = random_stack()
    with attach(module, min_shard_bytes=1024) as attached:
        report = attached.report()
    assert report.startswith("Stack: 3 layers of layers, 3 calls a step, over 1 ranks\nsharded 108.0 KiB in 3 units: ")
    assert "  layers.0.up.weight    unit 0     18.0 KiB read by layers.0.forward\n" in report
    assert "  layers.0.norm.bias    resident   192 B is below min_shard_bytes 1.0 KiB\n" in report


# --- steps ---


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            in_order([0, 2, 1]),
            r"layer 2 \(layers.2\) was called with 1 of 3 layer calls done, layer 1 is due: .* order=",
        ),
        (in_order([0, 1, 2, 2]), r"layer 2 \(layers.2\) was called with 3 of 3 layer calls done, end\(\) is due; name"),
        (in_order([0, 1]), r"Stack ended with 2 of 3 layer calls done, layer 2 is due: layer 2 .* was not called"),
        (in_order([]), r"Stack ended with 0 of 3 layer calls done, layer 0 is due"),
        (lambda m, x: [layer.forward(x) for layer in m.layers][-1], r"Stack ended .* layer 0 .* was not called as a"),
    ],
)
def test_wrong_orders_are_named_and_the_next_forward_is_right(call: Any, expected: str) -> None:
    module = random_stack()
    right = outputs(module)
    with attach(module):
        for _ in range(2):
            module.call = call
            with pytest.raises(graphshard.ProgramError, match=expected):
                outputs(module)
            module.call = None
            assert equal(outputs(module), right)


@pytest.mark.parametrize("where", ["in a layer", "between layers", "after layers"])
def test_an_exception_in_a_forward_gives_its_step_up(where: str) -> None:
    module = random_stack()
    right = outputs(module)

    def call(stack: Stack, x: Tensor) -> Tensor:
        x = stack.layers[0](x)
        if where == "between layers":
            raise ZeroDivisionError
        x = stack.layers[1](x[:, :-1] if where == "in a layer" else x)
        stack.layers[2](x)
        raise ZeroDivisionError

    with attach(module, check=True):
        module.call = call
        with pytest.raises((ZeroDivisionError, RuntimeError)):
            outputs(module)
        module.call = None
        assert equal(InThread(lambda: outputs(module)).result(), right), "no other thread is locked out"
        assert equal(outputs(module), right)


def test_an_interrupted_forward_is_given_up_by_the_next_one() -> None:
    """KeyboardInterrupt runs no hook at all."""
    module = random_stack()
    right = outputs(module)

    def interrupted(stack: Stack, x: Tensor) -> Tensor:
        stack.layers[0](x)
        raise KeyboardInterrupt

    with attach(module):
        module.call = interrupted
        with pytest.raises(KeyboardInterrupt):
            outputs(module)
        module.call = None
        assert equal(outputs(module), right)


def test_threads_share_one_module() -> None:
    module = random_stack()
    right = outputs(module)
    with attach(module):
        threads = [InThread(lambda: [equal(outputs(module), right) for _ in range(10)]) for _ in range(4)]
        assert [thread.result() for thread in threads] == [[True] * 10] * 4


def test_autograd_is_refused_with_the_way_out() -> None:
    module = random_stack()
    x = inputs()[0]
    with torch.inference_mode():
        right = module(x)
    with attach(module):
        with pytest.raises(graphshard.ProgramError, match=r"layer 0 .* autograd on .*inference_mode\(\) or no_grad"):
            module(x)
        with torch.inference_mode():
            assert torch.equal(module(x), right)
        module.requires_grad_(False)
        assert torch.equal(module(x), right)
        with pytest.raises(graphshard.ProgramError, match="autograd on"):
            module(x.clone().requires_grad_())


@dataclass
class Box:
    """What torch's pytrees do not open."""

    x: Tensor


def test_gradients_that_arguments_do_not_show_are_refused() -> None:
    def call(stack: Stack, x: Tensor) -> Tensor:
        for layer in stack.layers:
            x = layer(Box(x))
        return x

    module = random_stack().requires_grad_(False)
    module.call = call
    for layer in module.layers:
        layer.forward = partial(unboxed, layer.forward)  # type: ignore[assignment]
    x = inputs()[0]
    with attach(module):
        right = module(x)
        with pytest.raises(graphshard.ProgramError, match=r"layer 0 .* gave a result that requires a gradient"):
            module(x.clone().requires_grad_())
        assert torch.equal(module(x), right)


def unboxed(forward: Callable[[Tensor], Tensor], box: Box) -> Tensor:
    """The layer's own forward."""
    return forward(box.x)


def test_a_layer_that_turns_autograd_on_itself_is_refused() -> None:
    module = random_stack()
    module.layers[1].forward = torch.enable_grad()(module.layers[1].forward)  # type: ignore[assignment, arg-type]
    with (
        attach(module),
        torch.no_grad(),
        pytest.raises(graphshard.ProgramError, match=r"layer 1 .* gave a result that"),
    ):
        module(inputs()[0])


def test_a_loop_with_autograd_on_is_refused() -> None:
    with attach(random_stack(), own_loop=True) as attached:
        with pytest.raises(
            graphshard.ProgramError, match=r"autograd on and parameters .*inference_mode\(\) or no_grad"
        ):
            attached.begin_step()
        with torch.no_grad():
            attached.begin_step().abort()


def test_make_fx_is_refused() -> None:
    module = random_stack()
    with attach(module), torch.no_grad(), pytest.raises(graphshard.ProgramError, match="make_fx would keep the bytes"):
        make_fx(module)(inputs()[0])


def test_attaching_and_detaching_in_inference_mode() -> None:
    module = random_stack()
    right = outputs(module)
    with torch.inference_mode():
        attached = attach(module)
        assert equal([module(x) for x in inputs()], right)
    assert equal(outputs(module), right)
    with torch.inference_mode():
        attached.detach()
    assert not any(parameter.is_inference() for parameter in module.parameters())
    sum(y.sum() for y in map(module, inputs())).backward()  # type: ignore[union-attr]


def test_a_loop_of_ones_own_over_a_module() -> None:
    module = random_stack()
    right = outputs(module)
    with attach(module, own_loop=True) as attached, torch.no_grad():
        for x, y in zip(inputs(), right, strict=True):
            with attached.begin_step() as step:
                x = module.embed(x)
                for i, layer in enumerate(module.layers):
                    step.before_layer(i)
                    x = layer(x)
                    step.after_layer(i)
            assert torch.equal(module.head(x), y)


def test_whoever_mixes_hooks_and_loops_is_told() -> None:
    module = random_stack()
    with attach(module) as attached:
        with pytest.raises(
            graphshard.ProgramError, match="its steps: attach it with own_loop=True, or call the module"
        ):
            attached.begin_step()
        with pytest.raises(
            graphshard.ProgramError, match=r"this runtime drives a module: call the module, or begin_step"
        ):
            attached.runtime.run(1)
        right = outputs(module)
        with contextlib.suppress(graphshard.ProgramError):
            attached.runtime.capture()
        assert equal(outputs(module), right)


def test_check_needs_the_hooks() -> None:
    with pytest.raises(graphshard.SpecError, match=r"check=True sees reads through the module's hooks"):
        attach(random_stack(), own_loop=True, check=True)
