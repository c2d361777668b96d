"""`attach`: a module runs as before, bit for bit, and whatever would compute with other layers' bytes is refused."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from census import no_growth
from fault_tools import InThread
from ranks import MODES, run_on_ranks, try_on_ranks
from small_modules import WIDTH, Block, Stack, attach, equal, in_order, inputs, outputs, random_stack, twin
from torch import Tensor, nn

import graphshard
from graphshard.comm.group import Group
from graphshard.runtime.runtime import Runtime

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
def test_every_plan_gives_the_same_bits(choices: dict[str, Any]) -> None:
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


def test_strided_weights_keep_their_strides_and_every_dtype_its_bits() -> None:
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
        assert all(torch.equal(_bits(p), _bits(whole[name])) for name, p in module.named_parameters())


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


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


# --- what is left alone, what is refused ---


def test_tied_weights_stay_whole_with_the_reason() -> None:
    module = random_stack(3)
    module.embed.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH)[:WIDTH])
    module.layers[0].up.weight = module.head.weight  # type: ignore[union-attr, assignment]
    module.layers[0].up.bias = nn.Parameter(torch.randn(WIDTH))  # type: ignore[union-attr, assignment]
    module.layers[0].down.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))  # type: ignore[union-attr, assignment]
    module.layers[2].norm = module.layers[1].norm  # type: ignore[union-attr, assignment]
    module.layers[2].down.weight = nn.Parameter(  # type: ignore[union-attr, assignment]
        module.layers[1].down.weight.data  # type: ignore[union-attr]
    )
    expected = outputs(module)
    with attach(module, check=True) as attached:
        assert equal(outputs(module), expected)
        report = " ".join(attached.report().split())
        assert "layers.0.up.weight untouched tied to head.weight, outside the layers" in report
        assert "layers.1.norm.weight untouched shared by layers 1 2" in report
        assert "layers.1.down.weight untouched shared by layers 1 2" in report
        assert "layers.1.up.weight" in attached.plan.units[1].weights


class Marked(nn.Parameter):
    """What quantisers make of a parameter."""


def test_subclasses_and_quantised_weights_stay_whole_with_the_reason() -> None:
    module = random_stack()
    module.layers[1].up.weight = Marked(module.layers[1].up.weight.data)  # type: ignore[union-attr, assignment]
    with torch.inference_mode():
        module.layers[2].up.weight = nn.Parameter(  # type: ignore[union-attr, assignment]
            torch.randn(2 * WIDTH, WIDTH), requires_grad=False
        )
    expected = outputs(module)
    with attach(module) as attached:
        assert equal(outputs(module), expected)
        report = " ".join(attached.report().split())
        assert "layers.1.up.weight untouched is a Marked: only plain parameters are sharded" in report
        assert "layers.2.up.weight untouched was made in inference mode" in report


def test_weights_without_bytes_here_are_refused() -> None:
    module = random_stack()
    module.layers[1].to("meta")
    with pytest.raises(graphshard.SpecError, match=r"layers.1.norm.weight is on the meta device .* load the module"):
        attach(module)
    module = random_stack()
    module.layers[1].up = nn.LazyLinear(WIDTH)  # type: ignore[union-attr, assignment]
    with pytest.raises(graphshard.SpecError, match=r"layers.1.up.weight is uninitialised: run the module once"):
        attach(module)


def test_a_dtensor_is_refused(tmp_path: Any) -> None:
    from torch import distributed
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        module = random_stack()
        whole = module.layers[1].up.weight  # type: ignore[union-attr]
        split = distribute_tensor(whole.detach(), init_device_mesh("cpu", (1,)))  # type: ignore[arg-type]
        module.layers[1].up.weight = nn.Parameter(split)  # type: ignore[union-attr, assignment]
        with pytest.raises(graphshard.SpecError, match=r"layers.1.up.weight is a DTensor, which is split over ranks"):
            attach(module)
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_modules_are_refused() -> None:
    module = random_stack()
    with pytest.raises(graphshard.SpecError, match=r"OptimizedModule is compiled by torch.compile"):
        attach(torch.compile(module))  # type: ignore[arg-type]
    module.layers[1].compile()
    with pytest.raises(graphshard.SpecError, match=r"layers.1 is compiled by torch.compile"):
        attach(module)
    module = random_stack()
    module.layers[2] = torch.jit.trace(Block(), inputs()[0])
    with pytest.raises(graphshard.SpecError, match=r"layers.2 is a ScriptModule"):
        attach(module)


def test_attaching_twice_is_refused() -> None:
    module = random_stack()
    with (
        attach(module),
        pytest.raises(graphshard.SpecError, match=r"layers.0 is attached already: detach\(\) it first"),
    ):
        attach(module)


def unlike_on_rank_1(group: Group) -> list[bool]:
    module = random_stack()
    if group.rank == 1:
        with torch.no_grad():
            module.layers[1].up.weight[3, 4] += 2.0**-20  # type: ignore[union-attr, index]
            module.layers[2].up.bias[0] = float("nan")  # type: ignore[union-attr, index]
    whole = {name: parameter.data.clone() for name, parameter in module.named_parameters()}
    try:
        attach(module, group)
    finally:
        assert all(torch.equal(_bits(p), _bits(whole[name])) for name, p in module.named_parameters()), (
            "nothing changed"
        )
    return []


def test_a_weight_that_is_not_replicated_is_named_on_all_ranks_before_anything_changes() -> None:
    errors = [outcome.error for outcome in try_on_ranks(unlike_on_rank_1, 3)]
    assert len(set(errors)) == 1
    assert errors[0].startswith("weight layers.1.up.weight is not replicated: its hash is ")
    assert "on ranks 0 2" in errors[0] and "on rank 1 (2 of 15 weights differ)" in errors[0]
    assert "exclude=['layers.1.up.weight']" in errors[0]


def unlike_lists(group: Group) -> None:
    attach(random_stack(3 + group.rank), group)


def test_ranks_with_unlike_modules_are_told() -> None:
    errors = [outcome.error for outcome in try_on_ranks(unlike_lists, 2)]
    assert len(set(errors)) == 1
    assert "the next is none on rank 0, layers.3." in errors[0]


def too_little_on_rank_1(group: Group) -> None:
    module = random_stack()
    if group.rank == 1:
        del module.layers[:]
    before = outputs(module)
    try:
        attach(module, group)
    finally:
        assert equal(outputs(module), before)


def test_what_fails_on_one_rank_fails_on_all_and_changes_nothing() -> None:
    errors = [outcome.error for outcome in try_on_ranks(too_little_on_rank_1, 2)]
    assert len(set(errors)) == 1 and errors[0].startswith("attach failed on rank 1: Stack has no ModuleList")


def test_a_failure_after_weights_were_given_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runtime: Runtime) -> None:
        raise graphshard.CommError("as asked")

    monkeypatch.setattr(Runtime, "check_gathers", fail)
    with pytest.raises(graphshard.CommError, match=r"as asked\. 15 weights of the module are gone: load it again"):
        attach(random_stack())


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
