"""Updates of attached modules: all that a module has, in place, each weight once, whatever it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_on_ranks
from small_modules import Stack, attach, equal, outputs, random_stack, twin
from torch import Tensor, nn
from update_programs import raised

from graphshard.comm.group import Group
from graphshard.core.errors import GraphshardError
from graphshard.runtime.bind import Hooks


def shifted(module: nn.Module, by: float) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Another version of a module's weights, and what the module gives with them."""
    other = twin(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by)
    return {name: tensor.clone() for name, tensor in other.state_dict().items()}, outputs(other)


@pytest.mark.parametrize(
    "choices", [{}, {"head": "tail", "prefetch_depth": 2}, {"check": True}, {"exclude": ["*.norm*"]}]
)
def test_an_attached_module_is_updated_in_place(choices: dict[str, Any], transport: str) -> None:
    """Inside and outside the layers; parameters are the same objects at the same addresses, `state_dict` is new."""

    def go(group: Group) -> bool:
        module = random_stack(4)
        first = outputs(module)
        versions = [shifted(module, 0.0), shifted(module, 0.1), shifted(module, 0.2)]
        with attach(module, group, transport=transport, **choices) as attached:
            assert equal(outputs(module), first)
            before = {name: (id(one), one.data_ptr()) for name, one in module.named_parameters()}
            table = attached.runtime.buffer_table()
            for number in (1, 2, 0, 0):
                state, expected = versions[number]
                report = attached.update(state)
                assert len(report.updated) == len(state) and report.kept == ()
                assert {name: (id(one), one.data_ptr()) for name, one in module.named_parameters()} == before
                assert attached.runtime.buffer_table() == table
                assert equal(outputs(module), expected)
                assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
            attached.detach()
            return equal(outputs(module), first)

    assert run_on_ranks(go, 2) == [True, True]


def test_a_weight_of_two_names_is_written_once() -> None:
    """Tied in and outside layers: under either name, or both with equal bytes; unlike bytes are refused."""
    module = random_stack(3)
    module.head = module.embed
    module.layers[1].up = module.layers[0].up
    before = outputs(module)
    state, expected = shifted(module, 0.5)
    pairs = {"embed.weight", "head.weight", "layers.0.up.weight", "layers.1.up.weight"}
    assert pairs <= set(state)
    with attach(module) as attached:
        unlike = state | {"head.weight": state["head.weight"] + 1}
        text = raised(lambda: attached.update(unlike))
        assert "embed.weight and head.weight are one weight of the module, and come with unlike bytes" in text
        assert equal(outputs(module), before)
        attached.update(state)
        assert equal(outputs(module), expected)
        second, expected = shifted(random_tied(), 1.0)
        for name in ("embed.weight", "embed.bias", "layers.1.up.weight"):
            del second[name]
        report = attached.update(second)
        assert equal(outputs(module), expected)
        assert report.updated.count("embed.weight") == 1 and "head.weight" not in report.updated


def random_tied() -> Stack:
    module = random_stack(3)
    module.head = module.embed
    module.layers[1].up = module.layers[0].up
    return module


@pytest.mark.parametrize("stage", ["stopped", "writing"])
def test_a_fault_leaves_all_of_a_module_or_none(stage: str) -> None:
    """What lies outside the layers is old where the layers are old; a torn module does not run."""

    def go(group: Group) -> bool:
        faults = [stage] if group.rank == 1 else []

        def hook(here: str) -> None:
            if here in faults:
                faults.remove(here)
                raise ValueError("a fault on purpose")

        module = random_stack()
        first = outputs(module)
        state, expected = shifted(module, 0.3)
        with attach(module, group, hooks=Hooks(update=hook)) as attached:
            text = raised(lambda: attached.update(state))
            if stage == "stopped":
                assert "nothing was written" in text and equal(outputs(module), first)
            else:
                for act in (lambda: outputs(module), module.state_dict, attached.detach):
                    assert "the weights are of no version" in raised(act)
            attached.update(state)
            return equal(outputs(module), expected)

    assert run_on_ranks(go, 2) == [True, True]


def move(module: Stack, name: str) -> Callable[[], None]:
    """Give a parameter other memory; what is returned puts it back."""
    parameter = module.get_parameter(name)
    old = parameter.data
    parameter.data = old.clone()

    def back() -> None:
        parameter.data = old

    return back


@pytest.mark.parametrize("name", ["embed.weight", "layers.1.up.weight"])
def test_a_parameter_that_was_moved_is_found_before_anything_is_written(name: str) -> None:
    def go(group: Group) -> str:
        module = random_stack()
        state, expected = shifted(module, 0.3)
        first = outputs(module)
        with attach(module, group) as attached:
            back = move(module, name) if group.rank == 1 else lambda: None
            text = raised(lambda: attached.update(state))
            assert "nothing was written" in text and name in text
            back()
            assert equal(outputs(module), first)
            attached.update(state)
            assert equal(outputs(module), expected)
            return text

    first, second = run_on_ranks(go, 2)
    assert first == second


@pytest.mark.parametrize("replaced", ["parameter", "module", "buffer"])
def test_what_was_replaced_outside_the_layers_is_found(replaced: str) -> None:
    """It was written where nobody looks any more, and the update said that it had gone well."""

    def go(group: Group) -> str:
        module = random_stack()
        module.register_buffer("scale", torch.ones(3))
        state, expected = shifted(module, 0.3)
        first = outputs(module)
        with attach(module, group) as attached:
            head, weight, scale = module.head, module.head.weight, module.scale
            if group.rank == 1:
                if replaced == "module":
                    module.head = twin(head)
                elif replaced == "buffer":
                    module.scale = scale.clone()
                else:
                    head.weight = nn.Parameter(weight.detach().clone())
            text = raised(lambda: attached.update(state))
            assert "nothing was written" in text and ("scale" if replaced == "buffer" else "head.weight") in text
            module.head, head.weight, module.scale = head, weight, scale
            assert equal(outputs(module), first)
            attached.update(state)
            assert equal(outputs(module), expected)
            return text

    first, second = run_on_ranks(go, 2)
    assert first == second


def test_views_of_slots_are_no_weights() -> None:
    """`named_parameters` shows what slots hold: alike on all ranks, and not the weight's bytes."""

    def go(group: Group) -> str:
        module = random_stack()
        state, expected = shifted(module, 0.3)
        first = outputs(module)
        with attach(module, group) as attached:
            text = raised(lambda: attached.update(module.named_parameters()))
            assert raised(lambda: attached.update(dict(module.named_parameters()))) == text
            assert equal(outputs(module), first)
            attached.update(module.state_dict())
            assert equal(outputs(module), first)
            attached.update(state)
            assert equal(outputs(module), expected)
            return text

    first, second = run_on_ranks(go, 2)
    assert first == second and "layers.0.norm.weight is a view of a slot" in first and "state_dict()" in first


def test_tensors_of_a_module_are_accounted_for() -> None:
    module = random_stack()
    state, _ = shifted(module, 0.3)
    first = outputs(module)
    with attach(module) as attached:
        less = {name: one for name, one in state.items() if name != "embed.bias"}
        other = state | {"head.bias": state["head.bias"].double()}
        for wrong, words in (
            (less, r"missing\s+embed.bias"),
            (state | {"rotary.inv_freq": torch.zeros(3)}, r"not asked for\s+rotary.inv_freq"),
            (other, r"another dtype\s+head.bias is float64\[48\], the model asks for float32\[48\]"),
        ):
            with pytest.raises(GraphshardError, match=words):
                attached.update(wrong)
        assert equal(outputs(module), first)


def test_parts_of_a_module_in_inference_mode() -> None:
    """`only` and `keep` take names inside and outside the layers."""
    module = random_stack()
    state, expected = shifted(module, 0.3)
    first = outputs(module)
    with torch.inference_mode(), attach(module) as attached:
        report = attached.update({name: one for name, one in state.items() if "embed" in name}, only="embed.*")
        assert report.updated == ("embed.weight", "embed.bias")
        assert torch.equal(module.embed.weight, state["embed.weight"]) and not equal(outputs(module), first)
        attached.update({name: one for name, one in state.items() if "embed" not in name}, keep="embed.*")
        assert equal(outputs(module), expected)
