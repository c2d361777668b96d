"""Fusions that rewrite weights after sharding are noticed when the next step begins, and refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from server_modules import checkpoint_of, load_all, prepare_server, server_model
from small_modules import WIDTH, Stack, attach, equal, inputs, outputs, random_stack
from torch import nn

from graphshard.comm.group import LocalGroup
from graphshard.core.errors import ProgramError
from graphshard.runtime.attach import Attached
from graphshard.runtime.attach.placement import Placement


@contextmanager
def finalized() -> Iterator[nn.Module]:
    """One rank, whose weights are sharded all the same."""
    parts = [12, 4, 5]
    prepared = prepare_server(server_model(parts, WIDTH), LocalGroup(1)[0], parts)
    load_all(prepared, checkpoint_of(server_model(parts, WIDTH, "cpu")), parts)
    with torch.no_grad(), prepared.finalize(min_shard_bytes=0, units="layer", prefetch_depth=1):
        yield prepared.module


def _data(layer: nn.Module) -> None:
    layer.up.weight.data = layer.up.weight.data.clone()  # type: ignore[union-attr, operator]


def _parameter(layer: nn.Module) -> None:
    layer.up.weight = nn.Parameter(layer.up.weight.data)  # type: ignore[union-attr, arg-type]


def _transposed(layer: nn.Module) -> None:
    layer.up.weight = nn.Parameter(layer.up.weight.data.t().contiguous())  # type: ignore[union-attr, operator]


def _table(layer: nn.Module) -> None:
    layer.up._parameters["weight"] = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))  # type: ignore[union-attr, index]


def _cat(layer: nn.Module) -> None:
    flat = [part.weight.data.view(-1) for part in (layer.up, layer.down)]  # type: ignore[union-attr, operator]
    layer.fused = nn.Parameter(torch.cat(flat))


def _new_module(layer: nn.Module) -> None:
    layer.fused = nn.Linear(WIDTH, 3)


def _cat_instead(layer: nn.Module) -> None:
    _cat(layer)
    del layer.up


def _module(layer: nn.Module) -> None:
    layer.up = nn.Linear(WIDTH, 2 * WIDTH)


def _none(layer: nn.Module) -> None:
    layer.up.bias = None  # type: ignore[union-attr]


def _bias(layer: nn.Module) -> None:
    layer.norm.bias.data = torch.zeros(WIDTH)  # type: ignore[union-attr]


FUSIONS: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "data of its own": (_data, r"weight layers\.1\.up\.weight was given other memory \(float32\[96, 48\]\) after"),
    "another parameter": (_parameter, r"weight layers\.1\.up\.weight was replaced by float32\[96, 48\] after"),
    "a transposed copy": (_transposed, r"weight layers\.1\.up\.weight was replaced by float32\[48, 96\] after"),
    "past the setter": (_table, r"weight layers\.1\.up\.weight was replaced by"),
    "a concatenation beside": (_cat, r"parameter layers\.1\.fused \(float32\[9216\]\) was added after"),
    "a module beside": (_new_module, r"parameter layers\.1\.fused\.weight .* was added after"),
    "a concatenation instead": (_cat_instead, r"weight layers\.1\.up\.weight was taken away after"),
    "another module": (_module, r"weight layers\.1\.up\.weight was replaced by"),
    "nothing": (_none, r"weight layers\.1\.up\.bias was taken away after"),
    "a resident weight": (_bias, r"weight layers\.1\.norm\.bias was given other memory"),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_a_fusion_after_attach_is_refused_at_the_next_step(name: str) -> None:
    fuse, expected = FUSIONS[name]
    module = random_stack()
    with attach(module, min_shard_bytes=1024):
        outputs(module)
        fuse(module.layers[1])
        for _ in range(2):  # and stays refused
            with pytest.raises(
                ProgramError, match=expected + r".* Fuse before attach\(\): load, .*or detach\(\) first"
            ):
                outputs(module)


def test_a_fusion_after_finalize_names_finalize() -> None:
    with finalized() as module:
        x = torch.ones(1, WIDTH)
        module(x)
        layer = module.get_submodule("layers.1")
        layer.out.weight = nn.Parameter(layer.out.weight.data.t().contiguous(), requires_grad=False)  # type: ignore[union-attr, operator]
        with pytest.raises(ProgramError, match=r"weight layers\.1\.out\.weight .* Fuse before finalize\(\)"):
            module(x)


def test_a_loop_of_ones_own_is_refused_too_and_goes_on_when_the_weight_is_back() -> None:
    module = nn.ModuleList(random_stack().layers)
    with torch.no_grad(), attach(module, own_loop=True) as attached:
        parameter = module[0].up.weight  # type: ignore[union-attr]
        module[0].up.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))  # type: ignore[union-attr, assignment]
        with pytest.raises(ProgramError, match=r"weight 0\.up\.weight was replaced"):
            attached.begin_step()
        module[0].up.weight = parameter  # type: ignore[union-attr, assignment]
        run_layers(module, attached)


def run_layers(module: nn.ModuleList, attached: Attached) -> None:
    with attached.begin_step() as step:
        x = torch.ones(1, WIDTH)
        for i, layer in enumerate(module):
            step.before_layer(i)
            x = layer(x)
            step.after_layer(i)


def _buffer(stack: Stack) -> None:
    stack.layers[0].register_buffer("table", torch.zeros(3))


def _activation(stack: Stack) -> None:
    stack.layers[0].activation = nn.ReLU()


def _outside(stack: Stack) -> None:
    with torch.no_grad():
        stack.head.weight = nn.Parameter(stack.head.weight.clone())


def _flag(stack: Stack) -> None:
    stack.layers[0].up.weight.requires_grad_(False)  # type: ignore[union-attr, operator]


def _attribute(stack: Stack) -> None:
    stack.layers[0].scale = torch.ones(1)


@pytest.mark.parametrize("change", [_buffer, _activation, _outside, _flag, _attribute])
def test_what_touches_no_sharded_weight_passes(change: Callable[[Stack], None]) -> None:
    module = random_stack()
    expected = outputs(module)
    with attach(module):
        outputs(module)
        change(module)
        for _ in range(2):
            assert equal(outputs(module), expected)


def test_a_weight_that_is_kept_whole_may_be_replaced() -> None:
    module = random_stack()
    module.head.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    module.layers[0].extra = nn.Linear(WIDTH, WIDTH)
    module.layers[0].extra.weight = module.head.weight  # type: ignore[union-attr]
    with attach(module):
        outputs(module)
        module.layers[0].extra.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))  # type: ignore[union-attr]
        with pytest.raises(ProgramError, match=r"parameter layers\.0\.extra\.weight .* was added"):
            outputs(module)  # nobody can tell it from a fused copy


def test_layers_that_find_their_weights_in_several_slots_are_where_they_were_bound() -> None:
    module, order = random_stack(3, order=[0, 1, 2, 0, 1]), [0, 1, 2, 0, 1]
    expected = outputs(module)
    with attach(module, order=order) as attached:
        slots = {(stay.unit, stay.slot) for stay in attached.plan.residencies}
        assert len(slots) > len({unit for unit, _ in slots}), "some unit comes to several slots"
        for _ in range(3):
            assert equal(outputs(module), expected)
        with torch.no_grad():
            module.layers[0].up.weight.data = torch.zeros(2 * WIDTH, WIDTH)  # type: ignore[union-attr]
            with pytest.raises(ProgramError, match=r"layers\.0\.up\.weight was given other memory"):
                module(inputs()[0])


def test_the_check_itself_sees_every_object_and_address() -> None:
    stack = random_stack()
    layers = [(f"layers.{i}", layer) for i, layer in enumerate(stack.layers)]
    bound = {name: parameter for name, parameter in stack.named_parameters() if name.startswith("layers")}
    placement = Placement(layers, bound, "attach()")
    placement.check()
    for name, parameter in bound.items():
        data = parameter.data
        parameter.data = data.clone()
        with pytest.raises(ProgramError, match=f"weight {name} was given other memory".replace(".", r"\.")):
            placement.check()
        parameter.data = data
        placement.check()
