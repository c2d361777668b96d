"""`attach`: a module runs as before, bit for bit, and whatever would compute with other layers' bytes is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import MODES, run_on_ranks
from small_modules import WIDTH, Block, Stack, attach, bits, equal, inputs, outputs, random_stack, twin
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group

# --- the same bits ---


def rank_outputs(group: Group, choices: dict[str, Any]) -> dict[str, Any]:
    module = random_stack(4)
    expected = outputs(module)
    with attach(module, group, **choices) as attached:
        if group.rank == 1:
            return {"units": len(attached.plan.units)}  # under pull nobody waits for an idle rank
        return {"equal": [equal(outputs(module), expected) for _ in range(3)], "units": len(attached.plan.units)}


@pytest.mark.parametrize("mode", MODES)
def test_an_attached_module_gives_the_same_bits_while_its_peer_is_idle(mode: str) -> None:
    found = run_on_ranks(rank_outputs, 2, {}, mode=mode)
    assert found == [{"equal": [True] * 3, "units": 4}, {"units": 4}]


@pytest.mark.parametrize(
    "choices",
    [
        {"prefetch_depth": 0},
        {"prefetch_depth": 2},
        {"units": "weight"},
        {"units": "bytes:20KiB"},
        {"head": "tail"},
        {"head": "outside"},
        {"min_shard_bytes": 1024},
        {"exclude": ["layers.1.*"]},
        {"num_copy_streams": 2},
        {"check": True},
    ],
)
def test_every_plan_gives_the_samebits(choices: dict[str, Any]) -> None:
    found = run_on_ranks(rank_outputs, 3, choices)
    assert found[0]["equal"] == [True] * 3 and found[2]["equal"] == [True] * 3


def test_a_replicated_plan_and_one_rank_alone_shard_nothing() -> None:
    for choices in ({"plan": "replicated"}, {"units": "auto"}):
        module = random_stack()
        expected = outputs(module)
        with graphshard.attach(module, graphshard.LocalGroup(1)[0], **choices) as attached:  # type: ignore[arg-type]
            assert attached.plan.units == () and equal(outputs(module), expected)


def test_parameters_stay_the_same_objects_at_fixed_addresses() -> None:
    module = random_stack()
    before = dict(module.named_parameters())
    with attach(module):
        addresses = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
        outputs(module)
        for name, parameter in module.named_parameters():
            assert parameter is before[name] and parameter.data_ptr() == addresses[name]
        assert type(module) is Stack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    module = random_stack().to(dtype)
    x = inputs()[1].to(dtype)
    with torch.no_grad():
        expected = module(x)
        with attach(module):
            assert torch.equal(module(x), expected)


class Odd(nn.Module):
    """Weights of odd kinds: strided, with gaps, without elements, without dimensions, of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.gapped = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Parameter(torch.randint(-9, 9, (7,), dtype=torch.int8), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(WIDTH) > 0.5, requires_grad=False)
        self.float8 = nn.Parameter(torch.randn(WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.complex = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = x @ self.transposed + x @ self.gapped * self.scalar + x @ self.expanded
        x = x + self.float8.float() + self.complex.real * self.mask + self.table.sum()
        return torch.tanh(x) + self.empty.sum()


def test_strided_weights_keep_their_strides_and_every_dtype_itsbits() -> None:
    torch.manual_seed(3)
    module = nn.Sequential(Odd(), Odd(), Odd())
    reference = twin(module)
    with torch.no_grad():
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            theirs.data = mine.data  # deepcopy makes strided tensors contiguous
        expected = outputs(reference)
        strides = {name: p.stride() for name, p in module.named_parameters()}
        whole = {name: p.detach().clone() for name, p in module.named_parameters()}
        attached = attach(module)
        assert equal(outputs(module), expected)
        assert attached.runtime.model.weight("0.transposed").strides == (1, WIDTH)
        assert {name: p.stride() for name, p in module.named_parameters()} == strides
        attached.detach()
        assert {name: p.stride() for name, p in module.named_parameters()} == strides
        assert all(torch.equal(bits(p), bits(whole[name])) for name, p in module.named_parameters())


# --- which layers ---


def test_a_layer_called_twice_has_two_residencies() -> None:
    for order in ([0, 1, 0, 1, 2], [0, 0, 1, 1, 2], [2, 1, 0, 2, 1, 0, 2], [0, 1, 2, 0]):
        module = random_stack(3, order)
        expected = outputs(module)
        with attach(module, order=order, check=True) as attached:
            assert equal(outputs(module), expected), order
            num_stays = len({stay.begin for stay in attached.plan.residencies})
            assert num_stays == sum(order[i] != order[i - 1] for i in range(1, len(order))) + 1


def test_a_weight_that_lies_in_two_slots_moves_with_its_calls() -> None:
    order = [0, 1, 2, 0, 1]
    module = random_stack(3, order)
    expected = outputs(module)
    with attach(module, order=order) as attached:
        slots = {(stay.unit, stay.slot) for stay in attached.plan.residencies}
        assert len(slots) > len(attached.plan.units), "this plan is to have a unit in two slots"
        assert equal(outputs(module), expected)


def test_a_layer_that_is_listed_twice_is_one_layer() -> None:
    module = random_stack(2)
    module.layers.append(module.layers[0])
    expected = outputs(module)
    with attach(module) as attached:
        assert attached.layers.order == (0, 1, 0) and len(attached.plan.units) == 2
        assert equal(outputs(module), expected)
        assert equal([*module.state_dict().values()], [*random_stack_listed_twice().state_dict().values()])


def random_stack_listed_twice() -> Stack:
    module = random_stack(2)
    module.layers.append(module.layers[0])
    return module


class Owned(nn.Module):
    """nanoGPT's way: the list lies in a dict of modules that has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"h": nn.ModuleList(Block() for _ in range(3))})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.parts["h"]:  # type: ignore[union-attr]
            x = layer(x)
        return x


def test_lists_are_found_wherever_they_lie() -> None:
    stack = random_stack()
    for module, path, run in (
        (Owned(), "parts.h", None),
        (nn.Sequential(Block(), Block()), "", None),
        (nn.Sequential(stack, nn.Linear(WIDTH, WIDTH)), "0.layers", None),
        (nn.ModuleList(Block() for _ in range(3)), "", "nobody's forward"),
    ):

        def call(x: Tensor, module: Any = module, run: Any = run) -> Tensor:
            if run is None:
                return module(x)
            for layer in module:
                x = layer(x)
            return x

        expected = outputs(call)  # type: ignore[arg-type]
        with attach(module) as attached:
            assert attached.layers.path == path
            assert equal(outputs(call), expected) and equal(outputs(call), expected)  # type: ignore[arg-type]


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = random_stack(2), random_stack(3)
        self.stages = nn.ModuleList([nn.ModuleList([Block()])])

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


def test_two_lists_are_named_and_both_can_be_attached() -> None:
    module = TwoStacks()
    expected = outputs(module)
    with pytest.raises(graphshard.SpecError, match=r"several lists of layers: 'decoder.layers' \(.* KiB\), 'encoder"):
        attach(module)
    first, second = attach(module, layers="encoder.layers"), attach(module, layers="decoder.layers", check=True)
    assert equal(outputs(module), expected)
    first.detach()
    assert equal(outputs(module), expected)
    with pytest.raises(graphshard.ProgramError, match=r"Stack: .* detach"):
        module.decoder.half()
    second.detach()
    assert equal(outputs(module), expected)
    module.half()


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({"layers": "leyers"}, r"Stack has no module at layers='leyers'; its lists of layers are 'layers'"),
        ({"order": [0, 3]}, r"order=\[0, 3\] is refused: layers has layers 0 to 2"),
        ({"order": []}, r"order=\[\] is refused"),
        ({"layers": "head"}, r"head is an empty list of layers"),
        ({"units": "leyer"}, r"unknown unit policy"),
        ({"prefetch": 1}, r"unknown plan options prefetch"),
    ],
)
def test_bad_requests_are_refused_before_anything_changes(choices: dict[str, Any], expected: str) -> None:
    module = random_stack()
    before = outputs(module)
    with pytest.raises(graphshard.SpecError, match=expected):
        attach(module, **choices)
    assert equal(outputs(module), before)
    attach(module).detach()


def test_a_list_of_lists_is_refused_with_the_way_out() -> None:
    expected = r"stages holds lists of modules \(0\), which are never called themselves; .* layers='stages.0'"
    with pytest.raises(graphshard.SpecError, match=expected):
        attach(TwoStacks(), layers="stages")


def test_a_module_without_a_list_is_refused() -> None:
    with pytest.raises(graphshard.SpecError, match="Linear has no ModuleList of layers"):
        attach(nn.Linear(4, 4))
